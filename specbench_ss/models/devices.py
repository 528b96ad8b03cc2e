"""The device and the dtype that a model is computed with, as `--device` and `--dtype` name them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbench_ss.errors import UserError, known_words
from specbench_ss.number_formats import DTYPES, HALF_WEIGHTS, arithmetic

if TYPE_CHECKING:
    import torch


def resolve_device(device: str) -> str:
    """Return the device's name; 'auto' is cuda where there is one, else cpu. Raises UserError for a missing device."""
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.partition(":")[0] not in ("cpu", "cuda"):
        raise UserError(f"unknown device {device!r}: give auto, cpu, cuda or cuda:N")
    if device.startswith("cpu:") and device != "cpu:0":  # torch takes it, and fails later
        raise UserError(f"device {device!r} is not available: there is one CPU device, cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device {device!r} is not available: {str(error).splitlines()[0]}") from None
    return device


def resolve_dtype(dtype: str, device: str) -> torch.dtype:
    """Return the torch dtype that a name computes in; 'auto' is float32 on a CPU and bfloat16 elsewhere.

    Raises UserError for an unknown name, and for one that is of CPUs alone on another device.
    """
    import torch

    if dtype not in DTYPES:
        raise UserError(f"unknown dtype {dtype!r}{known_words(dtype, DTYPES)}")
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    if dtype == HALF_WEIGHTS and torch.device(device).type != "cpu":
        raise UserError(f"--dtype {HALF_WEIGHTS} is for CPUs: on {device} use float16 or bfloat16")
    resolved: torch.dtype = getattr(torch, arithmetic(dtype))
    return resolved
