"""Files that outlive a process killed at any byte: JSON lines that are only appended, JSON that is replaced whole."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from specbench_ss.errors import UserError

T = TypeVar("T")


def scan(file: Path, read: Callable[[bytes], T], keep: Callable[[T], bool] = lambda _: True) -> tuple[list[T], int]:
    """Return the whole records of a file of JSON lines, and the number of bytes that they take.

    Reading stops at a half-written last line, or at the first record for which `keep` is false.

    read: makes a record of a line (see `records.decoder`), and raises ValueError for a line that is not one. For such a
    line, UserError is raised with the line's number.
    """
    records: list[T] = []
    end = 0
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            break
        try:
            record = read(line)
        except ValueError as e:
            raise UserError(f"{file} is damaged in line {number}: {e}") from e
        if not keep(record):
            break
        records.append(record)
        end += len(line)
    return records, end


def cut(file: Path, read: Callable[[bytes], T], keep: Callable[[T], bool] = lambda _: True) -> list[T]:
    """Read the file as `scan` does, then cut it there: this removes what a killed process left half-written."""
    records, end = scan(file, read, keep)
    if file.exists() and file.stat().st_size > end:
        with open(file, "r+b") as f:
            f.truncate(end)
            os.fsync(f.fileno())
    return records


def append(file: Any, records: Sequence[Mapping[str, Any]]) -> None:
    """Append lines to a file that was opened unbuffered, and flush them to the disk.

    Raises ValueError for a number that is not finite.
    """
    data = "".join(json.dumps(r, allow_nan=False) + "\n" for r in records).encode()
    while data:
        data = data[file.write(data) :]
    os.fsync(file.fileno())


def write_json(file: Path, content: Any) -> None:
    """Write a JSON file so that a reader sees either the old content or the new, and nothing in between."""
    with replacing(file) as f:
        f.write(json.dumps(content, indent=1, allow_nan=False).encode() + b"\n")


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Give a file to write into.

    It takes the place of `path` when the block ends, and is removed if the block fails.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Flush the folder to the disk, so that files which were created or renamed in it are found there after a crash."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
