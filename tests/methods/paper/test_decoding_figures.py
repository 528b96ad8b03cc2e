"""Figures 17 and 19 state what a run recorded: kernels and NVML's readings, or operators and counted bytes; 22, 23."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from specbench_ss.cli.paper import marked
from specbench_ss.reports.paper.decoding_figures import COUNTED, LEGEND, ON_CPU, Figure17, Figure19
from specbench_ss.results.analysis import Results, analyse, load_run
from specbench_ss.results.report import Mark, Result, Span
from tests.conftest import MakeRun
from tests.methods.paper.shared import DEFAULT


def trace(busy: float) -> dict[str, Any]:
    gaps = {"number": 3, "mean_s": 2e-6, "longest_s": 4e-6}
    return {
        "what": "kernels", "busy_share": busy, "tokens": 20, "launches_per_token": 70.0, "gaps": gaps, "span_s": 0.005,
        "timeline": [0.0, busy, 2 * busy],
    }  # fmt: skip


@pytest.fixture
def run(make_run: MakeRun) -> Results:
    made = load_run(make_run(labels=("ar", "medusa", "ss"), questions=1))
    made.manifest["traces"] = {label: trace(share) for label, share in (("ss", 0.4), ("ar", 0.2))}
    return made


def shown(kind: Any, run: Results) -> Result:
    result: Result = kind().show({"run": run}, DEFAULT)
    return result


def test_figure_17_has_a_line_for_every_traced_method(run: Results) -> None:
    made = shown(Figure17, run)
    assert [row[:3] for row in made.grids[0].rows] == [
        ("speculative streaming", "kernels", 0.4),
        ("autoregressive", "kernels", 0.2),
    ]
    assert all(row[3:] == (20, 70.0, 3, pytest.approx(2.0)) for row in made.grids[0].rows)
    line = made.plots[0].data[0]
    assert line["x"] == pytest.approx([2.5, 7.5, 12.5]) and line["y"] == [0.0, 0.4, 0.8]
    assert ON_CPU not in made.notes
    for one in run.manifest["traces"].values():
        one["what"] = "operators"
    assert ON_CPU in shown(Figure17, run).notes


def test_figure_19_shows_nvml_or_traces_and_counted_bytes_where_there_is_no_gpu(run: Results) -> None:
    made = shown(Figure19, run)
    rows = {row[0]: row[1:3] for row in made.grids[0].rows}
    assert rows["speculative streaming"] == (0.4, None) and rows["Medusa"] == (None, None)
    assert made.notes == (ON_CPU, COUNTED)
    for row in run.run.rows:
        row.nvml_kernel_busy, row.nvml_memory_busy = 0.9 if row.method == "ss" else 0.5, 0.25
    made = shown(Figure19, analyse(run.run))
    rows = {row[0]: row[1:3] for row in made.grids[0].rows}
    assert rows["speculative streaming"] == (pytest.approx(0.9), pytest.approx(0.25))
    assert rows["autoregressive"] == (pytest.approx(0.5), pytest.approx(0.25)) and not made.notes


def test_the_legend_explains_every_mark_that_is_printed_without_colours_and_drawn() -> None:
    printed = [marked([Span("so", mark)], colours=False).plain for mark in get_args(Mark)]
    assert len(set(printed)) >= 3 and all(text == "so" or text in LEGEND for text in printed)
    assert all(word in LEGEND for word in ("green", "bold", "struck out"))
