"""Read JSON data back as the types that it was written from, from files that somebody may have cut or changed.

msgspec reads and checks; a problem is reported in plain English, with the name of the field. This module knows no file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
IN_WORDS = {
    "str": "a text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "object": "an object",
    "array": "a list",
    "null": "null",
}


def encoded(record: Mapping[str, Any]) -> bytes:
    """Return a record as a line of JSON. Raises ValueError for a number that is not finite, TypeError for no JSON."""
    return json.dumps(record, allow_nan=False).encode() + b"\n"


def decoder(kind: type[T]) -> Callable[[bytes], T]:
    """Return a function that reads a JSON document as an instance of a dataclass, a msgspec.Struct or another type.

    Fields that the type does not have are ignored, fields with a default may be missing, and a whole number is accepted
    for a float. For anything else the function raises ValueError: "it is not JSON", "it lacks model.name",
    "methods[0].label is not a text". NaN and the infinities are not JSON.
    """
    decode = msgspec.json.Decoder(kind).decode

    def read(document: bytes) -> T:
        try:
            return decode(document)
        except msgspec.ValidationError as error:
            raise ValueError(_in_words(error)) from None
        except (msgspec.DecodeError, ValueError, RecursionError):
            # half of a surrogate pair, as in the name of a file that is not UTF-8: Python writes it, msgspec reads none
            return convert(parse(document), kind)

    return read


def convert(data: Any, kind: type[T]) -> T:
    """Return data that was read from JSON or YAML as an instance of the type. Raises ValueError as a `decoder` does."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise ValueError(_in_words(error)) from None


def parse(document: bytes) -> Any:
    """Return a JSON document as dictionaries and lists. Raises ValueError for what is not JSON, NaN included."""
    try:
        return json.loads(document, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no number in JSON")
    return number


def _in_words(error: msgspec.ValidationError) -> str:
    """Say msgspec's message in plain words.

    'Expected `int | null`, got `str` - at `$.model.name`' becomes 'model.name is not a whole number'.
    """
    what, _, path = str(error).partition(" - at `$")
    place = path.removesuffix("`").removeprefix(".")
    quoted = what.split("`")[1] if "`" in what else ""
    if what.startswith("Object missing required field"):
        return f"it lacks {place}.{quoted}" if place else f"it lacks {quoted}"
    bound = what.rpartition("` ")[2] if "` " in what else ""
    if bound.startswith(">= "):
        return f"{place or 'it'} is less than {bound[3:]}"
    if bound.startswith("<= "):
        return f"{place or 'it'} is more than {bound[3:]}"
    if what.startswith("Expected"):
        kinds = [IN_WORDS.get(kind, kind) for kind in quoted.split(" | ")]
        return f"{place or 'it'} is not {' or '.join(kinds)}"
    if what.startswith("Invalid enum value"):
        return f"{place or 'it'} cannot be {what.removeprefix('Invalid enum value ')}"
    return f"{place or 'it'}: {what}"
