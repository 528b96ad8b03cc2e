"""Errors of a full or failing disk as libraries raise them, in one line.

torch's archive writer raises RuntimeError in place of the OSError that it met, safetensors names the system's error in
its text, and numpy counts what was written.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specbench_ss.errors import UserError

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
