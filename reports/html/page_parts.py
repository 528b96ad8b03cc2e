"""Parts of a page: tables, charts and notices."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from typing import Any

from specbench_ss.reports.palette import Style
from specbench_ss.results import frames, table
from specbench_ss.results.analysis import Results
from specbench_ss.results.summary import SummaryRow
from specbench_ss.results.text import format_number, percent, visible
from specbench_ss.runs.records import Run

MEANINGS = {column.name: column.meaning for column in (*frames.LEVELS, *frames.MACHINE, *frames.SUMMARY)}
HEIGHT = 390  # pixels of a chart that has none of its own


def finalize(value: Any) -> Any:
    """Return a value of a template with its text made visible; markup stays as it is."""
    return visible(value) if type(value) is str else value


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table. sort: the raw value. small: quieter lines below. swatch: a method's, as `Style.swatch`.

    values: values of the CSV file, one for each of the column's `fields`. tint: 'up' or 'down', of strength `share`
    from 0 to 1. note: a text that is shown on hover and on focus. measures: texts between which the page switches.
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
    measures: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table. Numeric ones are set in tabular figures, to the right.

    of: what a row has there, by name or by a function: a number or text, or a whole cell. help: shown on hover; where
    `of` is a name, by default the meaning of that column of a frame. per: what one unit of the column is in the value's
    own unit. fields: the columns that it becomes in a CSV file, if it is more than one with its title. part: it is
    hidden until the column that unfolds is opened.
    """

    title: str
    of: str | Callable[[Any], Any] = ""
    help: str = ""
    digits: int = 2
    unit: str = ""
    per: float = 1.0
    numeric: bool = True
    fields: Sequence[str] = ()
    part: bool = False
    unfolds: bool = False

    @property
    def hint(self) -> str:
        """Return what is shown on hover."""
        return self.help or (MEANINGS.get(self.of, "") if isinstance(self.of, str) else "")

    def cell(self, row: Any) -> Cell:
        """Return the cell of a row."""
        if callable(self.of):
            value = self.of(row)
        else:
            value = row.get(self.of) if isinstance(row, Mapping) else getattr(row, self.of)
        if isinstance(value, Cell):
            return value
        if not self.numeric:
            return plain(value or "")
        return figure(value if value is None or self.per == 1 else value / self.per, self.digits, self.unit)


VERDICTS = {"faster": "good", "higher": "good", "slower": "bad", "lower": "bad", "invalid": "bad"}  # others: flat


def verdict_cell(verdict: str) -> Cell:
    """Return a cell with a verdict on a change or a speedup."""
    return Cell(verdict, verdict, tag=VERDICTS.get(verdict, "flat"))


def shared(column: table.Column, **changes: Any) -> Column:
    """Return a column of the terminal's tables for the page. changes: fields that differ on the page."""
    made = Column(
        column.title,
        lambda row: Cell(
            column.cell(row), column.sort_key(row), strong=column.strong is not None and column.strong(row)
        ),
        column.meaning or MEANINGS.get(column.key, ""),
        numeric=not column.left,
    )
    return replace(made, **changes)


@dataclass(frozen=True, slots=True)
class Table:
    """A table. name: its id in the page, and that of its CSV file. notes: what stands below it."""

    name: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    sortable: bool = True
    notes: Sequence[str] = ()

    @classmethod
    def of(cls, name: str, columns: Sequence[Column], rows: Iterable[Any], caption: str = "", **more: Any) -> Table:
        """Return the table of these rows, with cells by the columns' sources."""
        return cls(name, columns, [[column.cell(row) for column in columns] for row in rows], caption, **more)

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
class Chart:
    """A Plotly figure as JSON data, with its table. note: a sentence above it."""

    name: str
    title: str
    figure: Mapping[str, Any]
    table: Table | None = None
    note: str = ""
    label: str = ""  # for screen readers; the title where it is empty

    @property
    def height(self) -> float:
        """Return its height in pixels."""
        return float(self.figure["layout"].get("height") or HEIGHT)

    def spec(self) -> dict[str, Any]:
        """Return what the page's script draws: data and layout without the style that all charts share."""
        layout = {name: value for name, value in self.figure["layout"].items() if name != "template"}
        return {"data": self.figure["data"], "layout": {**layout, "height": self.height}}


@dataclass(frozen=True)
class View:
    """A run as the sections of its page take it.

    look: the style of each method, in the order of the ranking. overall: its row over all tasks, in that order.
    contestants: methods of the ranking, without autoregressive decodings that are folded.
    """

    results: Results
    look: Mapping[str, Style]
    overall: Mapping[str, SummaryRow]
    contestants: Sequence[str]

    @property
    def run(self) -> Run:
        """The records of the run."""
        return self.results.run

    @property
    def served(self) -> bool:
        """Return whether servers were measured, in place of methods in this process."""
        return bool(self.run.manifest["config"].get("endpoints"))

    def method(self, title: str = "method") -> Column:
        """Return the column that names the method of a row."""
        return Column(title, lambda row: method_cell(self.look[_method_of(row)]), numeric=False)


def _method_of(row: Any) -> str:
    return str(row["method"] if isinstance(row, Mapping) else row.method)


def method_cell(style: Style) -> Cell:
    """Return a cell with a method's name."""
    return Cell(style.name or style.label, style.label, swatch=style.swatch)


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of the record of a run. main: it belongs to the printed page too."""

    name: str
    value: str
    code: bool = False
    main: bool = False


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
    return Cell(format_number(value, digits, unit), value, **rest)


def percent_cell(share: float | None) -> Cell:
    """Return a cell with a share of 1."""
    return Cell(percent(share, 1), share)
