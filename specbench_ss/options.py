"""Options as dataclasses: bounds, values read from text, and specifications of methods.

The type of an option declares its range with the bounds of the library annotated-types, as in
`ngram: Annotated[int, Ge(1), Le(64)]`. Bounds are checked, and are shown wherever options are listed.
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

import msgspec
from annotated_types import BaseMetadata, Ge, GroupedMetadata, Gt, Le, Lt

from specbench_ss.errors import UserError, did_you_mean, expanded, first_line, known_words

_SWITCH = {"on": True, "true": True, "yes": True, "1": True, "off": False, "false": False, "no": False, "0": False}
_NONE = ("none", "null", "")
MOST_SEED = 2**63 - 1  # that torch's generators take


@dataclasses.dataclass(frozen=True, slots=True)
class NoOptions:
    """Options of a method or a trainer that has none."""


Mark = Ge | Gt | Le | Lt
_HOLD = {Ge: operator.ge, Gt: operator.gt, Le: operator.le, Lt: operator.lt}
_WORDS: dict[type[Any], str] = {Ge: "at least", Gt: "above", Le: "at most", Lt: "below"}


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds that an option's type declares: kind of mark -> number."""

    limits: Mapping[type[Mark], Any]

    @classmethod
    def of(cls, kind: Any) -> Bounds:
        """Return the bounds of a type."""
        marks = (mark for mark in _metadata(kind) if isinstance(mark, Mark))
        return cls({type(mark): getattr(mark, type(mark).__name__.lower()) for mark in marks})

    def contains(self, value: Any) -> bool:
        """Return True for a number within the bounds, and for a value that is no number; nan is outside."""
        return not isinstance(value, Real) or all(_HOLD[kind](value, limit) for kind, limit in self.limits.items())

    @property
    def ends(self) -> tuple[Any, Any]:
        """Return the first and the last number; None if there is none, or if a bound is excluded."""
        excluded = Gt in self.limits or self.limits.get(Lt, math.inf) < math.inf
        return (None, None) if excluded else (self.limits.get(Ge), self.limits.get(Le))

    def __str__(self) -> str:
        """Return text to follow 'must be': '1 to 64', 'at least 1', 'above 0 and at most 1', 'a number above 0'."""
        finite = self.limits.get(Lt) == math.inf
        limits = {
            kind: str(limit) if isinstance(limit, int) else f"{limit:g}"
            for kind, limit in self.limits.items()
            if limit != math.inf
        }
        if set(limits) == {Ge, Le}:
            return f"{limits[Ge]} to {limits[Le]}"
        if set(limits) == {Ge, Lt}:
            return f"{limits[Ge]} or more and below {limits[Lt]}"
        words = " and ".join(f"{_WORDS[kind]} {limits[kind]}" for kind in _WORDS if kind in limits)
        return f"a number {'of ' * (Ge in limits)}{words}" if finite else words


_bounds: WeakKeyDictionary[type[Any], dict[str, Bounds]] = WeakKeyDictionary()  # types are read once


def bounds_of(options: type[Any]) -> Mapping[str, Bounds]:
    """Return the bounds of a dataclass's fields, by name; an optional field has those of its value."""
    if options not in _bounds:
        hints = get_type_hints(options, include_extras=True)
        found = {f.name: Bounds.of(hints[f.name]) for f in dataclasses.fields(options)}
        _bounds[options] = {name: bounds for name, bounds in found.items() if bounds.limits}
    return _bounds[options]


def _metadata(kind: Any) -> Iterator[BaseMetadata]:
    """Yield the marks of the library in a type and in the parts of a union."""
    if _is_union(kind):
        for part in get_args(kind):
            yield from _metadata(part)
    elif get_origin(kind) is Annotated:
        yield from _metadata(kind.__origin__)
        for given in kind.__metadata__:
            marks = given if isinstance(given, GroupedMetadata) else (given,)
            yield from (mark for mark in marks if isinstance(mark, BaseMetadata))


def takes_none(kind: Any) -> bool:
    """Return True if None is a value of a type."""
    if get_origin(kind) is Annotated:
        return takes_none(kind.__origin__)
    return kind is type(None) or (_is_union(kind) and any(takes_none(part) for part in get_args(kind)))


