"""Device and dtype of a model: `--device`, `--dtype`, layers over several GPUs.

Embedding, final norm and LM head are on the first device, with drafters and sampling. transformers and accelerate load
each weight on its device; accelerate's hooks, which would move states at every module, are removed, since
`engine/device_map.py` does that.
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

import psutil
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
    """Return the processor's name from the system, or that of its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


BUSY_TIMES = ("user", "nice", "system", "steal")  # of psutil; steal: the host used the processor for others
IDLE_CORES = 0.2  # load of other processes, in cores, that counts as idle


def other_cpu_seconds() -> float:
    """Return the seconds for which other processes have used the cores that this process may use."""
    cores = set(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))
    busy = sum(
        getattr(times, kind, 0.0)
        for core, times in enumerate(psutil.cpu_times(percpu=True))
        if core in cores
        for kind in BUSY_TIMES
    )
    own = psutil.Process().cpu_times()
    return float(busy - own.user - own.system)


HIDDEN = ("", "-1")  # values of CUDA_VISIBLE_DEVICES that hide all GPUs


@cache
def unseen_gpu() -> str:
    """Return a message if the driver lists a GPU that torch does not detect, else ''. Cached."""
    if torch.cuda.is_available() or os.environ.get("CUDA_VISIBLE_DEVICES") in HIDDEN:
        return ""
    gpu = _driver_gpu()
    if gpu is None:
        return ""
    name, driver = gpu
    cuda = torch.version.cuda
    reason = f"it is built for CUDA {cuda}, the driver is {driver}" if cuda else "it is built without CUDA"
    return f"auto uses the CPU: the driver lists a GPU ({name}), but torch {torch.__version__} has none ({reason})"


@cache
def warn_of_unseen_gpu() -> None:
    """Warn of an undetected GPU, once per process."""
    if message := unseen_gpu():
        warnings.warn(message, stacklevel=4)


def _driver_gpu() -> tuple[str, str] | None:
    """Return the name of the first GPU and the driver's version; None without a driver or a GPU."""
    with suppress(Exception):  # no library or no permission
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
KNOWN = "use auto, cpu, cuda or cuda:N, or several GPUs: cuda:0,cuda:1 or cuda:all"


def device_names(device: object) -> list[str]:
    """Return the names of `--device`, one or those of several GPUs, without a look at this machine.

    Raises UserError for a name of no device.
    """
    if isinstance(device, (list, tuple)):
        raise UserError(f"a device must be a string, not the list {device!r}; {KNOWN}")
    names = [name.strip() for name in str(device).split(",")]
    if len(names) == 1:
        if not re.fullmatch(r"auto|(cpu|cuda|mps|xpu)(:[0-9]+)?|cuda:all", names[0]):
            raise UserError(f"unknown device {device!r}; {KNOWN}")
        return names
    for name in names:
        if not re.fullmatch(r"cuda:[0-9]+", name):
            raise UserError(f"--device {device}: {name!r} is not a GPU with a number; {KNOWN}")
        if names.count(name) > 1:
            raise UserError(f"--device {device}: {name} is listed twice; {KNOWN}")
    return names


def several(device: object) -> bool:
    """Return True for several devices. Raises UserError as `device_names` does."""
    names = device_names(device)
    return len(names) > 1 or names == [ALL]


def resolve_device(device: str) -> str:
    """Return the name of the device, or of several GPUs (cuda:0,cuda:1 or cuda:all) separated by commas.

    'auto' is cuda if available, else cpu; warns once if torch does not detect the driver's GPU. Raises UserError for a
    missing device.
    """
    return ",".join(_available_device(name) for name in device_names(device))


def device_class(names: str) -> str:
    """Return the type of the first resolved device: 'cuda' for 'cuda:0,cuda:1'."""
    return names.partition(",")[0].partition(":")[0]


def _available_device(device: str) -> str:
    if device == "auto":
        warn_of_unseen_gpu()
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == ALL:
        if not torch.cuda.is_available():
            raise UserError(f"device {ALL!r} is not available: torch detects no GPU")
        return ",".join(f"cuda:{i}" for i in range(torch.cuda.device_count()))
    if device.startswith("cpu:") and device != "cpu:0":  # torch accepts it and fails later
        raise UserError(f"device {device!r} is not available; use cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device {device!r} is not available: {str(error).splitlines()[0]}") from None
    return device


def check_one_device(device: str, feature: str) -> None:
    """Raise UserError for a feature that does not support several devices."""
    if several(device):
        raise UserError(
            f"{feature} takes one device, not {device}; several support only decoding, unquantized, with engine eager"
        )


