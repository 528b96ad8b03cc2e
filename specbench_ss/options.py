"""Options as dataclasses: bounds, values read from text, and methods as they are asked for.

An option of a limited range says so in its type: `ngram: Annotated[int, Ge(1), Le(64)]`, with the bounds of the
library annotated-types. They are checked and shown to users wherever options are.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints
from weakref import WeakKeyDictionary

from annotated_types import BaseMetadata, Ge, GroupedMetadata, Gt, Le, Lt

from specbench_ss.errors import UserError, did_you_mean, first_line

_SWITCH = {"on": True, "true": True, "yes": True, "1": True, "off": False, "false": False, "no": False, "0": False}
_NONE = ("none", "null", "")
MOST_SEED = 2**63 - 1  # that torch's generators take


@dataclasses.dataclass(frozen=True, slots=True)
class NoOptions:
    """Options of a method or a trainer that has none."""


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds that an option's type declares."""

    marks: tuple[Ge | Gt | Le | Lt, ...]

    def hold(self, value: Any) -> bool:
        """Whether a number is within them; nan never is. What is no number, as the 'auto' of a union, has no bounds."""
        return not isinstance(value, Real) or all(_holds(mark, value) for mark in self.marks)

    def __str__(self) -> str:
        """In words, as after 'must be': '1 to 64', 'at least 1', 'above 0 and at most 1', 'a number above 0'."""
        limits = {type(mark): _limit(mark) for mark in self.marks}
        finite = limits.get(Lt) == "inf"
        if finite:
            del limits[Lt]
        if set(limits) == {Ge, Le}:
            return f"{limits[Ge]} to {limits[Le]}"
        if set(limits) == {Ge, Lt}:
            return f"{limits[Ge]} or more and below {limits[Lt]}"
        words = " and ".join(f"{_WORDS[kind]} {limits[kind]}" for kind in _WORDS if kind in limits)
        return f"a number {'of ' * (Ge in limits)}{words}" if finite else words


_WORDS: dict[type[Any], str] = {Ge: "at least", Gt: "above", Le: "at most", Lt: "below"}


def _limit(mark: Ge | Gt | Le | Lt) -> str:
    """The number of a bound, which the library calls by the bound's own name."""
    limit = getattr(mark, type(mark).__name__.lower())
    return str(limit) if isinstance(limit, int) else f"{limit:g}"


def _holds(mark: Ge | Gt | Le | Lt, value: Any) -> bool:
    match mark:
        case Ge(least):
            return bool(value >= least)
        case Gt(least):
            return bool(value > least)
        case Le(most):
            return bool(value <= most)
        case Lt(most):
            return bool(value < most)


_bounds: WeakKeyDictionary[type[Any], dict[str, Bounds]] = WeakKeyDictionary()  # types are read once


def bounds_of(options: type[Any]) -> Mapping[str, Bounds]:
    """The declared bounds of a dataclass's fields, of those that have some; of an optional one those of its value."""
    if options not in _bounds:
        hints = get_type_hints(options, include_extras=True)
        found = {f.name: Bounds(tuple(_marks(hints[f.name]))) for f in dataclasses.fields(options)}
        _bounds[options] = {name: bounds for name, bounds in found.items() if bounds.marks}
    return _bounds[options]


def _marks(kind: Any) -> Iterator[Ge | Gt | Le | Lt]:
    return (mark for mark in _metadata(kind) if isinstance(mark, Ge | Gt | Le | Lt))


def _metadata(kind: Any) -> Iterator[BaseMetadata]:
    """What the library's marks say of a type, those of a union's parts included."""
    if _is_union(kind):
        for part in get_args(kind):
            yield from _metadata(part)
    elif get_origin(kind) is Annotated:
        yield from _metadata(kind.__origin__)
        for given in kind.__metadata__:
            marks = given if isinstance(given, GroupedMetadata) else (given,)
            yield from (mark for mark in marks if isinstance(mark, BaseMetadata))


