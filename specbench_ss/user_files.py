"""Files that a user provides: text, JSON and YAML, read into typed records.

msgspec reads and checks; errors are reported in plain English with the name of the field.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import math
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TextIO, TypeVar

import msgspec
import yaml

from specbench_ss.errors import UserError, first_line, os_errors, os_reason

T = TypeVar("T")
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
KIND_NAMES = {
    "str": "a text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "object": "an object",
    "array": "a list",
    "null": "null",
}


def encoded(record: Any) -> bytes:
    """Return a dictionary or a dataclass as a line of JSON.

    Raises ValueError for NaN or infinity, TypeError for anything but JSON.
    """
    content = asdict(record) if is_dataclass(record) and not isinstance(record, type) else record
    return json.dumps(content, allow_nan=False).encode() + b"\n"


def decoder(kind: type[T]) -> Callable[[bytes], T]:
    """Return a function that reads a JSON document as a dataclass, a msgspec.Struct or another type.

    Unknown fields are ignored, fields with a default may be missing, and an integer is accepted for a float. For
    anything else the function raises ValueError: "it is not JSON", "it lacks model.name", "methods[0].label is not a
    text". NaN and infinity are not JSON.
    """
    decode = msgspec.json.Decoder(kind).decode

    def read(document: bytes) -> T:
        try:
            return decode(document)
        except msgspec.ValidationError as error:
            raise ValueError(_plain_message(error)) from None
        except (msgspec.DecodeError, ValueError, RecursionError):
            # half of a surrogate pair (a file name that is not UTF-8): Python writes it, msgspec rejects it
            return convert(parse(document), kind)

    return read


def convert(data: Any, kind: type[T]) -> T:
    """Return JSON or YAML data as an instance of the type. Raises ValueError as a `decoder` does."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise ValueError(_plain_message(error)) from None


def parse(document: bytes) -> Any:
    """Return a JSON document as dictionaries and lists. Raises ValueError for invalid JSON, NaN included."""
    try:
        return json.loads(document, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a JSON number")
    return number


def _plain_message(error: msgspec.ValidationError) -> str:
    """Return msgspec's message in plain English.

    'Expected `int | null`, got `str` - at `$.model.name`' becomes 'model.name is not a whole number'.
    """
    message, _, path = str(error).partition(" - at `$")
    place = path.removesuffix("`").removeprefix(".")
    quoted = message.split("`")[1] if "`" in message else ""
    if message.startswith("Object missing required field"):
        return f"it lacks {place}.{quoted}" if place else f"it lacks {quoted}"
    bound = message.rpartition("` ")[2] if "` " in message else ""
    if bound.startswith(">= "):
        return f"{place or 'it'} is less than {bound[3:]}"
    if bound.startswith("<= "):
        return f"{place or 'it'} is more than {bound[3:]}"
    if message.startswith("Expected"):
        kinds = [KIND_NAMES.get(kind, kind) for kind in quoted.split(" | ")]
        return f"{place or 'it'} is not {' or '.join(kinds)}"
    if message.startswith("Invalid enum value"):
        return f"{place or 'it'} cannot be {message.removeprefix('Invalid enum value ')}"
    return f"{place or 'it'}: {message}"


def read_text(path: Path) -> str:
    """Return the file as text. Raises UserError if it is missing or not UTF-8."""
    with open_text(path) as file:
        return file.read()


def check_ends(path: Path) -> None:
    """Raise UserError for a device, which may be endless, or a socket. Pipes are allowed, as of `<(command)`."""
    try:
        mode = path.stat().st_mode
    except OSError:  # reading it reports the reason
        return
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) or stat.S_ISSOCK(mode):
        kind = "socket" if stat.S_ISSOCK(mode) else "device"
        raise UserError(f"cannot read {path}: it is a {kind}, not a file")


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """Open a UTF-8 text file, also one compressed by gzip or xz. Raises UserError in the block if it cannot be read."""
    check_ends(path)
    try:
        with path.open("rb") as file:
            start = file.peek(6)
            content: Any = file
            if path.suffix == ".gz" or start[:2] == b"\x1f\x8b":
                content = gzip.GzipFile(fileobj=file)
            elif start[:6] == b"\xfd7zXZ\0":
                content = lzma.LZMAFile(file)  # noqa: SIM115 - closed with the file
            yield io.TextIOWrapper(content, encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot read {path}: {os_reason(error)}") from None
    except (EOFError, zlib.error, lzma.LZMAError):
        raise UserError(f"cannot read {path}: the compressed file is damaged") from None
    except UnicodeDecodeError:
        raise UserError(
            f"{path} is not a UTF-8 text file, nor one compressed by gzip or xz; convert it to UTF-8"
        ) from None


def read_bytes(path: Path) -> bytes:
    """Return the file's content. Raises UserError if it cannot be read."""
    check_ends(path)
    with os_errors(f"cannot read {path}"):
        return path.read_bytes()


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises UserError if there is none."""
    try:
        content = json.loads(read_bytes(file))
    except (ValueError, RecursionError) as error:
        raise UserError(f"cannot read {file}: {first_line(error)}") from None
    if not isinstance(content, dict):
        raise UserError(f"{file} is not a JSON object")
    return content


def mapping(content: bytes, path: Path) -> Mapping[Any, Any]:
    """Return the content of `path` as YAML; an empty file is an empty mapping.

    Raises UserError for anything that is not a mapping.
    """
    try:
        parsed = yaml.safe_load(content)
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:  # ValueError: an invalid date
        raise UserError(f"{path} is not YAML: {error}") from error
    except RecursionError:
        raise UserError(f"{path} is nested too deeply") from None
    if not isinstance(parsed or {}, dict):
        raise UserError(f"{path}: expected 'option: value' lines")
    return parsed or {}
