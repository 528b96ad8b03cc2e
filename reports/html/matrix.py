"""Methods by tasks: a table that fits the page, and the same drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from markupsafe import Markup

from specbench_ss.reports.html import forest, ranking
from specbench_ss.reports.html.axis import APART_IN_PANELS, Axis
from specbench_ss.reports.html.page_parts import Cell, Column, Drawing, Line, Panel, Table
from specbench_ss.reports.html.palette import Style
from specbench_ss.reports.html.speed import Cells, fields, tasks
from specbench_ss.results import ranking as verdict_text
from specbench_ss.results.summary import SummaryRow
from specbench_ss.results.text import interval, number, times, title

IN_MATRIX = ("speedup", "speedup_low", "speedup_high", "comparison", "tau", "n_prompts", "n_questions", "n_failed")
GRID = "tasks"
STRONGEST = math.log(2.5)  # a speedup by this factor, or its inverse, has the strongest tint
DRAWN = "Lines are 95 % intervals; the line at 1 is plain decoding. The table below has the numbers."
UNSURE = "Hollow symbols have no interval: too few questions to say how far off they may be."


def matrix(cells: Cells, styles: Mapping[str, Style], ranked: Sequence[str]) -> Table:
    """Return the table: a row for each method in the order of `ranked`, a column for each task."""
    named = tasks(cells)
    columns = [Column("method", False), *(_column(task) for task in named)]
    rows = [[styles[label].cell(), *(_cell(cells[label, task]) for task in named)] for label in ranked]
    used = [row for row in cells.values() if row.method in ranked]
    marks = {mark for row in used for mark in verdict_text.speedup(row)[:1]}
    notes = [
        "A number is the speedup; blue is faster than plain decoding, orange slower.",
        *(["≈ not distinguishable: the interval covers 1."] if "≈" in marks else []),
        *(["? no interval: too few questions."] if "?" in marks else []),
    ]
    return Table("matrix", columns, rows, notes=notes)


def _column(task: str) -> Column:
    return Column(title(task), help=f"Speedup on {title(task)}", fields=[f"{task} {name}" for name in IN_MATRIX])


def _cell(row: SummaryRow) -> Cell:
    sure = row.comparison in ("faster", "slower")
    size = math.log(row.speedup) if sure and row.speedup else 0.0
    text = "void" if row.comparison == "void" else verdict_text.speedup(row).removesuffix("×")
    return Cell(
        text,
        row.speedup,
        strong=sure,
        values=fields(row, IN_MATRIX),
        tint="up" if size > 0 else "down" if size < 0 else "",
        share=round(min(abs(size) / STRONGEST, 1.0), 2),
        note=_note(row),
    )


def _note(row: SummaryRow) -> str:
    """Return what is told of a cell where the reader points at it."""
    bounds = interval(row.speedup_interval)
    said = f"{row.method}, {title(row.category)}: {verdict_text.speedup(row)}"
    around = f", 95 % interval {bounds}" if bounds else "" if row.comparison == "reference" else ", no interval"
    unsure = ", not distinguishable" if row.comparison == "not distinguishable" else ""
    return (
        f"{said}{around}{unsure}, τ {number(row.tau)}, {number(row.tokens_per_s, 1)} tokens/s, n {verdict_text.n(row)}"
    )


def by_task(cells: Cells, styles: Mapping[str, Style], ranked: Sequence[str]) -> Drawing:
    """Draw the same: a panel for each task, a row for each method, on one axis."""
    named = tasks(cells)
    shown = [x for x in ranked if cells[x, named[0]].comparison != "reference"]
    rows = [cells[label, task] for label in shown for task in named]
    axis = ranking.axis_of(rows, styles)
    panels = []
    for task in named:
        own = [cells[label, task] for label in shown]
        lines = [Line(r.method, styles[r.method].swatch, _strip(r, styles, axis), _short(r)) for r in own]
        panels.append(Panel(title(task), lines=lines, axis=forest.scale(axis, apart=APART_IN_PANELS)))
    unsure = any(row.speedup is not None and row.speedup_interval is None for row in rows)
    note = f"{DRAWN} {UNSURE}" if unsure else DRAWN
    return Drawing("speedup", "Speedup by task", None, panels=panels, note=note, grid=forest.grid_of(axis, GRID))


def _strip(row: SummaryRow, styles: Mapping[str, Style], axis: Axis) -> Markup:
    return forest.strip(GRID, forest.drawn(ranking.mark(row, styles[row.method]), axis))


def _short(row: SummaryRow) -> str:
    return "void" if row.comparison == "void" else times(row.speedup)
