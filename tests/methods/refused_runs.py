"""`ssbench run` and `models check` with a drafter that does not fit."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from torch import nn

from specbench_ss.cli.main import main
from specbench_ss.models.tiny import tiny_model, tiny_tokenizer
from tests.cli import failing


def check_refused_run(
    drafter: str,
    reported: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    *,
    layers: int = 4,
) -> None:
    """A run and a check of `drafter`, as METHOD[weights=FOLDER], on a tiny model of so many layers.

    It is stated before the model is loaded: this one's weights are NaN, of which loading would complain.
    """
    model, prompts = tmp_path / "model", tmp_path / "prompts.jsonl"
    made = tiny_model("llama", layers=layers)
    nn.init.constant_(made.model.norm.weight, math.nan)
    made.save_pretrained(model)
    tiny_tokenizer(made.config.vocab_size).save_pretrained(model)
    prompts.write_text(json.dumps({"prompt": "abc"}) + "\n")
    before = sorted(tmp_path.rglob("*"))
    given = ["--model", str(model), "--chat-template", "plain", "--suite", f"jsonl:{prompts}", "--limit", "1"]
    stated = failing(["run", "--methods", drafter, *given, "--out", str(tmp_path / "out")], capsys)
    assert main(["models", "check", str(model), drafter, "--chat-template", "plain"]) == 2
    checked = capsys.readouterr()
    assert checked.err == stated and "works" not in checked.out
    assert stated.startswith(f"ssbench: {drafter.partition('[')[0]}: ") and reported in stated, stated
    assert drafter.partition("weights=")[2].removesuffix("]") in stated, stated
    assert sorted(tmp_path.rglob("*")) == before
