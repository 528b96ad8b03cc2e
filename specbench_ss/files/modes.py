"""Access rights of files that a library writes for us."""

from __future__ import annotations

import os
import stat
from pathlib import Path

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
