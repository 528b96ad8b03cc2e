"""Columns of a run's frames: unit and meaning, which the fields of its records carry as `Annotated`.

Names and meanings are stable. A dtype is pandas' nullable one, so a missing value is `pandas.NA`; `object` columns
hold tuples or lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

OF_INTERVAL = "end of its 95 % interval; missing below four questions"
DTYPES = {int: "Int64", float: "Float64", str: "string", bool: "boolean"}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a frame. unit: '' where it has none. meaning: for readers of the frame who do not know the code.

    value: gives a record's cell, None for a missing one; None gives the record's attribute of that name. items: what
    the lists of an `object` column hold.
    """

    name: str
    dtype: str
    unit: str
    meaning: str
    value: Callable[[Any], Any] | None = field(default=None, compare=False, repr=False)
    items: type = field(default=str, compare=False, repr=False)

    def cell(self, record: Any) -> Any:
        """Return a record's cell of this column."""
        return (self.value or attrgetter(self.name))(record)


@dataclass(frozen=True, slots=True)
class Ends:
    """Marks a field that holds an interval of two numbers, which are the columns NAME_low and NAME_high."""

    name: str
    unit: str = ""


def columns_of(kind: type[Any]) -> tuple[Column, ...]:
    """Return the columns of the fields that are declared as `Annotated[TYPE, MEANING, UNIT]`, or with `Ends`."""
    return tuple(column for name, own in _described(kind) for column in _columns(name, *own))


def _described(kind: type[Any]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield each field that is a column with its type and what describes it."""
    types, marked = get_type_hints(kind), get_type_hints(kind, include_extras=True)
    for name in (one.name for one in fields(kind)):
        metadata = [said for said in getattr(marked[name], "__metadata__", ()) if isinstance(said, str | Ends)]
        if metadata:
            yield name, (types[name], *metadata)


def _columns(name: str, kind: Any, said: str | Ends, unit: str = "") -> Iterator[Column]:
    if isinstance(said, str):
        if get_origin(kind) in (Union, UnionType):
            kind = next(one for one in get_args(kind) if one is not NoneType)
        dtype = "string" if get_origin(kind) is Literal else DTYPES.get(kind, "object")
        yield Column(name, dtype, unit, said, items=get_args(kind)[0] if dtype == "object" else str)
        return
    for i, (end, word) in enumerate((("low", "lower"), ("high", "upper"))):

        def value(record: Any, i: int = i) -> Any:
            bounds = getattr(record, name)
            return bounds[i] if bounds else None

        yield Column(f"{said.name}_{end}", "Float64", said.unit, f"{word} {OF_INTERVAL}", value)


def table(*lines: str) -> tuple[Column, ...]:
    """Make columns from lines of the form 'name | dtype | unit | meaning'."""
    parts: list[list[Any]] = [[part.strip() for part in line.split("|")] for line in lines]
    return tuple(Column(*of_line) for of_line in parts)
