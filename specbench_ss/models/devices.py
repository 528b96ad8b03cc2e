"""The device and the dtype that a model is computed with, as `--device` and `--dtype` name them."""

from __future__ import annotations

import re

import torch

from specbench_ss.errors import UserError, known_words
from specbench_ss.models.unseen_gpu import warn_of_unseen_gpu
from specbench_ss.number_formats import DTYPES, HALF_WEIGHTS, arithmetic

ALL = "cuda:all"
KNOWN = "give auto, cpu, cuda or cuda:N, or several GPUs: cuda:0,cuda:1 or cuda:all"


def device_names(device: object) -> list[str]:
    """Return the names that `--device` has: one, or those of several GPUs. Nothing is asked of this machine.

    Raises UserError for what names no device of any machine.
    """
    if isinstance(device, (list, tuple)):
        raise UserError(f"a device is one text, not the list {device!r}: {KNOWN}")
    names = [name.strip() for name in str(device).split(",")]
    if len(names) == 1:
        if not re.fullmatch(r"auto|(cpu|cuda|mps|xpu)(:[0-9]+)?|cuda:all", names[0]):
            raise UserError(f"unknown device {device!r}: {KNOWN}")
        return names
    for name in names:
        if not re.fullmatch(r"cuda:[0-9]+", name):
            raise UserError(f"--device {device}: each of several GPUs has a number, and {name!r} names none: {KNOWN}")
        if names.count(name) > 1:
            raise UserError(f"--device {device}: {name} stands there twice, and each GPU is named once: {KNOWN}")
    return names


def several(device: object) -> bool:
    """Whether these are several devices. Raises UserError as `device_names` does."""
    names = device_names(device)
    return len(names) > 1 or names == [ALL]


def resolve_device(device: str) -> str:
    """Return the device's name; 'auto' is cuda where there is one, else cpu.

    A GPU that the driver lists and torch does not see is warned of, once.

    Of several GPUs, a list such as cuda:0,cuda:1 or cuda:all, the names with commas between them. Raises UserError for
    a missing device.
    """
    return ",".join(_here(name) for name in device_names(device))


def device_class(names: str) -> str:
    """Return the type of the first of resolved devices: 'cuda' of 'cuda:0,cuda:1'."""
    return names.partition(",")[0].partition(":")[0]


def _here(device: str) -> str:
    if device == "auto":
        warn_of_unseen_gpu()
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == ALL:
        if not torch.cuda.is_available():
            raise UserError(f"device {ALL!r} is not available: torch sees no GPU here")
        return ",".join(f"cuda:{i}" for i in range(torch.cuda.device_count()))
    if device.startswith("cpu:") and device != "cpu:0":  # torch takes it, and fails later
        raise UserError(f"device {device!r} is not available: there is one CPU device, cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device {device!r} is not available: {str(error).splitlines()[0]}") from None
    return device


def check_one_device(device: str, what: str) -> None:
    """Raise UserError, for what cannot be done with a model that is divided over several devices."""
    if several(device):
        raise UserError(
            f"{what} takes one device, not {device}: over several devices a model is divided only to decode it, "
            "unquantised, by engine eager"
        )


def resolve_dtype(dtype: str, device: str) -> torch.dtype:
    """Return the torch dtype that a name computes in; 'auto' is float32 on a CPU and bfloat16 elsewhere.

    Raises UserError for an unknown name, and for one that is of CPUs alone on another device.
    """
    if dtype not in DTYPES:
        raise UserError(f"unknown dtype {dtype!r}{known_words(dtype, DTYPES)}")
    device = device.partition(",")[0]  # of several, which are alike in this
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    if dtype == HALF_WEIGHTS and torch.device(device).type != "cpu":
        raise UserError(f"--dtype {HALF_WEIGHTS} is for CPUs: on {device} use float16 or bfloat16")
    resolved: torch.dtype = getattr(torch, arithmetic(dtype))
    return resolved
