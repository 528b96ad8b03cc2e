"""Figures 17 and 19 say what a run recorded: kernels and NVML's readings, or operators and counted bytes."""

from __future__ import annotations

from typing import Any

import pytest

from specbench_ss.reports.paper.utilisation import COUNTED, ON_CPU, Figure17, Figure19
from specbench_ss.runs.records import Run
from specbench_ss.runs.run_dir import read_run
from tests.conftest import MakeRun


def trace(what: str, busy: float) -> dict[str, Any]:
    gaps = {"number": 3, "mean_s": 2e-6, "longest_s": 4e-6}
    timeline = [0.0, busy, 2 * busy]
    return {
        "what": what, "busy_share": busy, "tokens": 20, "launches_per_token": 70.0, "gaps": gaps, "span_s": 0.005,
        "timeline": timeline,
    }  # fmt: skip


@pytest.fixture
def run(make_run: MakeRun) -> Run:
    made = read_run(make_run(labels=("ar", "medusa", "ss"), questions=1))
    made.manifest["traces"] = {label: trace("kernels", share) for label, share in (("ss", 0.4), ("ar", 0.2))}
    return made


def test_figure_17_has_a_line_for_every_traced_method(run: Run) -> None:
    made = Figure17().show(run)
    assert [row[:3] for row in made.grids[0].rows] == [
        ("speculative streaming", "kernels", 0.4),
        ("autoregressive", "kernels", 0.2),
    ]
    assert all(row[3:] == (20, 70.0, 3, pytest.approx(2.0)) for row in made.grids[0].rows)
    line = made.plots[0].data[0]
    assert line["x"] == pytest.approx([2.5, 7.5, 12.5]) and line["y"] == [0.0, 0.4, 0.8]
    assert ON_CPU not in made.notes


def test_figure_17_says_that_a_processor_runs_operators_and_no_kernels(run: Run) -> None:
    for one in run.manifest["traces"].values():
        one["what"] = "operators"
    assert ON_CPU in Figure17().show(run).notes


def test_figure_19_shows_what_nvml_read(run: Run) -> None:
    for row in run.rows:
        row.nvml_kernel_busy, row.nvml_memory_busy = 0.9 if row.method == "ss" else 0.5, 0.25
    made = Figure19().show(run)
    shown = {row[0]: row[1:3] for row in made.grids[0].rows}
    assert shown["speculative streaming"] == (pytest.approx(0.9), pytest.approx(0.25))
    assert shown["autoregressive"] == (pytest.approx(0.5), pytest.approx(0.25)) and not made.notes


def test_figure_19_shows_traces_and_counted_bytes_where_there_is_no_gpu(run: Run) -> None:
    made = Figure19().show(run)
    shown = {row[0]: row[1:3] for row in made.grids[0].rows}
    assert shown["speculative streaming"] == (0.4, None) and shown["Medusa"] == (None, None)
    assert made.notes == (ON_CPU, COUNTED)
