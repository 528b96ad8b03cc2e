"""Device maps: layers per GPU, the map that transformers gets, and refusals with several devices."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import dispatch_model

import specbench_ss as api
from specbench_ss.engine.engines import check_engine
from specbench_ss.engine.target import Target
from specbench_ss.engine.timing import Clock
from specbench_ss.errors import UserError
from specbench_ss.models.devices import KNOWN, check_one_device, divided, in_order, resolve_device, resolve_dtype
from specbench_ss.models.load import load_model
from specbench_ss.models.quantize import check_quantize
from specbench_ss.models.tiny import ARCHITECTURES, WHOLE, tiny_model
from tests.cli import failing

TWO = "cuda:0,cuda:1"
NAMES = ["cuda:0", "cuda:1"]
MUCH = 1 << 40


@pytest.mark.parametrize("kind", [*ARCHITECTURES, *WHOLE])
def test_every_tensor_has_one_device_and_layers_are_in_order(kind: str) -> None:
    model = tiny_model(kind)
    where = divided(model, NAMES, [MUCH, MUCH], torch.float32)
    tensors = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    found = {name: {at for module, at in where.items() if f"{name}.".startswith(f"{module}.")} for name in tensors}
    assert all(len(at) == 1 for at in found.values())
    embedding = next(n for n, p in model.named_parameters() if p is model.get_input_embeddings().weight)
    assert found[embedding] == {"cuda:0"}
    of_layers = [at for module, at in where.items() if module.rpartition(".")[2].isdecimal()]
    assert of_layers == ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]


@pytest.mark.parametrize("room", [[1, 1], [3, 1], [1, 3], [5, 2, 3], [0, 4], [4, 0]])
def test_layers_are_shared_out_in_proportion_to_room(room: list[int]) -> None:
    found = in_order([7] * 40, room)
    assert found == sorted(found)
    counts = Counter(found)
    for i, size in enumerate(room):
        assert abs(counts[i] - 40 * size / sum(room)) <= 1


def test_what_lies_next_to_the_layers_takes_room_on_the_first_device() -> None:
    model = tiny_model("llama", vocab=4001)
    every, of_layers = (
        sum(4 * t.numel() for t in (*module.parameters(), *module.buffers())) for module in (model, model.model.layers)
    )
    where = divided(model, NAMES, [every - of_layers * 3 // 4, of_layers], torch.float32)
    assert [where[f"model.layers.{i}"] for i in range(4)] == ["cuda:0", "cuda:1", "cuda:1", "cuda:1"]


def test_a_model_that_fits_nowhere_is_refused_before_it_is_loaded() -> None:
    with pytest.raises(UserError, match=r"the model does not fit: .* free: 0\.0 GiB on cuda:0, 0\.0 GiB on cuda:1"):
        divided(tiny_model("llama"), NAMES, [1 << 15, 1 << 14], torch.float32)
    with pytest.raises(UserError, match="the model has 4 layers, too few for 5 devices"):
        divided(tiny_model("llama"), [f"cuda:{i}" for i in range(5)], [MUCH] * 5, torch.float32)


def test_weights_are_read_to_their_device_and_hooks_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No second device is here: transformers is asked for one device instead, and accelerate's hooks are put in."""
    tiny_model("llama").save_pretrained(tmp_path)
    asked: list[Any] = []
    real = transformers.AutoModelForCausalLM.from_pretrained

    def one_device(*given: Any, device_map: Any, **options: Any) -> Any:
        asked.append(device_map)
        model, info = real(*given, device_map=dict.fromkeys(device_map, "cpu"), **options)
        return dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True), info

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", one_device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (MUCH, MUCH))
    before = torch.get_rng_state()
    model = load_model(str(tmp_path), torch.float32, TWO)
    assert torch.equal(before, torch.get_rng_state())
    assert [asked[0][f"model.layers.{i}"] for i in range(4)] == ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]
    assert {asked[0][n] for n in ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")} == {"cuda:0"}
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())
    assert torch.equal(Target(model).next_logits([5, 6, 7]), Target(tiny_model("llama")).next_logits([5, 6, 7]))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("cuda:0,cuda:0", "cuda:0 is listed twice"),
        ("cuda:0,cpu", "'cpu' is not a GPU"),
        ("cuda,cuda:1", "'cuda' is not a GPU"),
        ("cuda:0,", "'' is not a GPU"),
        ("cuda:all,cuda:0", "'cuda:all' is not a GPU"),
        (",", "'' is not a GPU"),
        ("", "unknown device ''"),
        (" ", "unknown device ' '"),
        ("cuda:0 cuda:1", "unknown device 'cuda:0 cuda:1'"),
        ("cuda:-1", "unknown device 'cuda:-1'"),
    ],
)
def test_a_device_that_no_machine_has_is_refused(given: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as refused:
        resolve_device(given)
    assert KNOWN in str(refused.value)


def test_a_list_of_devices_is_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="device 'cuda:all' is not available: torch detects no GPU"):
        resolve_device("cuda:all")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda:all") == TWO
    monkeypatch.setattr(torch, "empty", lambda *_, device: None)
    assert resolve_device("cuda:0, cuda:1") == TWO
    assert resolve_dtype("auto", TWO) == torch.bfloat16


def test_what_takes_one_device_states_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="engine graph runs on one device, not cuda:0,cuda:1"):
        check_engine("graph", TWO)
    check_engine("eager", TWO)
    with pytest.raises(UserError, match="--quantize int8 takes one device, not cuda:0,cuda:1"):
        check_quantize("int8", TWO)
    with pytest.raises(UserError, match="training takes one device, not cuda:all"):
        check_one_device("cuda:all", "training")
    train = ["train", "medusa", "--device", TWO, "--data", "lab", "--out", str(tmp_path / "out")]
    for command in (["doctor", "--device", TWO], ["paper", "figure-9", "--device", TWO], train):
        assert "takes one device" in failing(command, capsys)


@pytest.mark.parametrize("device", [TWO, "cuda:all"])
def test_what_several_devices_cannot_do_is_reported_before_they_are_looked_for(
    device: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a machine without any GPU states it as well. None is asked for here."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("a GPU was looked for"))
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    gguf, run = str(tmp_path / "model.gguf"), ["run", "--methods", "ar", "--device", device]
    for command, words in (
        ([*run, "--engine", "graph"], "--engine graph takes one device"),
        ([*run, "--quantize", "int8"], "--quantize int8 takes one device"),
        ([*run, "--executor", "ray"], "--executor ray takes one device"),
        ([*run, "--model", gguf], "takes one device, not cuda"),
        (["tune", "pld", "--device", device, "--model", gguf], "takes one device, not cuda"),
    ):
        assert words in failing(command, capsys)
    for given in ({"engine": "graph"}, {"quantize": "nf4"}, {"model": gguf}):
        with pytest.raises(UserError, match="takes one device"):
            api.load_model(**{"model": "lab", "device": device, **given})


def test_a_step_ends_when_every_device_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    here = [torch.device(name) for name in NAMES]
    Clock(*here).sync()
    assert waited == here