def resolve_dtype(dtype: str, device: str) -> torch.dtype:
    """Return the compute dtype of a `--dtype` name; 'auto' is float32 on a CPU and bfloat16 elsewhere.

    Raises UserError for an unknown name, and for a CPU-only one on another device.
    """
    if dtype not in DTYPES:
        raise UserError(f"unknown dtype {dtype!r}{known_words(dtype, DTYPES)}")
    device = device.partition(",")[0]  # all devices of a list have the same type
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    if dtype == HALF_WEIGHTS and torch.device(device).type != "cpu":
        raise UserError(f"--dtype {HALF_WEIGHTS} is for CPUs; on {device} use float16 or bfloat16")
    resolved: torch.dtype = getattr(torch, arithmetic(dtype))
    return resolved


GIB = 2**30


def check_divided(model: str, device: str, engine: str = "eager", quantize: str = "none") -> None:
    """Raise UserError for options that several devices do not support, without a look at this machine's GPUs."""
    if not several(device):
        return
    if engine == "graph":
        check_one_device(device, "--engine graph")
    if quantize != "none":
        check_one_device(device, f"--quantize {quantize}")
    if gguf_file(model) is not None:
        raise UserError(f"a GGUF file takes one device, not {device}; save {model!r} as a folder (docs/models.md)")


def device_map(config: Any, devices: Sequence[str], dtype: torch.dtype, trust_remote_code: bool = False) -> Any:
    """Return the argument `device_map` of `from_pretrained`: the device of each module, by its name.

    Raises UserError if the model has too few layers or exceeds the free memory.
    """
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    model.tie_weights()
    return divided(model, devices, [torch.cuda.mem_get_info(device)[0] for device in devices], dtype)


def divided(model: Any, devices: Sequence[str], free: Sequence[int], dtype: torch.dtype) -> dict[str, str]:
    """Return the device of each module of a model (weights are not needed). free: bytes on each device.

    Raises UserError as `device_map` does.
    """
    sizes, layers = compute_module_sizes(model, dtype=dtype), {id(layer) for layer in HfDecoder(model).layers}
    names = [name for name, module in model.named_modules() if id(module) in layers]
    if len(names) < len(devices):
        raise UserError(f"the model has {len(names)} layers, too few for {len(devices)} devices")
    layer_sizes = [int(sizes[name]) for name in names]
    outside = int(sizes[""]) - sum(layer_sizes)
    room = [max(0, free[0] - outside), *free[1:]]
    assigned = in_order(layer_sizes, room) if sum(room) else []
    used = [
        sum(size for size, index in zip(layer_sizes, assigned, strict=False) if index == i) for i in range(len(room))
    ]
    if free[0] < outside or not assigned or any(need > available for need, available in zip(used, room, strict=True)):
        available_text = ", ".join(
            f"{size / GIB:.1f} GiB on {device}" for size, device in zip(free, devices, strict=True)
        )
        raise UserError(
            f"the model does not fit: {sizes[''] / GIB:.1f} GiB of weights, of which {outside / GIB:.1f} must be on "
            f"{devices[0]}; free: {available_text}"
        )
    if 0 in used[1:]:
        idle = devices[1 + used[1:].index(0)]
        raise UserError(f"{idle} has no free memory for a layer; remove it from --device")
    placement = dict.fromkeys(_other_modules(model, names), devices[0])
    return placement | dict(zip(names, (devices[i] for i in assigned), strict=True))


def in_order(sizes: Sequence[int], room: Sequence[int]) -> list[int]:
    """Return the device index of each size: one device after the other, each in proportion to its room."""
    ends = [end / sum(room) for end in accumulate(room)]
    middles = [(end - size / 2) / sum(sizes) for end, size in zip(accumulate(sizes), sizes, strict=True)]
    return [min(bisect_right(ends, middle), len(room) - 1) for middle in middles]


def _other_modules(model: nn.Module, layers: Sequence[str]) -> Iterator[str]:
    """Yield the names of modules and tensors outside the layers."""
    path = layers[0].split(".")[:-1]
    containers = [".".join(path[:n]) for n in range(len(path) + 1)]
    for owner in containers:
        container = model.get_submodule(owner)
        tensors = [*container.named_parameters(recurse=False), *container.named_buffers(recurse=False)]
        names = [f"{owner}.{name}".lstrip(".") for name, _ in [*container.named_children(), *tensors]]
        yield from (name for name in names if name not in containers and name not in layers)


def without_hooks(model: Any) -> Any:
    """Return the model without accelerate's hooks."""
    remove_hook_from_module(model, recurse=True)
    return model
