"""What ended in a traceback, a hang or many lines: one clear line, exit code 2, quickly."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import constants, try_to_load_from_cache

from specbench_ss import load_model, registry, user_files
from specbench_ss.conformance import tiny_tokenizer
from specbench_ss.engine.sampling import Sampling
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.models.resolve import LAB
from tests.cli import failing

RUN = ["run", "--methods", "pld", "--limit", "1"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--stop", "a\udcff"], r"--stop is not UTF-8 text: 'a\udcff'"),
        (
            ["--seed", str(2**63)],
            "Invalid value for '--seed': Input should be less than or equal to 9223372036854775807",
        ),
        (["--temperature", "1e-38"], "--temperature must be 0, which is greedy, or at least 1e-05"),
        (["--device", "cpu:9"], "device 'cpu:9' is not available: there is one CPU device"),
        (["--data", "/dev/zero"], "cannot read /dev/zero: it is a device, not a file"),
        (["--config", "/dev/zero"], "cannot read /dev/zero: it is a device"),
        (["--plugin", "/dev/zero"], "cannot read /dev/zero: it is a device"),
        (["--preset", "/dev/zero"], "cannot read /dev/zero: it is a device"),
        (["--set", "medusa.tree=/dev/zero", "--methods", "medusa"], "cannot read /dev/zero: it is a device"),
    ],
)
def test_arguments(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in failing([*RUN, *words], capsys)


READERS = [
    ["import-specbench", "{file}", "--baseline", "file"],
    [*RUN, "--data", "{file}"],
    [*RUN, "--config", "{file}"],
    [*RUN, "--plugin", "{file}"],
    [*RUN, "--preset", "{file}"],
    [*RUN, "--methods", "medusa", "--set", "medusa.tree={file}"],
]


@pytest.mark.parametrize("words", READERS)
def test_a_device_in_place_of_a_file(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Reading it would never end."""
    device = tmp_path / "file"
    device.symlink_to("/dev/zero")
    assert "it is a device" in failing([word.format(file=device) for word in words], capsys)


def test_prompts_may_come_through_a_pipe(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.write(writer, b'{"prompt": "Hi"}\n')
    os.close(writer)
    assert [row for _, row in user_files.read_rows(Path(f"/dev/fd/{reader}"))] == [{"prompt": "Hi"}]
    os.close(reader)


@pytest.mark.parametrize("option", ["--config", "--preset"])
@pytest.mark.parametrize("text", ["methods: " + "[" * 3000, "{a: " * 3000, "- " * 3000])
def test_yaml_that_is_nested_deeply(option: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "deep.yaml").write_text(text)
    told = failing(["run", "--methods", "pld", option, str(tmp_path / "deep.yaml")], capsys)
    assert "nested too deeply" in told


def test_half_of_a_surrogate_pair_in_a_question(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "questions.jsonl"
    question = {"question_id": 1, "category": "qa", "turns": ["\ud800"]}
    file.write_text(json.dumps(question) + "\n")
    assert f"{file}:1: it holds half of a surrogate pair" in failing([*RUN, "--data", str(file)], capsys)


@pytest.mark.parametrize("method", ["medusa", "hydra", "eagle"])
def test_trees_that_are_nested_or_deep(method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nested, deep = tmp_path / "nested.json", tmp_path / "deep.json"
    nested.write_text("[" * 5000 + "]" * 5000)
    lengths = range(5000) if method == "eagle" else (5000,)
    deep.write_text("[" + ",".join("[" + "0," * n + "0]" for n in lengths) + "]")
    for file in (nested, deep):
        told = failing(["run", "--methods", method, "--set", f"{method}.tree={file}"], capsys)
        assert str(file) in told


def test_a_plugin_that_exits_while_it_is_imported_or_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "exits.py"
    file.write_text("raise SystemExit(3)")
    assert f"plugin {file} does not load: SystemExit: 3" in failing([*RUN, "--plugin", str(file)], capsys)
    file.write_text(
        "from specbench_ss import Decoder, DraftTree\n"
        "class Exits(Decoder):\n"
        "    name, summary = 'exits', 'exits'\n"
        "    def propose(self, state): return DraftTree.root_only(state.root)\n"
        "    @classmethod\n"
        "    def load(cls, target, options): raise SystemExit(3)\n"
    )
    out = tmp_path / "run"
    words = ["run", "--methods", "exits", "--plugin", str(file), "--limit", "1", "--out", str(out)]
    assert "method 'exits' does not load: SystemExit: 3" in failing(words, capsys)


class Runs:
    def __reduce__(self) -> Any:
        return print, ("code of the file",)


def test_a_target_whose_weights_are_more_than_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "base"
    shutil.copytree(LAB / "base", folder)
    shutil.copy(LAB / "lab.json", tmp_path)
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Runs()}, folder / "pytorch_model.bin")
    assert zipfile.is_zipfile(folder / "pytorch_model.bin") and pickle
    told = failing([*RUN, "--model", str(folder), "--out", str(tmp_path / "o")], capsys)
    assert "its weights hold more than tensors, which may run code" in told and "weights_only" not in told


def test_an_unreachable_hub(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Port 1 of this machine answers nobody."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert not try_to_load_from_cache("nobody/nothing", "config.json")
    told = failing([*RUN, "--model", "nobody/nothing"], capsys)
    assert (
        "'nobody/nothing' is no folder here, and the hub that may have it, http://127.0.0.1:1, cannot be reached"
        in told
    )


@pytest.mark.parametrize("method", ["dflash", "eagle", "eagle2", "eagle3", "hydra", "medusa", "medusa2", "peagle"])
def test_an_opt_that_projects_its_embeddings_is_refused(method: str) -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "word_embed_proj_dim": 16, "ffn_dim": 48, "num_hidden_layers": 2}
    config = transformers.OPTConfig(vocab_size=61, num_attention_heads=4, max_position_embeddings=64, **sizes)
    auto: Any = transformers.AutoModelForCausalLM
    target = Target(auto.from_config(config), tiny_tokenizer(61), "projecting")
    kind = registry.method_class(method)
    for act in (kind.check, lambda options, base: kind.load(base, options)):
        with pytest.raises(UserError, match="'projecting' embeds tokens in 16 numbers and computes with 32"):
            act(kind.Options(weights=str(LAB / "medusa")), target)


def test_in_python() -> None:
    for wrong in (None, "lab"):
        with pytest.raises(UserError, match=r"Target\(model, tokenizer\) takes a Hugging Face causal language model"):
            Target(wrong)
    with pytest.raises(UserError, match="at least 1e-05"):
        Sampling(1e-38)
    with pytest.raises(UserError, match="not available"):
        load_model("lab", device="cpu:9")
