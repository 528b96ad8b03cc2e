"""`ssbench export --form profile`: rates by position, whose sum is the mean, in the layout that other tools read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from specbench_ss.cli.main import main
from specbench_ss.runs.run_dir import read_run
from tests.conftest import MakeRun


def exported(run: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The profiles by label and the golden lengths by method that the command writes."""
    assert main(["export", str(run), "--form", "profile"]) == 0
    end, files = ".speculation_profile.json", list((run / "profile").iterdir())
    profiles = {file.name.removesuffix(end): json.loads(file.read_text()) for file in files if file.name.endswith(end)}
    golden = {file.name.partition(".")[0]: yaml.safe_load(file.read_text()) for file in files if file.suffix == ".yaml"}
    return profiles, golden


def test_rates_are_those_of_the_steps(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_run()
    profiles, golden = exported(path)
    assert profiles.keys() == golden.keys() == {"ss", "medusa"} and not capsys.readouterr().err
    run = read_run(path)
    for label, profile in profiles.items():
        columns = run.steps.together(row.key for row in run.of(label))
        accepted, length = columns.accepted_tokens, int(columns.draft_depth.max())
        survival = [float(np.mean(accepted >= p)) for p in range(1, length + 1)]
        assert profile["num_speculative_tokens"] == length
        assert profile["marginal_accept_rates"] == pytest.approx(survival, abs=1e-6)
        given_before = [b / a for a, b in zip([1.0, *survival], survival, strict=False)]
        assert profile["conditional_accept_rates"] == pytest.approx(given_before, abs=1e-6)
        assert profile["mean_accept_length"] == pytest.approx(1 + np.mean(accepted), abs=1e-6)
        assert profile["mean_accept_length"] == pytest.approx(1 + sum(survival), abs=1e-5)
        assert profile["validation"]["mean_consistency"]["passed"]
        histogram = {int(k): n for k, n in profile["acceptance_length_histogram"].items()}
        assert sum(histogram.values()) == len(accepted) and min(histogram) >= 1
        assert profile["per_category"].keys() == {row.category for row in run.rows}
        assert golden[label] == {"lab-s": {"default": {length: round(profile["mean_accept_length"], 2)}}}


def test_variants_share_the_golden_lengths_of_a_method(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    _, golden = exported(make_run(labels=("ar", "ss[k=1]", "ss[k=2]")))
    ((lengths,),) = ((modes["default"],) for modes in golden["ss"].values())
    assert len(lengths) == 1 and "ss[k=2]: golden lengths have ss[k=1]" in capsys.readouterr().err


def test_a_profile_shows_no_folder_of_the_machine(make_run: MakeRun) -> None:
    path = make_run()
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["model"]["name"] = "/home/someone/models/own/model"
    manifest["methods"][1]["options"] = {"weights": "/home/someone/drafter", "tree": "/home/someone/t.json"}
    (path / "manifest.json").write_text(json.dumps(manifest))
    profile = exported(path)[0]["ss"]
    assert "home" not in json.dumps(profile)
    assert profile["target_model"] == {"id": "own/model"} and profile["draft_checkpoint"] == {"id": "someone/drafter"}


def test_thinking_and_block_verification_are_stated(make_run: MakeRun) -> None:
    path = make_run()
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["config"] |= {"chat_template_kwargs": '{"enable_thinking": false}', "verification": "block"}
    (path / "manifest.json").write_text(json.dumps(manifest))
    profiles, golden = exported(path)
    assert golden["ss"]["lab-s"].keys() == {"thinking_off"}
    assert profiles["ss"]["marginal_accept_rates"] is None and profiles["ss"]["verification_method"] == "block"
    assert "longest-prefix" in profiles["ss"]["vectors_unavailable_reason"]


def test_a_run_without_drafts_has_a_line_and_no_file(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_run(labels=("ar", "ss-shared-ar"))
    assert exported(path) == ({}, {}) and "drafted nothing" in capsys.readouterr().err
