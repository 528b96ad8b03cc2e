"""One sample that took far longer than usual is named and marks the headline; clean runs have no such finding."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specbench_ss.cli.main import main
from specbench_ss.results.analysis import analyse
from specbench_ss.results.outliers import outliers
from specbench_ss.runs.records import Run, SampleRecord, Steps
from specbench_ss.runs.run_dir import read_run
from tests.conftest import MakeRun
from tests.tiny import few

STEP_S = {"ar": 0.010, "m": 0.013, "n": 0.016}
TAU = {"ar": 1.0, "m": 2.5, "n": 3.5}


def simulated(
    rng: np.random.Generator, noise: float, served: bool = False, labels: tuple[str, ...] = ("ar", "m"), n: int = 40
) -> Run:
    """A run of n prompts with this noise of each time. served: without numbers of steps, which differ by question."""
    rows = []
    for question in range(n):
        length, prefill, context = rng.integers(20, 100), rng.lognormal(-4, 1), rng.uniform(1, 1.3)
        for label in labels:
            row = SampleRecord(f"q{question}", 0, label, 0, "qa", len(rows), 0, 0, "", "", "ok")
            row.tokens, row.prefill_tokens = int(length), 1
            row.steps = round((length - 1) / (1 + (TAU[label] - 1) * rng.uniform(0.6, 1.4)))
            step_s = STEP_S[label] * context * rng.lognormal(0, noise)
            row.prefill_s, row.decode_s = prefill * rng.lognormal(0, noise), row.steps * step_s
            row.wall_s = row.prefill_s + row.decode_s
            if served:
                row.steps, row.counted = None, "usage"
            rows.append(row)
    methods = [{"label": label, "lossless": True} for label in labels]
    return Run(Path(), {"config": {}, "methods": methods, "model": {"dtype": "float32"}}, rows, Steps.from_samples({}))


def slowed(row: SampleRecord, factor: float) -> None:
    row.prefill_s, row.decode_s = factor * (row.prefill_s or 0.0), factor * (row.decode_s or 0.0)
    row.wall_s = row.prefill_s + row.decode_s


@few(3)
@pytest.mark.parametrize("served", [False, True], ids=["steps", "tokens"])
@pytest.mark.parametrize("noise", [0.07, 0.12])
@pytest.mark.parametrize("n", [12, 40])
def test_a_sample_of_four_times_its_time_is_named(noise: float, served: bool, n: int) -> None:
    """In 99 % of runs, and anything in under 2 % of clean ones; 200 runs determine it to 1 %."""
    rng, found, clean, runs = np.random.default_rng(0), 0, 0, 200
    for _ in range(runs):
        run = simulated(rng, noise, served, n=n)
        clean += bool(outliers(run))
        row = run.rows[rng.integers(len(run.rows))]
        slowed(row, 4.0)
        found += row.key in outliers(run)
    assert found >= 0.98 * runs
    assert clean <= 0.02 * runs


def test_many_methods_give_no_false_alarm() -> None:
    rng = np.random.default_rng(1)
    assert sum(bool(outliers(simulated(rng, 0.15, labels=("ar", "m", "n"), n=84))) for _ in range(60)) <= 1


def test_prompts_on_which_all_methods_are_slow_are_none() -> None:
    """Steps over a long context take four times as long in every method, and so may its prefill."""
    run = simulated(np.random.default_rng(2), 0.07)
    for row in run.rows[:8]:
        slowed(row, 4.0)
    assert not outliers(run)
    slowed(run.rows[1], 4.0)
    assert set(outliers(run)) == {run.rows[1].key}


def test_steps_with_more_nodes_may_take_longer() -> None:
    """A lookup drafts many nodes on some prompts only; a sample of those is named all the same."""
    rng = np.random.default_rng(5)
    run = simulated(rng, 0.07)
    own = [row for row in run.rows if row.method == "m"]
    for i, row in enumerate(own):
        nodes = 40 if i < 4 else i % 2
        row.verified_nodes = nodes * (row.steps or 0)
        row.decode_s = (row.decode_s or 0.0) * (1 + nodes / 8)
        row.wall_s = (row.prefill_s or 0.0) + row.decode_s
    assert not outliers(run)
    slowed(own[1], 4.0)
    assert set(outliers(run)) == {own[1].key}


def test_steps_without_nodes_have_a_time_though_the_line_is_below_zero() -> None:
    run = simulated(np.random.default_rng(6), 0.07)
    own = [row for row in run.rows if row.method == "m"]
    for i, row in enumerate(own):
        row.verified_nodes = (0 if i == 0 else 30 + i) * (row.steps or 0)
        row.decode_s = (row.decode_s or 0.0) * (1 if i == 0 else 1 + i / 5)
        row.wall_s = (row.prefill_s or 0.0) + row.decode_s
    slowed(own[20], 6.0)
    assert own[20].key in outliers(run)


def test_a_method_whose_prefill_takes_longer_is_compared_with_itself() -> None:
    run = simulated(np.random.default_rng(7), 0.07)
    for row in run.rows:
        if row.method == "m":
            row.prefill_s = 60 * (row.prefill_s or 0.0)
            row.wall_s = row.prefill_s + (row.decode_s or 0.0)
    assert not outliers(run)
    slowed(run.rows[21], 4.0)
    assert set(outliers(run)) == {run.rows[21].key}


def test_a_stall_in_prefill_is_named_by_its_share_of_the_whole_time() -> None:
    run = simulated(np.random.default_rng(3), 0.07)
    row = run.rows[21]
    row.wall_s, row.prefill_s = 6 * (row.wall_s or 0.0), (row.prefill_s or 0.0) + 5 * (row.wall_s or 0.0)
    found = outliers(run)
    assert set(found) == {row.key} and found[row.key].factor == pytest.approx(6, rel=0.2)


def test_few_samples_and_samples_without_steps_have_none() -> None:
    run = simulated(np.random.default_rng(4), 0.07, n=3)
    slowed(run.rows[1], 9.0)
    assert not outliers(run)
    for row in run.rows:
        row.steps = 0
    assert not outliers(run)


@pytest.fixture
def planted(make_run: MakeRun) -> Callable[[str, float], Path]:
    """A run with one sample of a method that took so many times as long."""

    def plant(label: str, factor: float) -> Path:
        run = make_run(questions=10)
        for name in ("samples.jsonl", "steps.jsonl"):
            lines = [json.loads(line) for line in (run / name).read_text().splitlines()]
            for line in lines:
                if (line["question_id"], line["method"]) == ("qa-3", label):
                    _lengthen(line, factor)
            (run / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        return run

    return plant


def _lengthen(line: dict[str, Any], factor: float) -> None:
    for name in [name for name in line if name.endswith("_s") and line[name] is not None]:
        line[name] *= factor
    if "ended" in line:
        line["ended"] *= factor


@few(1)
@pytest.mark.parametrize("label", ["ss", "ar"])
def test_an_outlier_marks_the_headline_and_has_the_speedup_without_it(
    planted: Callable[[str, float], Path], label: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sample of a method hides its speedup, one of the baseline inflates that of every method."""
    clean, results = analyse(read_run(planted("", 1.0))), analyse(read_run(planted(label, 8.0)))
    (check,) = [check for check in results.checks if check.name == "outlier"]
    assert check.state == "wrong" and results.headline.startswith("Unreliable (outlier): ")
    (line,) = check.lines
    assert line.startswith(f"{label}: qa-3 turn 1 took ") and "times as long as its steps usually take" in line
    factor = float(line.partition(" took ")[2].split()[0])
    assert factor == pytest.approx(8, rel=0.3)
    for row in clean.overall[1:] if label == "ar" else [row for row in clean.overall if row.method == label]:
        shown = f"{row.method} " if label == "ar" else "without it "
        assert float(line.partition(shown)[2].partition("×")[0]) == pytest.approx(row.speedup, abs=0.06)
    assert {check.name: check.state for check in clean.checks}["outlier"] == "ok"
    assert main(["report", str(results.path), "--fail-on", "outlier"]) == 1
    assert "outlier" in capsys.readouterr().err
