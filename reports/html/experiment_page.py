"""The page of an experiment of a paper: its charts and tables, and how it was made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specbench_ss import __version__
from specbench_ss.reports.html import assets, page_parts
from specbench_ss.results.report import Column, Experiment, Grid, Plot, Result, Value
from specbench_ss.results.terminal import cell

HEIGHT = 390  # pixels of a chart
NOT_DRAWN = (
    "The charts are left out: the package plotly could not be loaded where this page was made. Their numbers follow."
)


@dataclass(frozen=True, slots=True)
class Chart:
    """A Plotly figure (data and layout) with its table. label: what a screen reader says instead of it."""

    name: str
    title: str
    label: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    table: page_parts.Table
    note: str = ""
    height: int = HEIGHT

    def spec(self) -> dict[str, Any]:
        """Return the JSON data for the page."""
        return {"data": self.data, "layout": {**self.layout, "height": self.height}}


def scripts(charts: bool) -> list[str]:
    """Return the scripts of the page, Plotly first where it draws charts."""
    drawing = [assets.plotly_js(), assets.joined(("tables.js", "plots.js"))]
    return drawing if charts else [assets.asset("tables.js")]


def page(experiment: Experiment, result: Result, facts: Mapping[str, str]) -> dict[str, Any]:
    """Return everything that the template shows. Charts whose library is not there are their tables alone."""
    plots = result.plots if assets.plotly_js() else ()
    drawn = [plot.grid for plot in plots]
    tables = result.grids if plots else result.all_grids()
    return {
        "title": experiment.title,
        "source": experiment.source,
        "version": __version__,
        "charts": [_chart(plot) for plot in plots],
        "tables": [_table(grid, grid.name) for grid in tables if grid not in drawn],
        "lines": result.lines,
        "notes": [*([NOT_DRAWN] if len(plots) < len(result.plots) else []), *result.notes],
        "facts": [page_parts.Fact(name, value, name == "command") for name, value in facts.items()],
    }


def _chart(plot: Plot) -> Chart:
    return Chart(plot.name, plot.title, plot.label, plot.data, plot.layout, _table(plot.grid, plot.name), plot.note)


def _table(grid: Grid, name: str) -> page_parts.Table:
    columns = [page_parts.Column(column.title, column.form != "text") for column in grid.columns]
    rows = [[_cell(value, c) for value, c in zip(row, grid.columns, strict=True)] for row in grid.rows]
    return page_parts.Table(name, columns, rows, grid.caption)


def _cell(value: Value, column: Column) -> page_parts.Cell:
    return page_parts.Cell(cell(value, column), value)