def takes_none(kind: Any) -> bool:
    """Whether None is a value of a type."""
    if get_origin(kind) is Annotated:
        return takes_none(kind.__origin__)
    return kind is type(None) or (_is_union(kind) and any(takes_none(part) for part in get_args(kind)))


def whole_number(name: str, value: Any, least: int) -> int:
    """A value given in Python as a plain int. Raises UserError for what is no whole number of at least `least`."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise UserError(f"{name} must be a whole number of at least {least}, not {value!r}")
    return number


def encodable(text: str) -> bool:
    """Whether a text can be written as UTF-8: it holds no half of a surrogate pair, which is no character.

    JSON can hold one; arguments that are not UTF-8 become such text.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


LONGEST = 1e8  # seconds, three years: clocks of operating systems end somewhere beyond


def seconds(name: str, value: Any) -> float:
    """A length of time above 0 that a clock can measure. Raises UserError for what is none."""
    number = positive(name, value)
    if number > LONGEST:
        raise UserError(f"{name} must be at most {LONGEST:,.0f} seconds, not {value!r}")
    return number


def positive(name: str, value: Any) -> float:
    """A value as a plain, finite float above 0. Raises UserError for what is none."""
    number = plain_number(name, value)
    if not 0 < number < math.inf:
        raise UserError(f"{name} must be a number above 0, not {value!r}")
    return number


def plain_number(name: str, value: Any) -> float:
    """A value given in Python as a plain float. Raises UserError for what is no number."""
    if isinstance(value, Real) and not isinstance(value, bool):
        return float(value)
    raise UserError(f"{name} must be a number, not {value!r}")


def check_bounds(options: type[Any], values: Mapping[str, Any], owner: str = "", flag: str = "") -> None:
    """Raise UserError, one line that begins with `owner`, for the first value beyond its field's declared bounds.

    A value of None is an option that was not given. flag: what stands before a field's name in the complaint, as '--'.
    """
    for name, bounds in bounds_of(options).items():
        value = values.get(name)
        if value is not None and not bounds.hold(value):
            shown = flag + name.replace("_", "-") if flag else name
            raise UserError(f"{owner}{': ' * bool(owner)}{shown} must be {bounds}, not {value}")


class Bounded:
    """Base of options that hold to their declared bounds however they are made.

    owner: the method or trainer that complaints name first; '' where several share the options. Values that do not go
    together are refused by `check_together`.
    """

    __slots__ = ()
    owner: ClassVar[str] = ""

    def __post_init__(self) -> None:
        kind = type(self)
        check_bounds(kind, {name: getattr(self, name) for name in bounds_of(kind)}, self.owner)
        self.check_together()

    def check_together(self) -> None:
        """Raise UserError for values that are each within their bounds and do not go together."""


def option(default: Any, help: str) -> Any:
    """Return the field of an option with this help text."""
    return field(default=default, metadata={"help": help})


@dataclasses.dataclass(frozen=True, slots=True)
class OptionInfo:
    """One option, as listed to the user."""

    name: str
    type: str
    default: str
    help: str


def describe_options(options: type[Any]) -> list[OptionInfo]:
    """The options of an `Options` dataclass, in order of definition. Help comes from metadata={"help": ...}."""
    hints = get_type_hints(options, include_extras=True)
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
    return make_options(options, values, owner)


def make_options(options: type[Any], values: Mapping[str, Any], owner: str) -> Any:
    """An instance of the dataclass `options`. Raises UserError, one line, for values that it cannot have.

    The line begins with the options' own owner, where they are `Bounded` and name one, else with `owner`.
    """
    own = options.owner if issubclass(options, Bounded) else ""
    check_bounds(options, values, own or owner)
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
        made, extras = options(), get_type_hints(options, include_extras=True)
        for f in dataclasses.fields(options):
            if strange := [mark for mark in _metadata(extras[f.name]) if not isinstance(mark, Ge | Gt | Le | Lt)]:
                return f"its option {f.name} declares {strange[0]}; only Ge, Gt, Le, Lt and Interval are checked"
        check_bounds(options, option_values(made))
    except Exception as error:  # whatever a plugin's annotations and __post_init__ may raise
        return f"its Options cannot be made: {first_line(error)}"
    return ""


