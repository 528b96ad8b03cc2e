"""Checks before the model is loaded: their order, and that nothing is left behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from specbench_ss.bench import runner
from specbench_ss.cli.main import main
from specbench_ss.models.resolve import LAB
from specbench_ss.runs.config import RunConfig
from specbench_ss.runs.manifest import MANIFEST
from specbench_ss.runs.run_dir import QUESTIONS, SAMPLES, OutputOptions, RunDir
from specbench_ss.suite import SuiteData
from tests import fabricated
from tests.cli import failing
from tests.tiny import thorough

RUN = ["run", "--methods", "ar", "--limit", "1", "--tasks", "qa"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "cuda:99"], "device 'cuda:99' is not available"),
        (["--tasks", "transaltion"], "(did you mean translation?); known: writing, roleplay, "),
        (["--out", "/dev/null/run"], "cannot write to /dev/null/run"),
        (["--methods", "ss[prune_threshold=1]"], "prune_threshold must be 0 or more and below 1, not 1.0"),
        (["--methods", "ss-shared[gamma=9]"], "ssbench: ss-shared: gamma must be 1 to 4 (as trained), not 9"),
        (["--methods", "ss-shared", "--set", f"ss-shared.weights={LAB}/ss"], "are of mode lossless: use ss"),
        (["--methods", "medusa", "--set", f"medusa.weights={LAB}/ss"], f"'down' ({LAB}/ss)"),
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
    monkeypatch.setattr(runner, "load_target", None)
    assert words in failing([*RUN, *arguments, *dry], capsys)


def test_a_dry_run_states_what_would_be_done_and_does_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a" / "run"
    options = ["--temperature", "0.5", "--stop", "\n", "--device", "cpu", "--repeats", "2", "--out", str(out)]
    assert main([*RUN, *options, "--dry-run"]) == 0
    reported = capsys.readouterr().out
    for line in (
        "model      lab, dtype float32, device cpu",
        'temperature 0.5, stop at "\\n", at most',
        "samples    2",
    ):
        assert line in reported
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("torch_kernels")  # which are not compiled into the empty cache
def test_a_model_that_is_none_is_reported_before_questions_that_are_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSBENCH_CACHE", str(tmp_path / "nowhere"))
    model = tmp_path / "model"
    model.mkdir()
    out = tmp_path / "run"
    arguments = [*RUN, "--model", str(model), "--out", str(out)]
    assert f"{model} is not a model folder: it has no config.json" in failing(arguments, capsys)
    shutil.copytree(LAB / "base", model, dirs_exist_ok=True)
    assert "Spec-Bench questions are missing" in failing(arguments, capsys)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    assert f"cannot read weight file {weights}: " in failing(arguments, capsys)
    assert not out.exists()


def test_another_configuration_is_reported_before_the_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = fabricated.manifest(("ar",), SuiteData("specbench", "generated", ()))
    manifest["config"] = RunConfig(methods=(), limit=1, categories=("qa",)).as_dict()
    manifest["config"]["methods"] = [{"name": "ar", "options": {}}]
    RunDir.open(OutputOptions(tmp_path), manifest).close()
    monkeypatch.setattr(runner, "load_target", None)
    before = (tmp_path / MANIFEST).read_bytes()
    arguments = [*RUN, "--out", str(tmp_path), "--resume"]
    reported = failing([*arguments, "--seed", "1", "--top-k", "5"], capsys)
    assert reported == f"ssbench: --resume: the run in {tmp_path} has top-k 0, not 5; seed 0, not 1\n"
    assert (tmp_path / MANIFEST).read_bytes() == before
    assert main([*arguments, "--dry-run"]) == 0
    (tmp_path / QUESTIONS).write_text('[{"id": 7}]')
    assert "questions.json is damaged" in failing([*arguments, "--dry-run"], capsys)
    (tmp_path / SAMPLES).write_text("{}\n")
    assert "samples.jsonl is damaged in line 1: it lacks question_id" in failing(arguments, capsys)


def test_resuming_what_is_not_there_begins_with_a_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "none"
    assert main([*RUN, "--out", str(out), "--resume", "--dry-run"]) == 0
    assert capsys.readouterr().err == f"ssbench: warning: nothing to resume in {out}; starting the run\n"
    assert main(["paper", "table-6", "--out", str(out), "--resume", "--dry-run"]) == 0
    assert f"ssbench: warning: nothing to resume in {out}; starting the work\n" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.usefixtures("torch_kernels")
def test_what_a_model_lacks_is_reported_before_its_weights_are_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And before questions that only other models need: the folder is no lab model, and there are none here."""
    monkeypatch.setattr(runner, "load_target", None)
    monkeypatch.setenv("SSBENCH_CACHE", str(tmp_path / "nowhere"))
    model = tmp_path / "model"
    shutil.copytree(LAB / "base", model)
    arguments = [*RUN, "--model", str(model)]
    (model / "chat_template.jinja").unlink()
    assert f"the tokenizer of {model} has no chat template" in failing(arguments, capsys)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (model / file).unlink()
        assert f"model '{model}' has no tokenizer: the folder has no" in failing(arguments, capsys)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    assert "model type 'mamba' cannot be used: it has recurrent layers" in failing([*arguments, "--dry-run"], capsys)


@pytest.mark.parametrize("dry", [["--dry-run"], []])
def test_a_prompt_too_long_for_the_model_is_one_line_before_its_weights_are_loaded(
    dry: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "load_target", None)
    data, out = tmp_path / "questions.jsonl", tmp_path / "run"
    asked = [{"question_id": i, "category": "qa", "turns": ["word " * n]} for i, n in enumerate((3, 2000, 3000))]
    data.write_text("\n".join(map(json.dumps, asked)))
    reported = failing(["run", "--methods", "ar", "--data", str(data), "--out", str(out), *dry], capsys)
    for words in (
        "questions.jsonl:2 has 20",
        "too long for the context of 'lab' (1024)",
        "2 of 3 questions cannot be used",
        "use other data",
    ):
        assert words in reported
    assert not out.exists()


@thorough
def test_all_stands_for_every_method_that_can_decode_with_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    draft = str(LAB / "draft")
    assert main(["run", "--methods", "all,ss[k=1]", "--limit", "1", "--suite", "apps", "--dry-run"]) == 0
    stated = [line.split()[1].rstrip(":") for line in capsys.readouterr().out.splitlines() if line.startswith("method")]
    assert stated[0] == "ar" and {"medusa", "ss-shared", "ss[k=1]"} < set(stated) and "ss" not in stated
    # what comes with the lab's base does not fit the lab's draft: left out, not an error
    assert main(["run", "--methods", "all", "--model", draft, "--limit", "1", "--suite", "apps", "--dry-run"]) == 0
    captured = capsys.readouterr()
    assert "warning: ss is left out" in captured.err and "method     ss:" not in captured.out
    # what was asked for by name is an error
    assert main(["run", "--methods", "all,ss", "--model", draft, "--limit", "1", "--suite", "apps", "--dry-run"]) == 2
