"""Freed memory stays with a process that trains on a CPU.

Every step of a training makes and frees tensors of some hundred megabytes, rows of logits above all. The GNU C library
gives such memory back to the system at once and asks for it anew, and the system fills every page of it with zeros: two
trainings on two cores spent half of their time so (docs/log.md). It cannot be undone, so it is not for a process that
measures.
"""

from __future__ import annotations

import ctypes
import sys

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # parameters of mallopt(3)


def keep_freed_memory() -> None:
    """Have the C library keep what is freed, from now on. Only the GNU one is known; with others nothing happens."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if library is not None and hasattr(library, "gnu_get_libc_version"):
        library.mallopt(MMAP_MAX, 0)
        library.mallopt(TRIM_THRESHOLD, -1)
