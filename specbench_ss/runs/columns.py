"""Columns of a run's frames: unit and meaning, from the `Annotated` fields of its records.

Names and meanings are stable. Dtypes are pandas' nullable ones, so a missing value is `pandas.NA`; `object` columns
contain tuples or lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

OF_INTERVAL = "end of its 95 % interval"
DTYPES = {int: "Int64", float: "Float64", str: "string", bool: "boolean"}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a frame. unit: '' if it has none. meaning: for readers of the frame.

    value: returns a record's cell, None for a missing one; by default the attribute of that name. items: element type
    of the lists of an `object` column.
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
    """Annotation of a field with an interval of two numbers: the columns NAME_low and NAME_high."""

    name: str
    unit: str = ""


def columns_of(kind: type[Any]) -> tuple[Column, ...]:
    """Return the columns of the fields declared as `Annotated[TYPE, MEANING, UNIT]`, or with `Ends`."""
    return tuple(column for name, metadata in _annotated_fields(kind) for column in _columns(name, *metadata))


def _annotated_fields(kind: type[Any]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield each annotated field with its type and annotations."""
    types, marked = get_type_hints(kind), get_type_hints(kind, include_extras=True)
    for name in (column.name for column in fields(kind)):
        metadata = [item for item in getattr(marked[name], "__metadata__", ()) if isinstance(item, str | Ends)]
        if metadata:
            yield name, (types[name], *metadata)


def _columns(name: str, kind: Any, annotation: str | Ends, unit: str = "") -> Iterator[Column]:
    if isinstance(annotation, str):
        if get_origin(kind) in (Union, UnionType):
            kind = next(member for member in get_args(kind) if member is not NoneType)
        dtype = "string" if get_origin(kind) is Literal else DTYPES.get(kind, "object")
        yield Column(name, dtype, unit, annotation, items=get_args(kind)[0] if dtype == "object" else str)
        return
    for i, (end, bound) in enumerate((("low", "lower"), ("high", "upper"))):

        def value(record: Any, i: int = i) -> Any:
            bounds = getattr(record, name)
            return bounds[i] if bounds else None

        yield Column(f"{annotation.name}_{end}", "Float64", annotation.unit, f"{bound} {OF_INTERVAL}", value)


def table(*lines: str) -> tuple[Column, ...]:
    """Return columns from lines of the form 'name | dtype | unit | meaning'."""
    parts: list[list[Any]] = [[part.strip() for part in line.split("|")] for line in lines]
    return tuple(Column(*cells) for cells in parts)
