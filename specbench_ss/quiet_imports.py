"""Keeps to itself what torchao logs while it is imported because of us, by transformers or peft: none can mend it.

"Failed to load .../_C_mxfp8..." for kernels of other devices, and torch's remark on enumerations that it registers.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import FrameType

NOISY = ("torchao", "torch.utils._pytree")
OURS, THEIRS = __name__.partition(".")[0], "torchao"


def quiet_imports() -> None:
    """From now on. What a user imports without us is logged as ever, and so is what torchao says later."""
    for name in NOISY:
        logging.getLogger(name).addFilter(_worth_saying)


def _worth_saying(record: logging.LogRecord) -> bool:
    """Whether this is not said in the course of an import of torchao that began with us."""
    calls = list(_calls())
    return (THEIRS, "<module>") not in calls or OURS not in {package for package, _ in calls}


def _calls() -> Iterator[tuple[str, str]]:
    """Yield the package and the function of every call that is under way but this file's, of an import `<module>`."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module != __name__:
            yield module.partition(".")[0], frame.f_code.co_name
        frame = frame.f_back
