"""The folder that fetched files are kept in."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def cache_folder() -> Path:
    """Return the folder for fetched files: SSBENCH_CACHE, else the user's cache folder (XDG_CACHE_HOME on Linux)."""
    given = os.environ.get("SSBENCH_CACHE")
    return Path(given).expanduser() if given else platformdirs.user_cache_path("ssbench")
