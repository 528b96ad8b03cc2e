"""Presets: written, read back, applied by a run, and what is stated where they do not fit."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from lab import text
from specbench_ss.bench.build_config import method_specs
from specbench_ss.bench.preflight import changed, preset_notes
from specbench_ss.cli.main import main
from specbench_ss.errors import UserError
from specbench_ss.runs.config import RunConfig
from specbench_ss.runs.preset import Preset, check_writable, read_preset, write_preset
from specbench_ss.suite import Question, SuiteData
from tests.tiny import thorough

HERE = {
    "model": "lab", "weights_hash": "a", "device": "cpu", "device_name": "EPYC", "dtype": "float32", "threads": 2,
    "torch": "2", "decoding": "greedy", "engine": "eager",
}  # fmt: skip
CONTENT: dict[str, Any] = {
    "method": "ss",
    "options": {"n_draft": 6, "prune": "off", "weights": None},
    "made_for": HERE,
    "resolved": {"k": 3},
    "calibration": {"prompts": ["abc"]},
}


def test_a_preset_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "ss.yaml"
    write_preset(file, CONTENT)
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    options = {"n_draft": "6", "prune": "off", "weights": "none"}
    assert read_preset(file) == Preset(str(file), sha256, "ss", options, HERE, {"k": 3}, ("abc",))
    assert list(tmp_path.iterdir()) == [file]
    assert "--preset ss.yaml" in file.read_text().splitlines()[0]


def test_a_preset_may_be_written_by_hand(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("method: ss\noptions: {prune: off, k: 2}\n")
    assert read_preset(file).options == {"prune": "off", "k": "2"}


def test_set_and_brackets_win_over_a_preset() -> None:
    preset = Preset("p", "", "ss", {"k": "2", "n_draft": "6"})
    specs = method_specs("ss,ss[n_draft=9],medusa", ["ss.k=4"], [preset])
    expected = [{}, {"k": "4", "n_draft": "6"}, {"k": "4", "n_draft": "9"}, {}]
    assert [spec.options for spec in specs] == expected
    with pytest.raises(UserError, match="two presets for method 'ss'"):
        method_specs("ss", [], [preset, preset])


@thorough
def test_a_run_applies_its_presets_and_its_manifest_states_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real command on the lab model: options, file and hash in the manifest, and what does not fit on stderr."""
    file, out = tmp_path / "ss.yaml", tmp_path / "run"
    asked = text.questions(("qa",), "eval", 1)[0]
    made_for = {"device": "cuda", "dtype": "bfloat16", "model": "lab", "decoding": "greedy"}
    write_preset(
        file,
        {
            "method": "ss",
            "options": {"n_draft": 5},
            "made_for": made_for,
            "calibration": {"prompts": [asked.mark, "other"]},
        },
    )
    what = ["--methods", "ss", "--preset", str(file), "--tasks", "qa", "--limit", "1", "--device", "cpu"]
    what += ["--temperature", "0.7", "--stop", "Q:"]
    assert main(["run", *what, "--max-new-tokens", "3", "--warmup", "0", "--out", str(out)]) == 0
    manifest = json.loads((out / "manifest.json").read_text())
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    assert manifest["config"]["presets"] == [{"file": str(file), "sha256": sha256, "method": "ss"}]
    used = next(method for method in manifest["methods"] if method["name"] == "ss")
    assert (used["label"], used["options"]["n_draft"], used["resolved"]["n_draft"]) == ("ss[n_draft=5]", 5, 5)
    reported = capsys.readouterr().err
    assert (
        f"preset {file} was made for other conditions: device cuda, here cpu; dtype bfloat16, here float32" in reported
    )
    assert "decoding greedy, here temperature 0.7\n" in reported
    assert f"preset {file} was chosen on 1 of these 1 questions" in reported


@pytest.mark.parametrize(
    ("then", "stated"),
    [
        ({}, ""),
        (HERE, ""),
        (HERE | {"model": "/elsewhere/lab"}, ""),
        (HERE | {"weights_hash": "b"}, "weights hash b, here a"),
        (HERE | {"dtype": "bfloat16", "weights_hash": "b"}, "dtype bfloat16, here float32"),
        (HERE | {"dtype": "bfloat16", "model": "x"}, "dtype bfloat16, here float32; model x, here lab"),
        (HERE | {"engine": "graph"}, "engine graph, here eager"),
        (HERE | {"threads": 8, "torch": "1"}, "threads 8, here 2; torch 1, here 2"),
        (HERE | {"decoding": "temperature 1"}, "decoding temperature 1, here greedy"),
        (HERE | {"device": "cuda", "device_name": "H100"}, "device cuda, here cpu; device name H100, here EPYC"),
    ],
)
def test_what_differs_between_there_and_here(then: dict[str, Any], stated: str) -> None:
    assert changed(then, HERE) == stated


def test_weights_that_resolve_to_something_else_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specbench_ss.bench.preflight.conditions", lambda target, decoded: HERE)
    preset = Preset("p", "", "ss", {"k": "3"}, HERE, {"k": 3, "weights": "old"})
    data = SuiteData("s", "e", (Question("q", "c", ("hi",)),))
    config = RunConfig(method_specs("ss", [], [preset]), presets=(preset,))
    methods = {"ss[k=3]": {"resolved": {"k": 3, "weights": "new"}}}
    notes = list(preset_notes(config, None, data, methods))  # type: ignore[arg-type]
    assert notes == ["preset p was made for other weights or settings of ss: weights differ"]
    overridden = RunConfig(method_specs("ss", ["ss.k=2"], [preset]), presets=(preset,))
    assert not list(preset_notes(overridden, None, data, methods))  # type: ignore[arg-type]
    assert not list(preset_notes(RunConfig(()), None, data, {}))  # type: ignore[arg-type]


def test_only_a_preset_is_replaced(tmp_path: Path) -> None:
    foreign, old = tmp_path / "config.yaml", tmp_path / "old.yaml"
    foreign.write_text("limit: 3\n")
    write_preset(old, CONTENT)
    check_writable(old)
    check_writable(tmp_path / "new.yaml")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.yaml", "old.yaml"]
    for path in (foreign, tmp_path, tmp_path / "no" / "new.yaml", Path("/proc/new.yaml")):
        with pytest.raises(UserError, match="is not a preset|cannot write"):
            check_writable(path)
    before = old.read_text()
    write_preset(old, CONTENT)
    assert (tmp_path / "old.yaml.old").read_text() == before
