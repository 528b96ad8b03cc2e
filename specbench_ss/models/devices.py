"""Device and dtype of a model: `--device`, `--dtype`, layers over several GPUs.

Embedding, final norm and LM head go to the first one, beside what drafts and chooses tokens. transformers and
accelerate read the weights straight to where they belong; accelerate's hooks, which would move rows at every module,
go again, since `engine/device_map.py` does that.
"""

from __future__ import annotations

import os
import platform
import re
import warnings
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from accelerate.hooks import remove_hook_from_module
from accelerate.utils import compute_module_sizes
from torch import nn
from transformers import AutoModelForCausalLM

from specbench_ss.engine.generic_model import HfDecoder
from specbench_ss.engine.numerics import DTYPES, HALF_WEIGHTS, arithmetic
from specbench_ss.errors import UserError, known_words
from specbench_ss.models.gguf import gguf_file


def processor_name() -> str:
    """Return the processor's name as the system tells it, or that of its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


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


GIB = 2**30


def check_divided(model: str, device: str, engine: str = "eager", quantize: str = "none") -> None:
    """Raise UserError for what is not divided over several devices. Nothing is asked of this machine's GPUs."""
    if not several(device):
        return
    if engine == "graph":
        check_one_device(device, "--engine graph")
    if quantize != "none":
        check_one_device(device, f"--quantize {quantize}")
    if gguf_file(model) is not None:
        raise UserError(f"{model!r} is not divided over {device}: save its model as a folder first (docs/models.md)")


def device_map(config: Any, devices: Sequence[str], dtype: torch.dtype, trust_remote_code: bool = False) -> Any:
    """Return the argument `device_map` of `from_pretrained`: the device of each module, by its name.

    Raises UserError where the model has too few layers, or is larger than the memory that is free.
    """
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    model.tie_weights()
    return divided(model, devices, [torch.cuda.mem_get_info(device)[0] for device in devices], dtype)


def divided(model: Any, devices: Sequence[str], free: Sequence[int], dtype: torch.dtype) -> dict[str, str]:
    """Return the device of each module of a model, which may be without weights. free: bytes on each device.

    Raises UserError as `device_map` does.
    """
    sizes, layers = compute_module_sizes(model, dtype=dtype), {id(layer) for layer in HfDecoder(model).layers}
    names = [name for name, module in model.named_modules() if id(module) in layers]
    if len(names) < len(devices):
        raise UserError(f"the model has {len(names)} layers, which cannot be divided over {len(devices)} devices")
    taken = [int(sizes[name]) for name in names]
    outside = int(sizes[""]) - sum(taken)
    room = [max(0, free[0] - outside), *free[1:]]
    at = in_order(taken, room) if sum(room) else []
    held = [sum(size for size, place in zip(taken, at, strict=False) if place == i) for i in range(len(room))]
    if free[0] < outside or not at or any(own > most for own, most in zip(held, room, strict=True)):
        there = ", ".join(f"{size / GIB:.1f} GiB on {device}" for size, device in zip(free, devices, strict=True))
        raise UserError(
            f"the model does not fit: its weights take {sizes[''] / GIB:.1f} GiB, {outside / GIB:.1f} of them on "
            f"{devices[0]} in any case; free are {there}"
        )
    if 0 in held[1:]:
        idle = devices[1 + held[1:].index(0)]
        raise UserError(f"{idle} has too little free memory for a layer beside the others: leave it out of --device")
    where = dict.fromkeys(_beside(model, names), devices[0])
    return where | dict(zip(names, (devices[i] for i in at), strict=True))


def in_order(sizes: Sequence[int], room: Sequence[int]) -> list[int]:
    """Return which room each of these goes to: one room after the other, each in proportion to its size."""
    ends = [end / sum(room) for end in accumulate(room)]
    middles = [(end - size / 2) / sum(sizes) for end, size in zip(accumulate(sizes), sizes, strict=True)]
    return [min(bisect_right(ends, middle), len(room) - 1) for middle in middles]


def _beside(model: nn.Module, layers: Sequence[str]) -> Iterator[str]:
    """Yield the modules and tensors that lie beside the layers, or beside what holds the layers."""
    path = layers[0].split(".")[:-1]
    around = [".".join(path[:n]) for n in range(len(path) + 1)]
    for owner in around:
        held = model.get_submodule(owner)
        tensors = [*held.named_parameters(recurse=False), *held.named_buffers(recurse=False)]
        names = [f"{owner}.{name}".lstrip(".") for name, _ in [*held.named_children(), *tensors]]
        yield from (name for name in names if name not in around and name not in layers)


def without_hooks(model: Any) -> Any:
    """Return the model, whose modules no longer move what they are given."""
    remove_hook_from_module(model, recurse=True)
    return model
