"""A row of the results in words, and the notes that explain its marks: the same in the terminal and in the report."""

from __future__ import annotations

from collections.abc import Sequence

from specbench_ss.intervals import FEWEST
from specbench_ss.stats import SummaryRow
from specbench_ss.words import MISSING, times

MARKS = {"not distinguishable": "≈", "too few": "?"}


def speedup(row: SummaryRow) -> str:
    """'≈ 1.13×' where the interval covers 1, '? 1.61×' where there is none."""
    text = times(row.speedup)
    mark = MARKS.get(row.comparison, "") if text != MISSING else ""
    return f"{mark} {text}" if mark else text


def notes(rows: Sequence[SummaryRow]) -> list[str]:
    """What the marks mean that these rows bear."""
    marks = {speedup(row)[0] for row in rows}
    known = {
        "≈": "≈ not distinguishable from the reference: the interval covers 1",
        "?": f"? no interval, since there are fewer than {FEWEST} questions: how far off the value may be is not known",
    }
    return [text for mark, text in known.items() if mark in marks]
