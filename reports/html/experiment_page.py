"""The page of an experiment of a paper: its charts and tables, and how it was made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specbench_ss import __version__
from specbench_ss.reports.html import page_parts
from specbench_ss.results.report import Column, Experiment, Grid, Plot, Result, Value
from specbench_ss.results.terminal import cell


def page(experiment: Experiment, result: Result, facts: Mapping[str, str]) -> dict[str, Any]:
    """Return everything that the template shows. Charts whose library is not there are their tables alone."""
    drawn = [plot.grid for plot in result.plots]
    return {
        "title": experiment.title,
        "source": experiment.source,
        "version": __version__,
        "charts": [_chart(plot) for plot in result.plots],
        "tables": [_table(grid, grid.name) for grid in result.grids if grid not in drawn],
        "lines": result.lines,
        "notes": result.notes,
        "facts": [page_parts.Fact(name, value, name == "command") for name, value in facts.items()],
    }


def _chart(plot: Plot) -> page_parts.Chart:
    drawn = {"data": plot.data, "layout": plot.layout}
    return page_parts.Chart(plot.name, plot.title, drawn, _table(plot.grid, plot.name), plot.note, label=plot.label)


def _table(grid: Grid, name: str) -> page_parts.Table:
    columns = [page_parts.Column(column.title, column.form != "text") for column in grid.columns]
    rows = [[_cell(value, c) for value, c in zip(row, grid.columns, strict=True)] for row in grid.rows]
    return page_parts.Table(name, columns, rows, grid.caption)


def _cell(value: Value, column: Column) -> page_parts.Cell:
    return page_parts.Cell(cell(value, column), value)