def encodable(text: str) -> bool:
    """Return True if a text can be written as UTF-8: it contains no half of a surrogate pair.

    JSON can contain one, and arguments that are not UTF-8 become such text.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


LONGEST = 1e8  # seconds, three years: clocks of operating systems end somewhere beyond


def checked_value(name: str, kind: Any, value: Any) -> Any:
    """Return a value given in Python as a plain value of a type. Raises UserError that begins with the option's name.

    kind: a type that options have, with its bounds; or a list of texts.
    """
    if value is None and takes_none(kind):
        return None
    bounds, plain = Bounds.of(kind), _plain_type(kind)
    if get_origin(plain) is Literal:
        if value not in get_args(plain):
            raise UserError(f"{name}: there is no {value!r}{known_words(str(value), get_args(plain))}")
        return value
    try:
        made = _as_plain(plain, value)
    except (TypeError, OverflowError):
        limits = f", {bounds}" if bounds.limits and plain is int else ""
        raise UserError(f"{name} must be {_NOUNS[plain]}{limits}, not {value!r}") from None
    if not bounds.contains(made):
        raise UserError(f"{name} must be {bounds}, not {value!r}")
    return made


_NOUNS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", Path: "a path"} | {
    list[str]: "a list of texts"
}


def _plain_type(kind: Any) -> Any:
    """Return a type without its bounds and without None."""
    if get_origin(kind) is Annotated:
        return _plain_type(kind.__origin__)
    if _is_union(kind):
        return _plain_type(next(part for part in get_args(kind) if part is not type(None)))
    return kind


def _as_plain(kind: Any, value: Any) -> Any:
    """Return a value as an instance of a type. Raise TypeError if it is none; a text is no number."""
    if kind is int and not isinstance(value, bool):
        return operator.index(value)
    if kind is float and isinstance(value, Real) and not isinstance(value, bool):
        return float(value)
    if kind is str and isinstance(value, (str, Path)):
        return str(value)
    if kind is Path and isinstance(value, (str, Path)):
        return Path(value)
    if kind == list[str] and all(isinstance(item, str) for item in value):
        return list(value) or None
    if kind is bool and isinstance(value, bool):
        return value
    raise TypeError(value)


def check_bounds(options: type[Any], values: Mapping[str, Any], owner: str = "", flag: str = "") -> None:
    """Raise UserError, one line that begins with `owner`, for the first value beyond its field's declared bounds.

    A value of None is an option that was not given. flag: prefix of a field's name in the message, as '--'.
    """
    for name, bounds in bounds_of(options).items():
        value = values.get(name)
        if value is not None and not bounds.contains(value):
            shown = flag + name.replace("_", "-") if flag else name
            raise UserError(f"{owner}{': ' * bool(owner)}{shown} must be {bounds}, not {value}")


class Bounded:
    """Base of options whose bounds are checked whenever an instance is made.

    owner: the method or trainer that messages name first; '' if several share the options. `check_together` refuses
    values that are incompatible.
    """

    __slots__ = ()
    owner: ClassVar[str] = ""

    def __post_init__(self) -> None:
        kind = type(self)
        check_bounds(kind, {name: getattr(self, name) for name in bounds_of(kind)}, self.owner)
        self.check_together()

    def check_together(self) -> None:
        """Raise UserError for values that are within their bounds and incompatible."""


def option(default: Any, help: str, flag: str = "", cpu: Any = None) -> Any:
    """Return the field of an option with this help text.

    flag: its name on the command line, if not the field's. cpu: another default on a CPU, which `for_device` sets; the
    field is None before.
    """
    about = {"help": help} | ({"flag": flag} if flag else {}) | ({} if cpu is None else {"defaults": (default, cpu)})
    return field(default=default if cpu is None else None, metadata=about)


def for_device(options: Any, device: str) -> Any:
    """Return options with the defaults of a device class, a type of torch's devices, for those that are not given."""
    two = {f.name: f.metadata["defaults"] for f in dataclasses.fields(options) if "defaults" in f.metadata}
    given = option_values(options)
    return dataclasses.replace(options, **{n: of[device == "cpu"] for n, of in two.items() if given[n] is None})


@dataclasses.dataclass(frozen=True, slots=True)
class OptionInfo:
    """One option, as listed to the user."""

    name: str
    type: str
    default: str
    help: str


def describe_options(options: type[Any]) -> list[OptionInfo]:
    """Return the options of an `Options` dataclass, in order of definition; help is metadata={"help": ...}."""
    hints = get_type_hints(options, include_extras=True)
    return [
        OptionInfo(f.name, type_name(hints[f.name]), _default_text(f), str(f.metadata.get("help", "")))
        for f in dataclasses.fields(options)
        if f.init
    ]


def parse_options(options: type[Any], given: Mapping[str, str], owner: str) -> Any:
    """Return an instance of the dataclass `options` from text. Raise UserError, one line, that names `owner`."""
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
            wanted = type_name(hints[name]).replace("float", "a finite number")
            raise UserError(f"{owner}: option {name}={text!r} is not {wanted}") from None
    return make_options(options, values, owner)


