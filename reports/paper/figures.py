"""Figures of the papers' experiments: columns of a table as lines or bars, in the style of the report's charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from plotly.graph_objects import Figure

from specbench_ss.reports.paper.claims import number_or_none
from specbench_ss.reports.paper.experiment import records
from specbench_ss.results.report import Grid, Plot

Points = list[tuple[Any, float | None]]  # (x, y)
TIMES: Mapping[str, Any] = {"yaxis_ticksuffix": "×"}
PERCENT: Mapping[str, Any] = {"yaxis_tickformat": ".0%"}
LOG: Mapping[str, Any] = {"yaxis_type": "log"}


def series_of(grid: Grid, x: str, columns: Mapping[str, str], by: str = "") -> dict[str, Points]:
    """Return series of a table, {name: points}.

    x: title of a column, or a text with titles in braces. columns: {name: title of the column}. by: a column that
    splits the rows into series of their own, whose names begin with its values.
    """
    series: dict[str, Points] = {}
    for row in records(grid):
        place = row[x] if x in row else x.format_map(row)
        for name, title in columns.items():
            whole = ", ".join(filter(None, (str(row[by]) if by else "", name)))
            series.setdefault(whole, []).append((place, number_or_none(row[title])))
    return series


def each(titles: Sequence[str]) -> dict[str, str]:
    """Return columns that are drawn under their own titles."""
    return dict(zip(titles, titles, strict=True))


def plot(name: str, title: str, label: str, grid: Grid, drawn: Figure, note: str = "", **layout: Any) -> Plot:
    """Return a figure with its table. label: what a screen reader says. layout: more of Plotly's layout."""
    made = drawn.update_layout(**layout).to_plotly_json()
    kept = {name: value for name, value in made["layout"].items() if name != "template"}
    return Plot(name, title, label, list(made["data"]), kept, grid, note)
