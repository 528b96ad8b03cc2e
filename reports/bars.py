"""Speedup drawn: a bar for each task and method, with whiskers and a line at 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specbench_ss.reports.palette import Style
from specbench_ss.reports.speed import Cells, tasks
from specbench_ss.reports.view import Cell, Chart, Column, Table, figure, plain
from specbench_ss.stats import OVERALL, SummaryRow
from specbench_ss.words import end, interval, title

LINE_AT_1 = {
    "type": "line",
    "xref": "paper",
    "x0": 0,
    "x1": 1,
    "y0": 1,
    "y1": 1,
    "line": {"color": "var(--text)", "width": 1.3, "dash": "dash"},
}


def speedups(cells: Cells, styles: Mapping[str, Style]) -> Chart:
    """The chart, with its table."""
    named = tasks(cells)
    drawn = {label: style for label, style in styles.items() if cells[label, OVERALL].comparison != "reference"}
    data = [_bars([cells[label, task] for task in named], style) for label, style in drawn.items()]
    return Chart(
        "speedup",
        "Speedup by task",
        "Bar chart: speedup of each method over the reference, by task, with 95 % intervals and a line at 1.",
        data,
        {
            "barmode": "group",
            "xaxis": {"showgrid": False, "type": "category"},
            "yaxis": {
                "title": {"text": "speedup over the reference"},
                "ticksuffix": "×",
                "range": [0, _top([cells[label, task] for label in drawn for task in named])],
            },
            "shapes": [LINE_AT_1],
        },
        _table(cells, drawn, named),
        "Whiskers are 95 % intervals. The dashed line is plain decoding: below it a method costs more than it saves.",
        height=390,
    )


def _top(rows: Sequence[SummaryRow]) -> float:
    """Upper end of the axis: every whisker is on the plot."""
    bars = [row.speedup or 1.0 for row in rows]
    whiskers = [row.speedup_interval[1] for row in rows if row.speedup_interval]
    return max(1.25, 1.05 * max([*bars, *whiskers], default=1))


def _bars(rows: Sequence[SummaryRow], style: Style) -> dict[str, Any]:
    speedup = [row.speedup or 0.0 for row in rows]
    ends = [row.speedup_interval or (None, None) for row in rows]
    return {
        "type": "bar",
        "name": rows[0].method,
        "x": [_tick(row.category) for row in rows],
        "y": speedup,
        "marker": style.marker(),
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [None if high is None else high - value for (_, high), value in zip(ends, speedup, strict=True)],
            "arrayminus": [None if low is None else value - low for (low, _), value in zip(ends, speedup, strict=True)],
            "color": "var(--text)",
            "thickness": 1.1,
            "width": 3,
        },
        "customdata": [interval(row.speedup_interval) or "no interval" for row in rows],
        "hovertemplate": "%{x}: %{y:.2f}× (%{customdata})",
    }


def _tick(task: str) -> str:
    return f"<b>{task}</b>" if task == OVERALL else title(task)


def _table(cells: Cells, styles: Mapping[str, Style], named: Sequence[str]) -> Table:
    columns = [Column("method", False), Column("task", False), Column("speedup"), Column("low"), Column("high")]
    rows = []
    for label, style in styles.items():
        for row in (cells[label, task] for task in named):
            ends = [Cell(end(x), x) for x in row.speedup_interval] if row.speedup_interval else [figure(None)] * 2
            rows.append([style.cell(), plain(title(row.category)), figure(row.speedup, 2, "×"), *ends])
    return Table("speedup", columns, rows)
