"""Predictions: without a change they are what was measured, and each part does what it should."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from specbench_ss.results.cost_model import (
    Change,
    Parts,
    breaks_even,
    machine_rows,
    parts,
    predictions,
    speedup,
    step_s,
)
from specbench_ss.runs.records import Run
from specbench_ss.runs.run_dir import read_run
from tests.conftest import MakeRun

SHAPE = {"weight_bytes": 2e7, "matrix_parameters": 5e6, "attention_flops": 100.0, "kv_bytes": 64, "windows": [None]}
DRAFTER = {"weight_bytes": 1e6, "matrix_parameters": 2.5e5}
PLAIN = Parts("ar", 1.0, 0.0, 0.0, 0.010, 0.001, 0.002)
METHOD = Parts("m", 3.0, 4.0, 7.0, 0.011, 0.008, 0.003)


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


def assert_measured(run: Run) -> None:
    measured = {row.method: row.decode_speedup for row in machine_rows(run) if row.method != "ar"}
    found = predictions(parts(run), Change())
    assert found == {method: pytest.approx(value, rel=1e-6) for method, value in measured.items()}


def test_a_run_without_limits_predicts_nothing(make_run: MakeRun) -> None:
    assert parts(read_run(make_run())) == [] and predictions([], Change()) == {}


def test_each_factor_acts_on_its_part() -> None:
    assert step_s(METHOD, Change()) == pytest.approx(0.014)
    assert step_s(METHOD, Change(bandwidth=2)) == pytest.approx(0.008 + 0.003), "then products are the limit"
    assert step_s(METHOD, Change(products=0.5)) == pytest.approx(0.016 + 0.003)
    assert step_s(METHOD, Change(launch=2)) == pytest.approx(0.011 + 0.006)
    assert step_s(METHOD, Change(size=10)) == pytest.approx(0.110 + 0.003)
    assert step_s(METHOD, Change(nodes=3)) == pytest.approx(0.008 * 22 / 8 + 0.003)
    windowed = replace(METHOD, fixed_s=0.002)
    assert step_s(windowed, Change(nodes=3)) == pytest.approx(0.002 + 0.006 * 22 / 8 + 0.003), "a window stays as it is"
    assert step_s(windowed, Change(products=0.5)) == step_s(METHOD, Change(products=0.5))
    wide = replace(METHOD, rows_s=0.002)
    assert step_s(wide, Change()) == pytest.approx(step_s(METHOD, Change()))
    assert step_s(wide, Change(nodes=0)) == pytest.approx(0.011 + 0.001), "its rows cost nothing then"
    assert step_s(wide, Change(nodes=2, launch=3)) == pytest.approx(0.015 + 3 * 0.001 + 2 * 0.002)
    assert step_s(wide, Change(size=10)) == pytest.approx(0.110 + 0.001 + 10 * 0.002), (
        "rows cost more on a larger model"
    )
    assert step_s(wide, Change(products=2)) == pytest.approx(0.011 + 0.001 + 0.001)
    assert speedup(METHOD, PLAIN, Change()) == pytest.approx(3 * 0.012 / 0.014)
    assert speedup(METHOD, PLAIN, Change(acceptance=0.5)) == pytest.approx(2 * 0.012 / 0.014)
    assert speedup(METHOD, PLAIN, Change(acceptance=9)) == pytest.approx(5 * 0.012 / 0.014), "four tokens are drafted"


def test_at_the_line_speculation_neither_pays_nor_costs() -> None:
    for change in (Change(), Change(size=4, products=0.5), Change(launch=8)):
        factor = breaks_even(METHOD, PLAIN, change)
        assert factor is not None
        at_line = Change(change.size, change.bandwidth, change.products, change.launch, factor, change.nodes)
        assert speedup(METHOD, PLAIN, at_line) == pytest.approx(1)
    assert breaks_even(PLAIN, PLAIN, Change()) is None
    assert breaks_even(METHOD, PLAIN, Change(products=0.01)) == math.inf
