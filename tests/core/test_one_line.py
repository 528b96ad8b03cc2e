"""Unusual input: pipes, nested trees, and models whose embeddings are projected."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import transformers

from specbench_ss import load_model, prompt_files, registry
from specbench_ss.conformance import tiny_tokenizer
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.models.resolve import LAB
from tests.cli import failing


def test_prompts_may_come_through_a_pipe(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.write(writer, b'{"prompt": "Hi"}\n')
    os.close(writer)
    assert [row for _, row in prompt_files.read_rows(Path(f"/dev/fd/{reader}"))] == [{"prompt": "Hi"}]
    os.close(reader)


@pytest.mark.parametrize("method", ["medusa", "hydra", "eagle"])
def test_trees_that_are_nested_or_deep(method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nested, deep = tmp_path / "nested.json", tmp_path / "deep.json"
    nested.write_text("[" * 5000 + "]" * 5000)
    lengths = range(5000) if method == "eagle" else (5000,)
    deep.write_text("[" + ",".join("[" + "0," * n + "0]" for n in lengths) + "]")
    for file in (nested, deep):
        reported = failing(["run", "--methods", method, "--set", f"{method}.tree={file}"], capsys)
        assert str(file) in reported


@pytest.mark.parametrize(
    "method", ["dflash", "eagle", "eagle2", "eagle3", "hydra", "medusa", "medusa2", "mtp", "peagle"]
)
def test_an_opt_that_projects_its_embeddings_is_refused(method: str) -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "word_embed_proj_dim": 16, "ffn_dim": 48, "num_hidden_layers": 2}
    config = transformers.OPTConfig(vocab_size=61, num_attention_heads=4, max_position_embeddings=64, **sizes)
    auto: Any = transformers.AutoModelForCausalLM
    target = Target(auto.from_config(config), tiny_tokenizer(61), "projecting")
    kind = registry.method_class(method)
    for act in (kind.check, lambda options, base: kind.load(base, options)):
        with pytest.raises(UserError, match="'projecting' has 16 and 32"):
            act(kind.Options(weights=str(LAB / "medusa")), target)


def test_in_python() -> None:
    for wrong in (None, "lab"):
        with pytest.raises(UserError, match="Target takes a Hugging Face causal LM"):
            Target(wrong)
    with pytest.raises(UserError, match="at least 1e-05"):
        SamplingParams(1e-38)
    with pytest.raises(UserError, match="not available"):
        load_model("lab", device="cpu:9")
