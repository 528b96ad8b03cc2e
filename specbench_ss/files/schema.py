"""Whether JSON data has the form it should have: for files that somebody may have cut or changed. Knows no file.

A form is a type (`float` takes whole numbers too, and no NaN; `dict` any object), a tuple of alternatives (None among
them for null), a frozenset of texts, a list with the form of every entry, or a dict with the form of every key; a key
that ends in '?' may be missing.
"""

from __future__ import annotations

import dataclasses
import math
import types
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

NAMES: dict[Any, str] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    dict: "an object",
    None: "null",
}


def form_of(kind: Any) -> dict[str, Any]:
    """The form of a dataclass written as a JSON object, off its annotations; a field with a default may be missing."""
    return _form_of(kind)


@cache
def _form_of(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    missing = dataclasses.MISSING
    return {
        field.name + ("?" if (field.default, field.default_factory) != (missing, missing) else ""): _form(
            hints[field.name]
        )
        for field in dataclasses.fields(kind)
        if field.init
    }


def _form(hint: Any) -> Any:
    if hint is type(None):
        return None
    if dataclasses.is_dataclass(hint):
        return form_of(hint)
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return frozenset(parts)
    if origin in (Union, types.UnionType):
        return tuple(map(_form, parts))
    return [_form(parts[0])] if origin is list else hint


def misfit(data: Any, form: Any, at: str = "") -> str:
    """What is wrong with the data: 'it lacks model.name', 'methods[0].label is not a text'; '' for nothing."""
    if isinstance(form, dict):
        return _misfit_of_keys(data, form, at)
    if isinstance(form, list):
        if not isinstance(data, list):
            return f"{at or 'it'} is not a list"
        return next(filter(None, (misfit(entry, form[0], f"{at}[{i}]") for i, entry in enumerate(data))), "")
    if isinstance(form, tuple):
        found = [misfit(data, alternative, at) for alternative in form]
        return "" if "" in found else found[0]
    if isinstance(form, frozenset):
        known = isinstance(data, str) and data in form
        return "" if known else f"{at or 'it'} is none of {', '.join(sorted(form))}"
    return "" if _is(data, form) else f"{at or 'it'} is not {NAMES[form]}"


def _misfit_of_keys(data: Any, form: dict[str, Any], at: str) -> str:
    if not isinstance(data, dict):
        return f"{at or 'it'} is not {NAMES[dict]}"
    found = []
    for key, inner in form.items():
        name = key.removesuffix("?")
        place = f"{at}.{name}" if at else name
        if name in data:
            found.append(misfit(data[name], inner, place))
        elif name == key:
            found.append(f"it lacks {place}")
    return next(filter(None, found), "")


def _is(data: Any, kind: type | None) -> bool:
    if kind is None:
        return data is None
    if isinstance(data, bool):  # which Python takes for a whole number
        return kind is bool
    if kind is float:
        return isinstance(data, int) or (isinstance(data, float) and math.isfinite(data))
    return isinstance(data, kind)
