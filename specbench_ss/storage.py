"""Crash-safe files: atomic JSON, append-only JSON lines, folder locks, digests and the cache folder.

torch's archive writer raises RuntimeError in place of the OSError that it met, safetensors names the system's error
in its text, and numpy counts what was written.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import platformdirs

from specbench_ss.errors import UserError, os_reason
from specbench_ss.user_files import encoded

OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
IN_TEXT = re.compile(r"\(os error (\d+)\)")  # as Rust writes it
CUT_SHORT = re.compile(r"\d+ requested and \d+ written")  # as numpy writes it


@contextmanager
def writing(path: Path, then: str) -> Iterator[None]:
    """Within: an error of a full or failing disk becomes a UserError of one line. then: what to do about it."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = disk_error(error)
        if not reason:
            raise
        raise UserError(f"cannot write to {path}: {reason}; {then}") from error


def disk_error(error: BaseException | None) -> str:
    """Return why the disk took no more, where that is behind an exception; '' where it is not."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if reason := _reason(error):
            return reason
        error = error.__cause__ or error.__context__
    return ""


def _reason(error: BaseException) -> str:
    number = getattr(error, "errno", None) if isinstance(error, OSError) else None
    if found := IN_TEXT.search(str(error)):
        number = int(found[1])
    if number in OF_DISKS:
        return os.strerror(int(number)).lower()
    return "the disk took only a part of a file" if CUT_SHORT.search(str(error)) else ""


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

    read: makes a record of a line (see `user_files.decoder`), and raises ValueError for a line that is not one. For
    such a line, UserError is raised with the line's number.
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


def lock(path: Path) -> int:
    """Lock the folder for one writer, until the returned descriptor is closed or the process ends.

    Raises UserError where another process has it locked. A file system without locks lets everybody in.
    """
    folder = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        os.close(folder)
        raise UserError(f"{path} is in use by another process") from e
    except OSError:  # no locks: go without
        pass
    return folder


def in_use(path: Path) -> bool:
    """Say whether a process has the folder locked; True where the file system cannot tell."""
    with contextlib.ExitStack() as stack:
        try:
            folder = os.open(path, os.O_RDONLY)
            stack.callback(os.close, folder)
            fcntl.flock(folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:  # locked, or no locks
            return True
    return False


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Make the folder where it is not there, and lock it while the block runs. Raises UserError as `lock` does."""
    path.mkdir(parents=True, exist_ok=True)
    folder = lock(path)
    try:
        yield
    finally:
        os.close(folder)


PRIVATE = 0o600


def ordinary_mode(folder: Path) -> None:
    """Give the weight files of a folder the mode that files written by `open` have here.

    safetensors writes to a private file first and renames it, so that nobody but its owner can read what is left.
    """
    files = list(folder.glob("*.safetensors"))
    if files:
        mode = _mode_here(folder)
        for file in files:
            if stat.S_IMODE(file.stat().st_mode) == PRIVATE:
                file.chmod(mode)


def _mode_here(folder: Path) -> int:
    """Return the mode of a new file, by making one: the umask cannot be asked for without being changed."""
    probe = folder / f".mode-{os.getpid()}.tmp"
    try:
        probe.touch()
        return stat.S_IMODE(probe.stat().st_mode)
    finally:
        probe.unlink(missing_ok=True)


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file's bytes as hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cache_folder() -> Path:
    """Return the folder for fetched files: SSBENCH_CACHE, else the user's cache folder (XDG_CACHE_HOME on Linux)."""
    given = os.environ.get("SSBENCH_CACHE")
    return Path(given).expanduser() if given else platformdirs.user_cache_path("ssbench")