def make_options(options: type[Any], values: Mapping[str, Any], owner: str) -> Any:
    """Return an instance of the dataclass `options`. Raise UserError, one line, for values that it cannot have.

    The line begins with the options' own owner, where they are `Bounded` and name one, else with `owner`.
    """
    own = options.owner if issubclass(options, Bounded) else ""
    check_bounds(options, values, own or owner)
    try:
        return options(**values)
    except (TypeError, ValueError) as error:  # __post_init__ checks, missing options
        raise UserError(f"{owner}: {error}") from error


def options_problem(options: Any) -> str:
    """Return why options of a plugin cannot be given as text; '' if they can."""
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
            if strange := [mark for mark in _metadata(extras[f.name]) if not isinstance(mark, Mark)]:
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
    """Return the value of every field of an Options instance, by name; {} for what is no dataclass."""
    if not dataclasses.is_dataclass(options):
        return {}
    return {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}


def options_text(options: Any) -> str:
    """Return every value of an Options instance as on the command line: 'k=4, prune=on'."""
    return ", ".join(f"{name}={value_text(value)}" for name, value in option_values(options).items())


def value_text(value: Any) -> str:
    """Return a value as text that `parse_options` reads back."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)


def type_name(kind: Any) -> str:
    """Return a type as text for users: 'int, 1 to 64', 'on|off', 'a|b', 'path or none'."""
    if get_origin(kind) is Annotated:
        bounds = Bounds.of(kind)
        return type_name(kind.__origin__) + (f", {bounds}" if bounds.limits else "")
    if kind is bool:
        return "on|off"
    if get_origin(kind) is Literal:
        return "|".join(str(choice) for choice in get_args(kind))
    if _is_union(kind):
        return " or ".join("none" if part is type(None) else type_name(part) for part in get_args(kind))
    if isinstance(kind, type) and issubclass(kind, Path):
        return "path"
    return "text" if kind is str else str(getattr(kind, "__name__", kind))


def _read(kind: Any, text: str) -> Any:
    """Return text as a value of type `kind`. Raise ValueError if it is none, and for a number that is not finite."""
    parts, word = get_args(kind) if _is_union(kind) else (kind,), text.lower()
    if type(None) in parts and word in _NONE:
        return None
    if bool in parts and word in _SWITCH:
        return _SWITCH[word]
    try:
        value = msgspec.convert(text, kind, strict=False, dec_hook=lambda path, given: expanded(given))
    except msgspec.ValidationError as error:
        raise ValueError(text) from error
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(text)
    return value


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType)


def _default_text(field: dataclasses.Field[Any]) -> str:
    if "defaults" in field.metadata:
        default, cpu = map(value_text, field.metadata["defaults"])
        return f"{default}; on a CPU {cpu}"
    if field.default is not dataclasses.MISSING:
        return value_text(field.default)
    if field.default_factory is not dataclasses.MISSING:
        return value_text(field.default_factory())
    return "required"


REFERENCE = "ar"  # the method every other one is compared with
METHOD_ALIASES = {  # other names of methods; results have the registered one
    "autoregressive": "ar",
    "vanilla": "ar",
    "speculative-streaming": "ss",
    "draft-model": "sd",
    "draft_model": "sd",
    "two-model": "sd",
    "prompt-lookup": "pld",
    "suffix-decoding": "suffix",
    "token-recycling": "recycling",
    "medusa-1": "medusa",
    "eagle-1": "eagle",
    "eagle-2": "eagle2",
    "eagle-3": "eagle3",
    "p-eagle": "peagle",
}
_SPEC = re.compile(r"^(?P<name>[A-Za-z0-9_.-]+)(?:\[(?P<options>[^\[\]]*)\])?$")


@dataclass(frozen=True, slots=True)
class MethodSpec:
    """A method with the options given for it: `ss`, `ss[k=1]`, `ss[k=1,prune=off]`. Values are still text.

    copy: 2 for a second copy of the reference, which is compared with itself: `ar#2`.
    """

    name: str
    options: dict[str, str] = field(default_factory=dict)
    copy: int = 1

    @property
    def label(self) -> str:
        """Return the name of this variant in every table: its name and the given options."""
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
        return cls(registered_name(match["name"]), options)


def registered_name(name: str) -> str:
    """Return the registered name of a method that is given by an alias; any other name as it is."""
    return METHOD_ALIASES.get(name, name)


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
