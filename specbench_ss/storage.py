"""Crash-safe files: atomic JSON, append-only JSON lines, folder locks, digests and the cache folder.

Disk errors are recognised in other libraries' exceptions too: torch's archive writer raises RuntimeError, safetensors
puts the system's error into its text, and numpy reports the number of bytes written.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import platformdirs

from specbench_ss.errors import UserError, os_reason
from specbench_ss.user_files import encoded

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
RUST_ERROR = re.compile(r"\(os error (\d+)\)")
NUMPY_ERROR = re.compile(r"\d+ requested and \d+ written")


@contextmanager
def writing(path: Path, hint: str) -> Iterator[None]:
    """Convert errors of a full or failing disk within the block into a one-line UserError. hint: what to do."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = disk_error(error)
        if not reason:
            raise
        raise UserError(f"cannot write to {path}: {reason}; {hint}") from error


def disk_error(error: BaseException | None) -> str:
    """Return the disk error behind an exception, or ''."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if reason := _reason(error):
            return reason
        error = error.__cause__ or error.__context__
    return ""


def _reason(error: BaseException) -> str:
    number = getattr(error, "errno", None) if isinstance(error, OSError) else None
    if found := RUST_ERROR.search(str(error)):
        number = int(found[1])
    if number in DISK_ERRORS:
        return os.strerror(int(number)).lower()
    return "the disk wrote only a part of a file" if NUMPY_ERROR.search(str(error)) else ""


T = TypeVar("T")
CHUNK_BYTES = 1 << 22  # bytes


def ordinary(path: str, flags: int) -> int:
    """Open a file, as `open` expects of its opener. Raises OSError for a pipe or a device, which may have no end."""
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):  # `open` refuses folders
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", path)


def read_bytes(file: Path) -> bytes:
    """Return the content of a file, as `ordinary` opens it. Raises OSError."""
    with open(file, "rb", opener=ordinary) as f:
        return f.read()


def pieces(file: Path) -> Iterator[bytes]:
    """Yield the complete lines of a file, some megabytes at a time; nothing if it is missing.

    An incomplete last line is dropped. Raises UserError if the file cannot be read.
    """
    try:
        with open(file, "rb", opener=ordinary) as f:
            while chunk := _whole_lines(f.read(CHUNK_BYTES) + f.readline()):
                yield chunk
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"cannot read {file}: {os_reason(error)}") from None


def _whole_lines(piece: bytes) -> bytes:
    return piece[: piece.rfind(b"\n") + 1]


def lines(file: Path) -> Iterator[bytes]:
    """Yield the complete lines of a file with their ends, as `pieces` reads it."""
    for piece in pieces(file):
        yield from (line + b"\n" for line in piece[:-1].split(b"\n"))


def record(file: Path, number: int, line: bytes, read: Callable[[bytes], T]) -> T:
    """Return `read(line)`. Raises UserError with the line number if it raises ValueError."""
    try:
        return read(line)
    except ValueError as e:
        raise UserError(f"{file} is damaged in line {number}: {e}") from e


def scan(file: Path, read: Callable[[bytes], T], keep: Callable[[T], bool] = lambda _: True) -> tuple[list[T], int]:
    """Return the records of a file of JSON lines, and their size in bytes.

    Stops at an incomplete last line or at the first record for which `keep` is false. read: parses a line (see
    `user_files.decoder`); its ValueError becomes a UserError with the line number.
    """
    records: list[T] = []
    end = 0
    for number, line in enumerate(lines(file), start=1):
        parsed = record(file, number, line, read)
        if not keep(parsed):
            break
        records.append(parsed)
        end += len(line)
    return records, end


def cut(file: Path, read: Callable[[bytes], T], keep: Callable[[T], bool] = lambda _: True) -> list[T]:
    """Read the file as `scan` does, then truncate it there, which removes a killed process's incomplete line."""
    records, end = scan(file, read, keep)
    truncate(file, end)
    return records


def truncate(file: Path, size: int) -> None:
    """Truncate a file to a number of bytes; no effect if it is missing or not longer."""
    if file.exists() and file.stat().st_size > size:
        with open(file, "r+b") as f:
            f.truncate(size)
            os.fsync(f.fileno())