def _readable(kind: Any) -> bool:
    if _is_union(kind):
        return all(part is type(None) or _readable(part) for part in get_args(kind))
    return get_origin(kind) is Literal or kind in (bool, int, float, str, Path)


def option_values(options: Any) -> dict[str, Any]:
    """The value of every field of an Options instance, by name; nothing of what is no dataclass."""
    if not dataclasses.is_dataclass(options):
        return {}
    return {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}


def options_text(options: Any) -> str:
    """'k=4, prune=on': every value of an Options instance, as it would be written on the command line."""
    return ", ".join(f"{name}={value_text(value)}" for name, value in option_values(options).items())


def value_text(value: Any) -> str:
    """A value as text that `parse_options` reads back."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)


def type_name(kind: Any) -> str:
    """'int, 1 to 64', 'on|off', 'a|b', 'path or none': a type for people."""
    if get_origin(kind) is Annotated:
        bounds = Bounds(tuple(_marks(kind)))
        return type_name(kind.__origin__) + (f", {bounds}" if bounds.marks else "")
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


REFERENCE = "ar"  # the method every other one is compared with
_SPEC = re.compile(r"^(?P<name>[A-Za-z0-9_.-]+)(?:\[(?P<options>[^\[\]]*)\])?$")


@dataclass(frozen=True, slots=True)
class MethodSpec:
    """A method with the options given for it: `ss`, `ss[k=1]`, `ss[k=1,prune=off]`. Values are still text.

    copy: 2 for the reference that is asked for a second time, to be compared with itself: `ar#2`.
    """

    name: str
    options: dict[str, str] = field(default_factory=dict)
    copy: int = 1

    @property
    def label(self) -> str:
        """Return the name of this variant in every table: the text that it was asked for with."""
        inner = ",".join(f"{k}={v}" for k, v in self.options.items())
        return (f"{self.name}[{inner}]" if inner else self.name) + (f"#{self.copy}" if self.copy > 1 else "")

    def as_dict(self) -> dict[str, Any]:
        """Return what a manifest records of it."""
        asked = {"name": self.name, "options": dict(self.options)}
        return asked | ({"copy": self.copy} if self.copy > 1 else {})

    @classmethod
    def parse(cls, text: str) -> MethodSpec:
        """Read a method from text. Raises UserError for text that is not NAME or NAME[option=value,...]."""
        match = _SPEC.match(text.strip())
        if match is None:
            raise UserError(f"cannot read method {text!r}: expected NAME or NAME[option=value,...]")
        options = {}
        for part in filter(None, (match["options"] or "").split(",")):
            key, equals, value = part.partition("=")
            if not equals or not key.strip():
                raise UserError(f"cannot read option {part!r} of method {match['name']!r}: expected option=value")
            options[key.strip()] = value.strip()
        return cls(match["name"], options)


def split_methods(text: str) -> list[str]:
    """Split a list at its commas: 'ss,medusa[tree=a,k=2]' gives ['ss', 'medusa[tree=a,k=2]'].

    Commas inside brackets do not split.
    """
    return [part.strip() for part in re.split(r",(?![^\[]*\])", text) if part.strip()]


@dataclass(frozen=True, slots=True)
class PluginFile:
    """A plugin file as it was loaded. methods: names of the methods that it defines."""

    file: str
    sha256: str
    methods: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return what a manifest and a preset record of the file."""
        return {"file": self.file, "sha256": self.sha256, "methods": list(self.methods)}
