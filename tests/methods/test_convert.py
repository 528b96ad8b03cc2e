"""Drafters written for other programs: names and shapes of vLLM, the same drafts here, and what is refused."""

from __future__ import annotations

import json
import shlex
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from specbench_ss import generate, load_method, registry
from specbench_ss.cli.main import main
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.methods.block_drafters.decode import PEagle, PEagleOptions
from specbench_ss.methods.block_drafters.peagle import random_drafter
from specbench_ss.methods.medusa.decode import Medusa, MedusaOptions
from specbench_ss.models.resolve import LAB
from specbench_ss.models.tiny import tiny_target
from tests.cli import failing
from tests.tiny import few

METHODS = {  # of vLLM
    "medusa": "medusa", "eagle": "eagle", "eagle2": "eagle", "eagle3": "eagle3", "dflash": "dflash", "dspark": "dspark",
}  # fmt: skip
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def written(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


def eagle(folder: Path, tensors: dict[str, torch.Tensor], method: str = "eagle", **config: Any) -> str:
    """Write the lab's drafter of EAGLE or EAGLE-3 with further tensors; return it as a method."""
    shutil.copytree(LAB / method, folder)
    save_file(load_file(folder / "model.safetensors") | tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | config))
    return f"{method}[weights={folder}]"


@few(3)
@pytest.mark.parametrize("method", METHODS)
def test_a_converted_drafter_drafts_the_same(method: str, lab: Target, tmp_path: Path) -> None:
    first = load_method(method, lab)
    settings = first.export(tmp_path / "made")
    assert settings["method"] == METHODS[method] and settings["num_speculative_tokens"] > 1
    second = load_method(method, lab, weights=str(tmp_path / "made"))
    assert second.metadata() == first.metadata() and second.advised == first.advised
    assert second.training_info == first.training_info != {"tokens": None}
    ids = lab.encode_chat([{"role": "user", "content": "Translate to German: The house is small."}])
    drafted = [
        [(step.draft_nodes, step.accepted_tokens) for step in generate(one, ids, max_new_tokens=24).steps]
        for one in (first, second)
    ]
    assert drafted[0] == drafted[1] and sum(accepted for _, accepted in drafted[0]) > 0


def test_every_method_that_can_is_tested() -> None:
    able = {name for name, kind in registry.load_all(registry.METHODS).items() if kind.can_export}
    assert able == {*METHODS, "peagle"}


def test_p_eagle_is_written_with_vllms_settings(tmp_path: Path) -> None:
    target = tiny_target("llama", layers=6)
    drafter = random_drafter(target)
    settings = PEagle(target, PEagleOptions(), drafter).export(tmp_path)
    assert settings == {"method": "eagle3", "parallel_drafting": True, "num_speculative_tokens": 5}
    tensors, config = written(tmp_path)
    assert config["speculators_model_type"] == "peagle" and "mask_token_id" in config
    assert {name: tensor.shape for name, tensor in drafter.state_dict().items()} == {
        name: tensor.shape for name, tensor in tensors.items()
    }
    assert load_method("peagle", target, weights=str(tmp_path)).drafter.shape == drafter.shape


