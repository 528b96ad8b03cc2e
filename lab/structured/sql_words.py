# ruff: noqa: E501 - a template or a word list is one line
"""The tables, columns and values that the SQL questions are about."""

from __future__ import annotations

from dataclasses import dataclass

from lab.example import load


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its name, its kind of value, or for a number the range."""

    name: str
    kind: str
    low: int = 0
    high: int = 0

    @property
    def is_number(self) -> bool:
        return not self.kind

    @property
    def words(self) -> str:
        """The name as a question says it; what is counted is a number of things."""
        counted = self.is_number and (self.name.endswith("s") or self.name in ("staff", "crew"))
        return ("number of " if counted else "") + self.name.replace("_", " ")


@dataclass(frozen=True, slots=True)
class Table:
    """A table (a plural noun), the noun for one row, and its columns; the first column names a row."""

    name: str
    single: str
    columns: tuple[Column, ...]


VALUES = load("sql_words.values", dict[str, tuple[str, ...]])

_TABLES = load("sql_words.tables", str)

_LINKS = load("sql_words.links", str)


def _column(text: str) -> Column:
    name, _, kind = text.partition("=")
    low, dash, high = kind.partition("-")
    return Column(name, "", int(low), int(high)) if dash else Column(name, kind or "name")


def _table(name: str, single: str, columns: list[str]) -> Table:
    return Table(name, single, tuple(_column(column) for column in columns))


def _link(line: str) -> tuple[Table, Table]:
    left, right = line.split(" ; ")
    child, child_one, parent, parent_one, *columns = left.split()
    return _table(child, child_one, columns), _table(parent, parent_one, right.split())


TABLES = tuple(_table(words[0], words[1], words[2:]) for words in map(str.split, _TABLES.strip().splitlines()))
LINKS = tuple(_link(line) for line in _LINKS.strip().splitlines())
