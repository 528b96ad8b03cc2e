"""Options given as text, turned into a method's frozen `Options` dataclass. Knows no method."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from specbench_ss.errors import UserError, did_you_mean, first_line

_SWITCH = {"on": True, "true": True, "yes": True, "1": True, "off": False, "false": False, "no": False, "0": False}
_NONE = ("none", "null", "")


@dataclasses.dataclass(frozen=True, slots=True)
class OptionInfo:
    """One option, as listed to the user."""

    name: str
    type: str
    default: str
    help: str


def describe_options(options: type[Any]) -> list[OptionInfo]:
    """The options of an `Options` dataclass, in order of definition. Help comes from metadata={"help": ...}."""
    hints = get_type_hints(options)
    return [
        OptionInfo(f.name, type_name(hints[f.name]), _default_text(f), str(f.metadata.get("help", "")))
        for f in dataclasses.fields(options)
        if f.init
    ]


def parse_options(options: type[Any], given: Mapping[str, str], owner: str) -> Any:
    """An instance of the dataclass `options` with `given` read by type. Raises UserError, one line, naming `owner`."""
    hints = get_type_hints(options)
    known = [f.name for f in dataclasses.fields(options) if f.init]
    values = {}
    for key, text in given.items():
        name = key.replace("-", "_")
        if name not in known:
            listed = f"options: {', '.join(known)}" if known else "it takes none"
            raise UserError(f"{owner} has no option {key!r}{did_you_mean(name, known)}; {listed}")
        try:
            values[name] = _read(hints[name], text)
        except ValueError:
            raise UserError(f"{owner}: option {name}={text!r} is not {_wanted(hints[name])}") from None
    try:
        return options(**values)
    except (TypeError, ValueError) as error:  # __post_init__ checks, missing options
        raise UserError(f"{owner}: {error}") from error


def options_problem(options: Any) -> str:
    """Why options cannot be given to a plugin as text; '' where they can."""
    if not (isinstance(options, type) and dataclasses.is_dataclass(options)):
        return "its Options is no dataclass"
    try:
        hints = get_type_hints(options)
        for f in dataclasses.fields(options):
            if f.init and not _readable(hints[f.name]):
                return f"its option {f.name} is {type_name(hints[f.name])}, which cannot be given as text"
            if f.init and f.default is f.default_factory is dataclasses.MISSING:
                return f"its option {f.name} has no default"
        options()
    except Exception as error:  # whatever a plugin's annotations and __post_init__ may raise
        return f"its Options cannot be made: {first_line(error)}"
    return ""


def _readable(kind: Any) -> bool:
    if _is_union(kind):
        return all(part is type(None) or _readable(part) for part in get_args(kind))
    return get_origin(kind) is Literal or kind in (bool, int, float, str, Path)


def options_text(options: Any) -> str:
    """'k=4, prune=on': every value of an Options instance, as it would be written on the command line."""
    pairs = ((f.name, getattr(options, f.name)) for f in dataclasses.fields(options))
    return ", ".join(f"{name}={value_text(value)}" for name, value in pairs)


def value_text(value: Any) -> str:
    """A value as text that `parse_options` reads back."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)


def type_name(kind: Any) -> str:
    """'int', 'on|off', 'a|b', 'path or none': a type for people."""
    if kind is bool:
        return "on|off"
    if get_origin(kind) is Literal:
        return "|".join(str(choice) for choice in get_args(kind))
    if _is_union(kind):
        return " or ".join("none" if part is type(None) else type_name(part) for part in get_args(kind))
    if isinstance(kind, type) and issubclass(kind, Path):
        return "path"
    return "text" if kind is str else str(getattr(kind, "__name__", kind))


def _wanted(kind: Any) -> str:
    """The type as a complaint names it: floats have to be finite."""
    return type_name(kind).replace("float", "a finite number")


def _read(kind: Any, text: str) -> Any:
    """Text as a value of type `kind`; ValueError where it is none."""
    if _is_union(kind):
        return _read_union(get_args(kind), text)
    if get_origin(kind) is Literal:
        choices = {str(choice): choice for choice in get_args(kind)}
        if text not in choices:
            raise ValueError(text)
        return choices[text]
    if kind is bool:
        if text.lower() not in _SWITCH:
            raise ValueError(text)
        return _SWITCH[text.lower()]
    if kind is Path:
        return Path(text).expanduser()
    if kind is float:
        return _read_float(text)
    if kind in (int, str):
        return kind(text)
    raise TypeError(f"options of type {kind} cannot be given as text")


def _read_float(text: str) -> float:
    """A finite number: nothing can be done with another one, and a run directory cannot hold it."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _read_union(parts: tuple[Any, ...], text: str) -> Any:
    """The first part of a union that can read the text; None for 'none'."""
    if type(None) in parts and text.lower() in _NONE:
        return None
    for part in parts:
        if part is not type(None):
            try:
                return _read(part, text)
            except ValueError:
                continue
    raise ValueError(text)


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType)


def _default_text(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return value_text(field.default)
    if field.default_factory is not dataclasses.MISSING:
        return value_text(field.default_factory())
    return "required"
