"""Where fetched files are kept."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


def cache_folder() -> Path:
    """Where fetched files are kept: SSBENCH_CACHE, else the user's cache folder (XDG_CACHE_HOME on Linux)."""
    import platformdirs

    given = os.environ.get("SSBENCH_CACHE")
    return Path(given).expanduser() if given else platformdirs.user_cache_path("ssbench")
