"""A GPU that the driver lists and torch does not see: what runs on the CPU then was perhaps not meant to."""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from functools import cache

import torch

HIDDEN = ("", "-1")  # values of CUDA_VISIBLE_DEVICES with which GPUs are hidden on purpose


@cache
def unseen_gpu() -> str:
    """Return one sentence where the driver lists a GPU and torch sees none; '' elsewhere. Asked once a process."""
    if torch.cuda.is_available() or os.environ.get("CUDA_VISIBLE_DEVICES") in HIDDEN:
        return ""
    listed = _listed()
    if listed is None:
        return ""
    name, driver = listed
    cuda = torch.version.cuda
    why = f"it is built for CUDA {cuda}, the driver is {driver}" if cuda else "it is built without CUDA"
    return f"the driver lists a GPU ({name}), and torch {torch.__version__} sees none ({why}): auto takes the CPU"


@cache
def warn_of_unseen_gpu() -> None:
    """Warn of such a GPU, once a process."""
    if told := unseen_gpu():
        warnings.warn(told, stacklevel=4)


def _listed() -> tuple[str, str] | None:
    """Return the name of the first GPU and the driver's version; None where there is no driver, or no GPU."""
    with suppress(Exception):  # no library, no right to ask it: nothing is known of a GPU
        import pynvml

        pynvml.nvmlInit()
        try:
            if pynvml.nvmlDeviceGetCount():
                first = pynvml.nvmlDeviceGetHandleByIndex(0)
                return _text(pynvml.nvmlDeviceGetName(first)), _text(pynvml.nvmlSystemGetDriverVersion())
        finally:
            pynvml.nvmlShutdown()
    return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
