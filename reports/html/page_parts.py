"""The parts of a page: tables, charts and their cells. This module knows neither runs nor HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specbench_ss.results.number_text import number


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table. sort: the raw value. small: quieter lines below. swatch: a method's colour class."""

    text: str
    sort: float | str | None = None
    small: Sequence[str] = ()
    swatch: str = ""
    strong: bool = False
    tag: str = ""  # 'good', 'bad', 'note', 'flat': the text stands in a pill of that kind


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table. Numeric ones are set in tabular figures, to the right.

    help: the definition, shown on hover.
    """

    title: str
    numeric: bool = True
    help: str = ""
    swatch: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table. name: its id in the page, and that of its CSV file. notes: what stands below it."""

    name: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    sortable: bool = True
    total: bool = False  # the first row sums up the others
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Chart:
    """A Plotly figure (data and layout) with its table. label: what a screen reader says instead of it."""

    name: str
    title: str
    label: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    table: Table
    note: str = ""
    height: int = 340

    def spec(self) -> dict[str, Any]:
        """Return the JSON data for the page."""
        return {"data": self.data, "layout": {**self.layout, "height": self.height}}


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of the record of a run."""

    name: str
    value: str
    code: bool = False


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that the reader must not miss. level: 'error', 'warning' or 'ok'. title: a sentence."""

    level: str
    title: str
    lines: Sequence[str] = field(default=())


def plain(text: str, sort: str | None = None) -> Cell:
    """Return a cell of text."""
    return Cell(text, text if sort is None else sort)


def figure(value: float | None, digits: int = 2, unit: str = "", **rest: Any) -> Cell:
    """Return a cell with a number."""
    return Cell(number(value, digits, unit), value, **rest)
