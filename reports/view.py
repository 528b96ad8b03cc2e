"""What the page is made of: tables, charts, and numbers as text. Knows neither runs nor HTML."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

MISSING = "–"


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table. sort: the raw value; small: a second, quieter line; swatch: a method's colour class."""

    text: str
    sort: float | str | None = None
    small: str = ""
    swatch: str = ""
    strong: bool = False
    tag: str = ""  # 'good', 'bad', 'flat', 'note': a labelled pill, never colour alone


@dataclass(frozen=True, slots=True)
class Column:
    """numeric columns are set in tabular figures, to the right. help: the definition, on hover."""

    title: str
    numeric: bool = True
    help: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table. name: its id in the page, and that of its CSV file."""

    name: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    sortable: bool = True
    total: bool = False  # the first row sums up the others


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
        """JSON for the page."""
        return {"data": self.data, "layout": {**self.layout, "height": self.height}}


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of the record of a run."""

    name: str
    value: str
    code: bool = False


@dataclass(frozen=True, slots=True)
class Notice:
    """Something the reader must not miss: 'error', 'warning' or 'ok', and a sentence."""

    level: str
    title: str
    lines: Sequence[str] = field(default=())


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """'1,234.50 ms'; a dash for what is unknown."""
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{value:,.{digits}f}{unit}"


def times(value: float | None) -> str:
    """A speedup: '1.84×'."""
    return number(value, 2, "×")


def percent(value: float | None, digits: int = 0) -> str:
    """A share of 1 as '43%'."""
    return number(None if value is None else 100 * value, digits, "%")


def interval(bounds: tuple[float, float] | None, digits: int = 2) -> str:
    """'1.71 – 1.97'."""
    return "" if bounds is None else f"{number(bounds[0], digits)}–{number(bounds[1], digits)}"


def title(name: str) -> str:
    """'math_reasoning' -> 'math reasoning'."""
    return name.replace("_", " ")


def plain(text: str, sort: str | None = None) -> Cell:
    """A cell of text."""
    return Cell(text, text if sort is None else sort)


def figure(value: float | None, digits: int = 2, unit: str = "", **rest: Any) -> Cell:
    """A cell with a number."""
    return Cell(number(value, digits, unit), value, **rest)
