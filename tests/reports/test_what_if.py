"""Predictions of the page: without a change the parts of a step add up to what was measured."""

from __future__ import annotations

import pytest

from specbench_ss.results.analysis import analyse
from specbench_ss.results.cost_model import StepTimeParts, parts, roof_of
from specbench_ss.runs.records import Run
from specbench_ss.runs.run_dir import read_run
from tests.conftest import MakeRun

SHAPE = {"weight_bytes": 2e7, "matrix_parameters": 5e6, "attention_flops": 100.0, "kv_bytes": 64, "windows": [None]}
DRAFTER = {"weight_bytes": 1e6, "matrix_parameters": 2.5e5}


@pytest.fixture
def run(make_run: MakeRun) -> Run:
    made = read_run(make_run())
    limits = {"read_bytes_per_s": 1e10, "flops_per_s": {"float32": 1e11}}
    shapes = {label: {**SHAPE, "drafter": None if label == "ar" else DRAFTER} for label in made.labels}
    made.manifest["machine"] = {"limits": limits, "shapes": shapes}
    return made


def test_without_a_change_it_is_what_was_measured(run: Run) -> None:
    assert_measured(run)


def test_an_incomplete_run_predicts_from_the_prompts_that_both_sides_answered(run: Run) -> None:
    lacking = {("medusa", f"{task}-{i}") for task in ("qa", "writing") for i in range(5)}
    for row in run.rows:
        if (row.method, row.question_id) in lacking | {("ar", "translation-1")}:
            row.status, row.error = "failed", "RuntimeError: no"
    assert_measured(run)


def step_s(one: StepTimeParts) -> float:
    return max(one.read_s, one.product_s) + one.overhead_s


def assert_measured(run: Run) -> None:
    results = analyse(run)
    found = parts(results.pairs, roof_of(run))
    for row in results.machine_rows:
        own, plain = found[row.method]
        assert own.tau * step_s(plain) / step_s(own) == pytest.approx(row.decode_speedup, rel=1e-6)


def test_a_run_without_limits_predicts_nothing(make_run: MakeRun) -> None:
    run = read_run(make_run())
    assert parts(analyse(run).pairs, roof_of(run)) == {}
