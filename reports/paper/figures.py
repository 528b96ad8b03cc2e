"""Figures of the papers' experiments: columns of a table as lines or bars, in the style of the report's charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from plotly.graph_objects import Figure

from specbench_ss.reports import charts
from specbench_ss.reports.paper.claims import number_or_none
from specbench_ss.results.report import Grid, Plot

Columns = Sequence[str] | Mapping[str, str]  # titles, or {name of a series: title}
Points = list[tuple[Any, float | None]]  # (x, y)
TIMES: Mapping[str, Any] = {"yaxis_ticksuffix": "×"}
PERCENT: Mapping[str, Any] = {"yaxis_tickformat": ".0%"}
LOG: Mapping[str, Any] = {"yaxis_type": "log"}


def plot(name: str, title: str, grid: Grid, drawn: Figure, note: str = "", **layout: Any) -> Plot:
    """Return a figure with its table. layout: additional Plotly layout."""
    figure = drawn.update_layout(**layout).to_plotly_json()
    kept = {name: value for name, value in figure["layout"].items() if name != "template"}
    names = ", ".join(trace["name"] for trace in figure["data"] if trace.get("showlegend", True) and "name" in trace)
    label = f"Chart: {title}{', for ' if names else ''}{names}."
    return Plot(name, title, label, list(figure["data"]), kept, grid, note)


def lines(
    name: str, title: str, grid: Grid, x: str, columns: Columns, y: str, by: str = "", x_title: str = "", **layout: Any
) -> Plot:
    """Return a line for each column over the column x; by: a column that splits the rows into lines."""
    return plot(name, title, grid, charts.lines(series_of(grid, x, columns, by), x_title or x, y), **layout)


def bars(name: str, title: str, grid: Grid, x: str, columns: Columns, y: str, by: str = "", **layout: Any) -> Plot:
    """Return a group of bars for each row, as in `lines`. x may be a text with column titles in braces."""
    return plot(name, title, grid, charts.bars(series_of(grid, x, columns, by), y=y), **layout)


def series_of(grid: Grid, x: str, columns: Columns, by: str = "") -> dict[str, Points]:
    """Return series of a table, {name: points}. Names begin with the value of the column `by`."""
    named = columns if isinstance(columns, Mapping) else dict(zip(columns, columns, strict=True))
    series: dict[str, Points] = {}
    for row in grid.records():
        place = row[x] if x in row else x.format_map(row)
        for name, title in named.items():
            whole = ", ".join(filter(None, (str(row[by]) if by else "", name)))
            series.setdefault(whole, []).append((place, number_or_none(row[title])))
    return series
