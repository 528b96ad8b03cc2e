"""Fields of a drafter's config.json: one table per family, which is the shape of its network.

A shape is a frozen dataclass. Each of its fields made by `config_field` names a field of config.json in speculators'
layout; other layouts are first renamed to that one. Types, defaults, bounds, error messages and the written file derive
from the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, field, fields
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

import msgspec

from specbench_ss import user_files
from specbench_ss.errors import UserError

if TYPE_CHECKING:
    from specbench_ss.engine.architectures import ModelInfo

Check = Callable[[Any, "ModelInfo"], str]  # returns what is wrong with a value for a model, '' if nothing is
KEY = "config_field"


class ConfigField(NamedTuple):
    """Entry of a table: how config.json states a field of a shape."""

    name: str
    default: Any
    check: Check | None
    always: bool


def config_field(name: str, default: Any = MISSING, *, check: Check | None = None, always: bool = True) -> Any:
    """Return the dataclass field of a shape that is read from config.json.

    Args:
        name: in speculators' layout.
        default: value if it is not stated; a field without one is required.
        check: returns what is wrong with a value.
        always: write the field at its default too.
    """
    return field(default=default, metadata={KEY: ConfigField(name, default, check, always)})


@cache
def _table(shape: Any) -> tuple[dict[str, ConfigField], type[msgspec.Struct]]:
    """Return the stated fields of a shape by attribute, and the record that msgspec reads them into."""
    table, types = {f.name: f.metadata[KEY] for f in fields(shape) if KEY in f.metadata}, get_type_hints(shape)
    entries = [(t.name, types[name], *(() if t.default is MISSING else (t.default,))) for name, t in table.items()]
    return table, msgspec.defstruct(shape.__name__, entries, kw_only=True)


def read_config_fields(config: Mapping[str, Any], shape: Any, base: ModelInfo) -> dict[str, Any]:
    """Return attributes of a shape as config.json states them.

    Raise UserError for a field that is missing, of another type, or that its check rejects.
    """
    table, record = _table(shape)
    parsed = _convert(config, record)
    values = {attribute: getattr(parsed, entry.name) for attribute, entry in table.items()}
    for attribute, entry in table.items():
        if entry.check is not None and (problem := entry.check(values[attribute], base)):
            raise UserError(f"{entry.name} in config.json is {values[attribute]!r}, {problem}")
    return values


def optional(config: Mapping[str, Any], name: str, kind: Any) -> Any:
    """Return a field that is no part of a shape, None if it is absent or null. Raise UserError for another type."""
    return read_field(config, name, kind | None) if name in config else None


def read_field(config: Mapping[str, Any], name: str, kind: Any) -> Any:
    """Return a required field. Raise UserError if it is missing or of another type."""
    return getattr(_convert(config, msgspec.defstruct("Fields", [(name, kind)])), name)


def _convert(config: Mapping[str, Any], record: type[msgspec.Struct]) -> msgspec.Struct:
    try:
        return user_files.convert(dict(config), record)
    except ValueError as problem:
        raise UserError(f"config.json: {problem}") from None


def to_config(shape: Any) -> dict[str, Any]:
    """Return the fields of config.json that a shape states, by their names in speculators' layout."""
    kind: Any = type(shape)
    values = [(entry, getattr(shape, attribute)) for attribute, entry in _table(kind)[0].items()]
    kept = {entry.name: value for entry, value in values if entry.always or value != entry.default}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in kept.items()}


def within(value: float, least: float, most: float) -> str:
    """Return '' for a number from `least` to `most`, else what is wrong."""
    return "" if least <= value <= most else f"it must be {least} to {most}"


def finite_problem(value: float, base: ModelInfo) -> str:
    """Return what is wrong with infinity and NaN, '' for other numbers."""
    return "" if math.isfinite(value) else "which is not finite"
