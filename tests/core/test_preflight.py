"""What is found before the model is loaded, in which order, and that nothing is left behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from specbench_ss import models
from specbench_ss.cli import main
from specbench_ss.config import RunConfig
from specbench_ss.rundir import RunDir, RunTarget
from specbench_ss.stored_manifest import MANIFEST
from specbench_ss.suite import SuiteData
from specbench_ss.suites import specbench
from tests import conftest
from tests.cli import failing

RUN = ["run", "--methods", "ar", "--limit", "1", "--categories", "qa"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "cuda:99"], "device 'cuda:99' is not available"),
        (["--device", "gpu"], "unknown device 'gpu': give auto, cpu, cuda or cuda:N"),
        (["--device", "meta"], "unknown device 'meta'"),
        (["--categories", "transaltion"], "(did you mean translation?); known: writing, roleplay, "),
        (["--model", "labb"], "did you mean lab?"),
        (["--out", "/dev/null/run"], "cannot write to /dev/null/run"),
        (["--methods", "ss", "--set", "ss.prune_threshold=nan"], "prune_threshold='nan' is not a finite number"),
        (["--methods", "ss[prune_threshold=1]"], "prune_threshold must be 0 or more and below 1, not 1.0"),
        (["--methods", "ss[prune_threshold=-0.1]"], "prune_threshold must be 0 or more and below 1, not -0.1"),
        (["--methods", "ss", "--set", "ss.k=-3"], "ss: k must be at least 0, not -3"),
    ],
)
@pytest.mark.parametrize("dry", [["--dry-run"], []])
def test_mistakes_are_found_without_a_model(
    arguments: list[str],
    words: str,
    dry: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(models, "load_target", None)
    assert words in failing([*RUN, *arguments, *dry], capsys)


def test_a_dry_run_says_what_would_be_done_and_does_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a" / "run"
    options = ["--temperature", "0.5", "--stop", "\n", "--device", "cpu", "--repeats", "2", "--out", str(out)]
    assert main([*RUN, *options, "--dry-run"]) == 0
    told = capsys.readouterr().out
    for line in (
        "model      lab, dtype float32, device cpu",
        'temperature 0.5, stop at "\\n", at most',
        "samples    2",
    ):
        assert line in told
    assert not list(tmp_path.iterdir())


def test_a_model_that_is_none_is_told_before_questions_that_are_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(specbench, "_cached", lambda: tmp_path / "nowhere")
    model = tmp_path / "model"
    model.mkdir()
    out = tmp_path / "run"
    arguments = [*RUN, "--model", str(model), "--out", str(out)]
    assert f"{model} holds no model: it has no config.json" in failing(arguments, capsys)
    shutil.copytree(models.LAB / "base", model, dirs_exist_ok=True)
    assert "the Spec-Bench questions are not here" in failing(arguments, capsys)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    assert f"cannot read weight file {weights}: " in failing(arguments, capsys)
    assert not out.exists()


def test_another_configuration_is_told_before_the_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = conftest.manifest(("ar",), SuiteData("specbench", "generated", ()))
    manifest["config"] = RunConfig(methods=(), limit=1, categories=("qa",)).as_dict()
    manifest["config"]["methods"] = [{"name": "ar", "options": {}}]
    RunDir.open(RunTarget(tmp_path), manifest).close()
    monkeypatch.setattr(models, "load_target", None)
    before = (tmp_path / MANIFEST).read_bytes()
    arguments = [*RUN, "--out", str(tmp_path), "--resume"]
    told = failing([*arguments, "--seed", "1", "--top-k", "5"], capsys)
    assert told == f"ssbench: --resume: the run in {tmp_path} has top-k 0, not 5; seed 0, not 1\n"
    assert (tmp_path / MANIFEST).read_bytes() == before
    assert main([*arguments, "--dry-run"]) == 0


def test_a_prompt_too_long_for_the_model_is_one_line_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = tmp_path / "questions.jsonl", tmp_path / "run"
    asked = [{"question_id": i, "category": "qa", "turns": ["word " * n]} for i, n in enumerate((3, 2000, 3000))]
    data.write_text("\n".join(map(json.dumps, asked)))
    told = failing(["run", "--methods", "ar", "--data", str(data), "--out", str(out)], capsys)
    for words in (
        "question '1' (qa) has 20",
        "the context of 'lab', 1024",
        "2 of 3 questions",
        "--categories, --limit",
    ):
        assert words in told
    assert not out.exists()
