"""A lock on a folder, so that one process writes to it at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from specbench_ss.errors import UserError


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
