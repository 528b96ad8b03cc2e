"""Figures 22 and 23: whoever reads the lines can read what the marks in them mean."""

from __future__ import annotations

from typing import get_args

from specbench_ss.reports.paper.replay import LEGEND
from specbench_ss.results.report import Mark, Span
from specbench_ss.results.terminal import marked


def test_the_legend_explains_every_mark_that_is_printed_without_colours() -> None:
    printed = [marked([Span("so", mark)], colours=False).plain for mark in get_args(Mark)]
    assert len(set(printed)) >= 3
    for text in printed:
        assert text == "so" or text in LEGEND


def test_the_legend_explains_the_marks_that_are_drawn() -> None:
    assert all(word in LEGEND for word in ("green", "bold", "struck out"))
