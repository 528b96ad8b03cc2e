"""Files that outlive a process killed at any byte: JSON lines that are only appended, JSON that is replaced whole."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from specbench_ss.errors import UserError, os_reason
from specbench_ss.files.records import encoded

T = TypeVar("T")
PIECE = 1 << 22  # bytes


def pieces(file: Path) -> Iterator[bytes]:
    """Yield the whole lines of a file, some megabytes at a time; nothing where it is missing.

    A half-written last line is left out. Raises UserError where the file cannot be read.
    """
    try:
        with open(file, "rb") as f:
            while whole := _whole(f.read(PIECE) + f.readline()):
                yield whole
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"cannot read {file}: {os_reason(error)}") from None


def _whole(piece: bytes) -> bytes:
    return piece[: piece.rfind(b"\n") + 1]


def lines(file: Path) -> Iterator[bytes]:
    """Yield the whole lines of a file, their ends included, as `pieces` reads it."""
    for piece in pieces(file):
        yield from (line + b"\n" for line in piece[:-1].split(b"\n"))


def record(file: Path, number: int, line: bytes, read: Callable[[bytes], T]) -> T:
    """Return what `read` makes of a line. Raises UserError with the number of a line for which it raises ValueError."""
    try:
        return read(line)
    except ValueError as e:
        raise UserError(f"{file} is damaged in line {number}: {e}") from e


def scan(file: Path, read: Callable[[bytes], T], keep: Callable[[T], bool] = lambda _: True) -> tuple[list[T], int]:
    """Return the whole records of a file of JSON lines, and the number of bytes that they take.

    Reading stops at a half-written last line, or at the first record for which `keep` is false.

    read: makes a record of a line (see `records.decoder`), and raises ValueError for a line that is not one. For such a
    line, UserError is raised with the line's number.
    """
    found: list[T] = []
    end = 0
    for number, line in enumerate(lines(file), start=1):
        made = record(file, number, line, read)
        if not keep(made):
            break
        found.append(made)
        end += len(line)
    return found, end


def cut(file: Path, read: Callable[[bytes], T], keep: Callable[[T], bool] = lambda _: True) -> list[T]:
    """Read the file as `scan` does, then cut it there: this removes what a killed process left half-written."""
    found, end = scan(file, read, keep)
    truncate(file, end)
    return found


def truncate(file: Path, size: int) -> None:
    """Cut a file to a number of bytes; nothing is done where it is missing or not longer."""
    if file.exists() and file.stat().st_size > size:
        with open(file, "r+b") as f:
            f.truncate(size)
            os.fsync(f.fileno())


def append(file: Any, records: Sequence[Mapping[str, Any]]) -> None:
    """Append lines to a file that was opened unbuffered, and flush them to the disk.

    Raises ValueError for a number that is not finite. Where writing fails, what is there of it is cut off again.
    """
    data = b"".join(map(encoded, records))
    before = os.fstat(file.fileno()).st_size
    try:
        while data:
            data = data[file.write(data) :]
        os.fsync(file.fileno())
    except OSError:
        with suppress(OSError):
            os.ftruncate(file.fileno(), before)
        raise


def write_json(file: Path, content: Any) -> None:
    """Write a JSON file so that a reader sees either the old content or the new, and nothing in between."""
    write_text(file, json.dumps(content, indent=1, allow_nan=False) + "\n")


def write_text(file: Path, text: str) -> None:
    """Write a text file as `write_json` does its own."""
    with replacing(file) as f:
        f.write(text.encode())


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Give a file to write into.

    It takes the place of `path` when the block ends, and is removed if the block fails. Raises UserError where `path`
    is a device, a pipe or a socket: that would be gone afterwards.
    """
    if any(kind(path) for kind in (Path.is_char_device, Path.is_block_device, Path.is_fifo, Path.is_socket)):
        raise UserError(f"{path} is a device, a pipe or a socket: results are written into ordinary files")
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
