"""The chart of speedups: a bar for each task and method, whiskers where there is an interval, and a line at 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specbench_ss.method_spec import REFERENCE
from specbench_ss.reports.html.page_parts import Cell, Chart, Column, Table, figure, plain
from specbench_ss.reports.html.palette import Style
from specbench_ss.reports.html.speed import Cells, tasks
from specbench_ss.results.number_text import end, interval, title
from specbench_ss.results.summary import OVERALL, SummaryRow

LINE_AT_1 = {
    "type": "line",
    "xref": "paper",
    "x0": 0,
    "x1": 1,
    "y0": 1,
    "y1": 1,
    "line": {"color": "var(--text)", "width": 1.3, "dash": "dash"},
}

UNSURE = " Hollow, hatched bars have none: too few questions to say how far off they may be."


def speedups(cells: Cells, styles: Mapping[str, Style]) -> Chart:
    """Return the chart with its table."""
    named = tasks(cells)
    drawn = {label: style for label, style in styles.items() if cells[label, OVERALL].comparison != "reference"}
    rows = {label: [cells[label, task] for task in named if cells[label, task].speedup is not None] for label in drawn}
    data = [trace for label, style in drawn.items() for trace in _bars(rows[label], style)]
    unsure = any(row.speedup_interval is None for own in rows.values() for row in own)
    return Chart(
        "speedup",
        "Speedup by task",
        f"Bar chart: speedup of each method over {REFERENCE}, by task, with 95 % intervals and a line at 1.",
        data,
        {
            "barmode": "group",
            "xaxis": {
                "showgrid": False,
                "type": "category",
                "categoryorder": "array",
                "categoryarray": [_tick(task) for task in named],
            },
            "yaxis": {
                "title": {"text": f"speedup over {REFERENCE}"},
                "ticksuffix": "×",
                "range": [0, _top([row for own in rows.values() for row in own])],
            },
            "shapes": [LINE_AT_1],
        },
        _table(cells, drawn, named),
        f"Whiskers are 95 % intervals.{UNSURE if unsure else ''} The dashed line is plain decoding, {REFERENCE}: below "
        f"it a method costs more than it saves.{_own_models([cells[label, OVERALL] for label in drawn])}",
        height=390,
    )


def _own_models(rows: Sequence[SummaryRow]) -> str:
    """Say where to find methods compared with plain decoding of their own model, which the chart does not show."""
    found = [f"{row.method} over {row.reference}" for row in rows if row.reference_speedup is not None]
    return f" The table above also has {', '.join(found)}, its own model decoded plainly." if found else ""


def _top(rows: Sequence[SummaryRow]) -> float:
    """Return the upper end of the axis, so that every whisker is on the plot."""
    bars = [row.speedup or 1.0 for row in rows]
    whiskers = [row.speedup_interval[1] for row in rows if row.speedup_interval]
    return max(1.25, 1.05 * max([*bars, *whiskers], default=1))


def _bars(rows: Sequence[SummaryRow], style: Style) -> list[dict[str, Any]]:
    """Return filled bars with whiskers, and hollow, hatched bars where there is no interval, as one legend entry."""
    sure = [row for row in rows if row.speedup_interval]
    unsure = [row for row in rows if not row.speedup_interval]
    filled = {**_trace(sure, style), "marker": style.marker(), "error_y": _whiskers(sure)}
    hollow = {**_trace(unsure, style), "marker": style.hollow(), "showlegend": not sure}
    return [trace for trace, drawn in ((filled, sure), (hollow, unsure)) if drawn]


def _trace(rows: Sequence[SummaryRow], style: Style) -> dict[str, Any]:
    return {
        "type": "bar",
        "name": style.label,
        "legendgroup": style.label,
        "offsetgroup": style.label,
        "x": [_tick(row.category) for row in rows],
        "y": [row.speedup for row in rows],
        "customdata": [interval(row.speedup_interval) or "no interval: too few questions" for row in rows],
        "hovertemplate": "%{x}: %{y:.2f}× (%{customdata})",
    }


def _whiskers(rows: Sequence[SummaryRow]) -> dict[str, Any]:
    """Return the whiskers of rows that all have an interval.

    For a missing end, Plotly draws a whisker of no length, which would look like the surest value there is.
    """
    ends = [(row.speedup_interval or (0.0, 0.0), row.speedup or 0.0) for row in rows]
    return {
        "type": "data",
        "symmetric": False,
        "array": [high - value for (_, high), value in ends],
        "arrayminus": [value - low for (low, _), value in ends],
        "color": "var(--text)",
        "thickness": 1.1,
        "width": 3,
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