@pytest.mark.parametrize("own", [True, False])
def test_medusa_heads_compute_in_vllms_layout_what_they_compute_here(own: bool, tmp_path: Path) -> None:
    """Names, shapes and forward pass as in vLLM's model_executor/models/medusa.py."""
    target, n, layers = tiny_target("llama"), 3, 2
    heads = Medusa.random(target, n, own, layers=layers)
    assert heads.export(tmp_path) == {"method": "medusa", "num_speculative_tokens": n}
    tensors, config = written(tmp_path)
    h, v = target.hidden_size, target.vocab_size
    shapes = {f"blocks.{i}.layers.{j}.weight": (h, h) for i in range(n) for j in range(layers)}
    shapes |= {f"blocks.{i}.layers.{j}.bias": (h,) for i in range(n) for j in range(layers)}
    shapes |= {f"lm_heads.{i}.weight": (v, h) for i in range(n)} if own else {"lm_head.weight": (v, h)}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == shapes
    stated = {"model_type": "medusa", "hidden_size": h, "vocab_size": v, "num_heads": n, "num_hidden_layers": layers}
    assert config == {
        "architectures": ["MedusaModel"], **stated, "medusa_fc_bias": True, "original_lm_head": not own
    }  # fmt: skip
    states = torch.randn(5, h, generator=torch.Generator().manual_seed(0))
    for i, logits in enumerate(heads.drafter(states, target.logits)):
        x = states
        for j in range(layers):
            weight, bias = (tensors[f"blocks.{i}.layers.{j}.{part}"].float() for part in ("weight", "bias"))
            x = x + F.silu(F.linear(x, weight, bias))
        head = tensors[f"lm_heads.{i}.weight" if own else "lm_head.weight"].float()
        torch.testing.assert_close(F.linear(x, head), logits, atol=1e-2, rtol=1e-2)
    again = Medusa.load(target, MedusaOptions(str(tmp_path), tree="published")).drafter
    assert (again.unembed is None) != own and again.weight.shape == heads.drafter.weight.shape
    torch.testing.assert_close(again.weight, heads.drafter.weight, atol=1e-3, rtol=1e-3)


def test_the_authors_bias_key_is_mended(lab: Target, tmp_path: Path) -> None:
    """It means fc's bias there, and the biases of the attention in vLLM."""
    method = eagle(tmp_path / "e", {"fc.bias": torch.zeros(256)}, bias=True)
    load_method(method, lab).export(tmp_path / "made")
    tensors, config = written(tmp_path / "made")
    assert tensors.keys() == load_file(LAB / "eagle" / "model.safetensors").keys()
    assert (config["bias"], config["attention_bias"]) == (False, False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_method("eagle", lab, weights=str(tmp_path / "made"))


def attention_biases(*names: str) -> dict[str, torch.Tensor]:
    rows = {"q_proj": 256, "k_proj": 128, "v_proj": 128, "o_proj": 256}
    return {f"layers.0.self_attn.{name}.bias": torch.full((rows[name],), 0.5) for name in names}


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_biases_of_the_attention_are_kept_if_vllm_reads_them(method: str, lab: Target, tmp_path: Path) -> None:
    biased = attention_biases(*PROJECTIONS) | {"fc.bias": torch.zeros(256)}
    load_method(eagle(tmp_path / "four", biased, method), lab).export(tmp_path / "made")
    tensors, config = written(tmp_path / "made")
    assert config.get("transformer_layer_config", config)["attention_bias"] is True
    assert attention_biases(*PROJECTIONS).keys() <= tensors.keys() and "fc.bias" not in tensors
    three = load_method(eagle(tmp_path / "three", attention_biases(*PROJECTIONS[:3]), method), lab)
    with pytest.raises(UserError, match="3 of 4"):
        three.export(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_drafter_that_reads_the_final_state_is_refused(lab: Target, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="final state"):
        load_method("eagle3[layers=2:4:-1]", lab).export(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_the_command_prints_vllms_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "made"
    monkeypatch.chdir(tmp_path)
    assert main(["models", "convert", "medusa", "--out", "made"]) == 0
    captured = capsys.readouterr()
    flag, settings = shlex.split(captured.out.splitlines()[-1].partition("vLLM: ")[2])
    assert flag == "--speculative-config" and not captured.err
    assert json.loads(settings) == {"method": "medusa", "num_speculative_tokens": 4, "model": str(out)}
    stated = failing(["models", "convert", "medusa", "--out", str(out)], capsys)
    assert "not empty" in stated and sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_a_bias_that_vllm_drops_is_refused_in_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    method = eagle(tmp_path / "e", {"fc.bias": torch.ones(256)}, name)
    stated = failing(["models", "convert", method, "--out", str(tmp_path / "none")], capsys)
    assert "vLLM drops fc.bias" in stated and not (tmp_path / "none").exists()
