"""Appendix C: everything is counted, and ten drafters are ten times one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specbench_ss.reports.paper.applications import BASES, METHODS, AppendixC
from specbench_ss.reports.paper.overheads import counted
from specbench_ss.results.report import Bench, Request, Result

NEVER: Any = None


@pytest.fixture(scope="module")
def made() -> Result:
    return AppendixC().run(Bench(Request(), NEVER, NEVER, NEVER))


def test_drafters_outgrow_the_base_where_it_is_said(made: Result) -> None:
    drafters, bases = made.grids
    sizes: list[Any] = [row[2] for row in bases.rows]
    assert sizes == pytest.approx([6.738, 6.738 * 34 / 32], abs=1e-3) and len(BASES) == 2
    assert [row[0] for row in drafters.rows] == list(METHODS)
    for row in drafters.rows:
        parameters: Any = row[1]
        assert parameters == counted("Llama-2-7B", str(row[0]))
        for at, size in zip(row[4:], sizes, strict=True):
            n: Any = at
            assert (n - 1) * 2 * parameters / 1e9 <= size < n * 2 * parameters / 1e9


def test_the_plot_has_the_same_bytes(made: Result) -> None:
    (plot,) = made.plots
    ten: Any = next(row for row in plot.grid.rows if row[0] == 10)
    assert list(ten[1 : 1 + len(METHODS)]) == [row[3] for row in made.grids[0].rows]
    assert [trace["name"] for trace in plot.data][: len(METHODS)] == list(METHODS)


def test_the_printed_numbers_agree_and_others_would_not(made: Result) -> None:
    assert [claim.verdict for claim in AppendixC().claims(made)] == ["agrees"] * 6
    drafters, bases = made.grids
    halved = replace(drafters, rows=tuple((*r[:2], r[2] / 2, r[3] / 2, *r[4:]) for r in drafters.rows))  # type: ignore[operator]
    only = replace(bases, rows=bases.rows[:1])
    claims = AppendixC().claims(Result((halved, only)))
    assert [claim.holds for claim in claims] == [True, True, False, False, False, False]