def append(file: Any, records: Sequence[Any]) -> None:
    """Append records (see `encoded`) to a file opened unbuffered, and flush them to the disk.

    Raises ValueError for NaN or infinity. If writing fails, the written part is removed.
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
    """Write a JSON file atomically: a reader sees either the old content or the new."""
    write_text(file, json.dumps(content, indent=1, allow_nan=False) + "\n")


def write_text(file: Path, text: str) -> None:
    """Write a text file atomically; half of a surrogate pair, which is not a character, becomes `?`."""
    with replacing(file) as f:
        f.write(text.encode("utf-8", "replace"))


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file that replaces `path` when the block ends, or is removed if it fails.

    Raises UserError if `path` is a folder, or a device, a pipe or a socket, which would be replaced.
    """
    if path.is_dir():
        raise UserError(f"cannot write {path}: it is a folder")
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is a device, a pipe or a socket; use an ordinary file")
    with temporary(path) as (new, descriptor):
        with open(descriptor, "w+b", closefd=False) as file:
            yield file
            file.flush()
            os.fsync(descriptor)
        os.replace(new, path)
    sync_folder(path.parent)


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder that becomes `path`, which must not exist, when the block ends; it is removed if it fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary(path, new_folder) as (new, _):
        yield new
        new.rename(path)
    sync_folder(path.parent)


def _new_file(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)


def new_folder(path: Path) -> int:
    """Create a folder and return its descriptor."""
    path.mkdir()
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)


MOST_LETTERS = 50  # of a name in that of its temporary file: names have a limit


@contextmanager
def temporary(path: Path, create: Callable[[Path], int] = _new_file) -> Iterator[tuple[Path, int]]:
    """Yield a new file or folder with a random name in the folder of `path`, and its descriptor; remove it at the end.

    It is locked. Those that killed processes left are not, and are removed first.
    """
    stem = f".{path.name[:MOST_LETTERS]}."
    with suppress(OSError):
        for left in path.parent.iterdir():
            if re.fullmatch(re.escape(stem) + "[0-9a-f]{16}[.]tmp", left.name):
                _remove_unused(left)
    while True:
        new = path.with_name(f"{stem}{secrets.token_hex(8)}.tmp")
        descriptor = create(new)
        with suppress(OSError):  # no locks: go without
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if new.exists():
            break
        os.close(descriptor)  # another process removed it before it was locked
    try:
        yield new, descriptor
    finally:
        _remove(new)
        os.close(descriptor)


def _remove_unused(path: Path) -> None:
    """Remove a temporary file or folder that no process has locked."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(path)
    os.close(descriptor)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Flush the folder to the disk, so that files created or renamed in it survive a crash."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def lock(path: Path) -> int:
    """Lock the folder for one writer, until the returned descriptor is closed or the process ends.

    Raises UserError if another process has the lock. Without locks in the file system there is no protection.
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
    """Return True if a process has locked the folder, or if the file system has no locks."""
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
    """Create the folder if necessary, and lock it within the block. A created one that is still empty is removed.

    Raises UserError as `lock` does.
    """
    created = not path.exists()
    path.mkdir(parents=True, exist_ok=True)
    folder = lock(path)
    try:
        yield
    finally:
        if created:
            with suppress(OSError):
                path.rmdir()
        os.close(folder)


PRIVATE = 0o600


def ordinary_mode(folder: Path) -> None:
    """Give the weight files of a folder the default mode of new files.

    safetensors writes a private file and renames it, so that only its owner can read it.
    """
    files = list(folder.glob("*.safetensors"))
    if files:
        mode = _mode_here(folder)
        for file in files:
            if stat.S_IMODE(file.stat().st_mode) == PRIVATE:
                file.chmod(mode)


def _mode_here(folder: Path) -> int:
    """Return the mode of a new file by creating one: the umask cannot be read without being changed."""
    with temporary(folder / "mode") as (_, descriptor):
        return stat.S_IMODE(os.fstat(descriptor).st_mode)


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file's bytes as hex digits."""
    with open(path, "rb", opener=ordinary) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cache_folder() -> Path:
    """Return the folder for fetched files: SSBENCH_CACHE, else the user's cache folder (XDG_CACHE_HOME on Linux)."""
    given = os.environ.get("SSBENCH_CACHE")
    return Path(given).expanduser() if given else platformdirs.user_cache_path("ssbench")
