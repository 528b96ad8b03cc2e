"""Files that a user gives: text, JSON lines, JSON and YAML. Whatever is wrong with one becomes a one-line UserError."""

from __future__ import annotations

import gzip
import json
import stat
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from specbench_ss.errors import UserError, first_line, os_reason
from specbench_ss.options import encodable

Row = dict[str, Any]


def read_text(path: Path) -> str:
    """Return the file as text. Raises UserError where it is missing or not UTF-8."""
    return "".join(_lines(path))


def read_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield every JSON object of a JSONL file with its place, `FILE:LINE`.

    Only one line is held in memory at a time.
    """
    for number, line in enumerate(_lines(path), start=1):
        if line.strip():
            place = f"{path}:{number}"
            yield place, _row(place, line)


def check_ends(path: Path) -> None:
    """Raise UserError for a device, which may have no end, or a socket. A pipe may be read, as of `<(command)`."""
    try:
        mode = path.stat().st_mode
    except OSError:  # reading it says why
        return
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) or stat.S_ISSOCK(mode):
        kind = "socket" if stat.S_ISSOCK(mode) else "device"
        raise UserError(f"cannot read {path}: it is a {kind}, not a file")


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text file, which may be compressed: NAME.gz."""
    check_ends(path)
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8-sig") as file:
            yield from file  # unlike str.splitlines, not cut at U+2028, which JSON text may hold
    except OSError as error:
        raise UserError(f"cannot read {path}: {os_reason(error)}") from None
    except (EOFError, zlib.error):
        raise UserError(f"cannot read {path}: the compressed file is damaged") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not a UTF-8 text file") from None


def _row(place: str, line: str) -> Row:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError):
        raise UserError(f"{place}: not valid JSON") from None
    if not isinstance(row, dict):
        raise UserError(f"{place}: expected a JSON object")
    if "\\ud" in line.lower() and not encodable(json.dumps(row, ensure_ascii=False)):
        raise UserError(f"{place}: it holds half of a surrogate pair, which is no character")
    return row


def read_bytes(path: Path) -> bytes:
    """Return the file's content. Raises UserError where it cannot be read."""
    check_ends(path)
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {os_reason(error)}") from error


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises UserError where there is none."""
    try:
        content = json.loads(read_bytes(file))
    except (ValueError, RecursionError) as error:
        raise UserError(f"cannot read {file}: {first_line(error)}") from None
    if not isinstance(content, dict):
        raise UserError(f"{file} is not a JSON object")
    return content


def mapping(content: bytes, path: Path) -> Mapping[Any, Any]:
    """Return the content of `path`, read as YAML; an empty file gives an empty mapping.

    Raises UserError for anything that is not a mapping.
    """
    try:
        parsed = yaml.safe_load(content)
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:  # ValueError: a date that is none
        raise UserError(f"{path} is not YAML: {error}") from error
    except RecursionError:
        raise UserError(f"{path} is nested too deeply") from None
    if not isinstance(parsed or {}, dict):
        raise UserError(f"{path}: expected 'option: value' lines")
    return parsed or {}
