"""The line of a plugin's code at which an error came up, for messages."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

from specbench_ss.errors import UserError, error_text

CORE, METHODS = Path(__file__).parent, Path(__file__).parent / "methods"
STANDARD = Path(sysconfig.get_path("stdlib"))


def place_of(error: BaseException, of_any: bool = False) -> str:
    """Return ' (ways.py, line 12, in propose)', the innermost line outside the core and libraries; '' without one.

    of_any: then the innermost of all.
    """
    frames = list(traceback.extract_tb(error.__traceback__))
    own = [frame for frame in frames if _own(frame.filename)] or (frames if of_any else [])
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno}, in {own[-1].name})" if own else ""


def _own(filename: str) -> bool:
    folders = Path(filename).parents
    if filename.startswith("<frozen"):
        return False
    if CORE in folders:
        return METHODS in folders
    installed = "site-packages" in filename
    return "ssbench" in filename if installed else STANDARD not in folders


def failure_text(error: BaseException) -> str:
    """Return what an exception says and, where it is no UserError, the line of the plugin's code."""
    return error_text(error) if isinstance(error, UserError) else f"{error_text(error)}{place_of(error)}"
