"""The parts of a page: tables, drawings and their cells. This module knows no run."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

from markupsafe import Markup

from specbench_ss.results.text import number


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table. sort: the raw value. small: quieter lines below. swatch: a method's, as `Style.swatch`.

    values: what stands in a CSV file, one for each of the column's `fields`. tint: 'up' or 'down', of strength `share`
    from 0 to 1. note: what is told of the cell where the reader points at it.
    """

    text: str
    sort: float | str | None = None
    small: Sequence[str] = ()
    swatch: str = ""
    strong: bool = False
    tag: str = ""  # 'good', 'bad', 'note', 'flat': the text stands in a pill of that kind
    values: Sequence[float | str | None] = ()
    tint: str = ""
    share: float = 0.0
    note: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table. Numeric ones are set in tabular figures, to the right.

    help: the definition, shown on hover. fields: the columns that it becomes in a CSV file, where it is more than one
    with its title.
    """

    title: str
    numeric: bool = True
    help: str = ""
    swatch: str = ""
    fields: Sequence[str] = ()


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

    def csv(self) -> str:
        """Return the table as a CSV file: raw values, each in a column of its own."""
        out = StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(name for column in self.columns for name in column.fields or (column.title,))
        for row in self.rows:
            pairs = zip(self.columns, row, strict=True)
            writer.writerow(value for column, cell in pairs for value in _values(column, cell))
        return out.getvalue()


@dataclass(frozen=True, slots=True)
class Line:
    """One row of a drawing: a strip as wide as there is room. text: its number."""

    label: str
    swatch: str
    strip: Markup
    text: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One of several small drawings on the same axes. lines, or a whole picture. note: a sentence below it."""

    label: str
    swatch: str = ""
    lines: Sequence[Line] = ()
    picture: Markup = Markup()
    axis: Markup = Markup()
    text: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Drawing:
    """A drawing with its table, unless another one has its numbers: rows on one axis, or panels.

    key: what colours stand for, as (text, colour). grid: definitions that its strips refer to.
    """

    name: str
    title: str
    table: Table | None
    lines: Sequence[Line] = ()
    panels: Sequence[Panel] = ()
    axis: Markup = Markup()
    key: Sequence[tuple[str, str]] = ()
    note: str = ""
    grid: Markup = Markup()


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of the record of a run. main: it belongs to the printed page too."""

    name: str
    value: str
    code: bool = False
    main: bool = False


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that the reader must not miss. level: 'error', 'warning', 'unknown' or 'ok'. title: a sentence."""

    level: str
    title: str
    lines: Sequence[str] = field(default=())


def _values(column: Column, cell: Cell) -> Sequence[float | str | None]:
    """Return what a cell is in a CSV file: None is written as nothing."""
    if column.fields:
        return cell.values or [None] * len(column.fields)
    return [cell.sort]


def plain(text: str, sort: str | None = None) -> Cell:
    """Return a cell of text."""
    return Cell(text, text if sort is None else sort)


def figure(value: float | None, digits: int = 2, unit: str = "", **rest: Any) -> Cell:
    """Return a cell with a number."""
    return Cell(number(value, digits, unit), value, **rest)
