"""The layers of a model divided over several GPUs of a machine, in order, in proportion to their free memory.

Embedding, final norm and LM head go to the first one, beside what drafts and chooses tokens. transformers and
accelerate read the weights straight to where they belong; accelerate's hooks, which would move rows at every module,
go again, since `decoding/placement.py` does that. Knows modules and bytes, no method.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from accelerate import init_empty_weights
from accelerate.hooks import remove_hook_from_module
from accelerate.utils import compute_module_sizes
from torch import nn
from transformers import AutoModelForCausalLM

from specbench_ss.decoding.recording import OwnDecoder
from specbench_ss.errors import UserError
from specbench_ss.models.devices import check_one_device, several
from specbench_ss.models.gguf_files import gguf_file

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
    sizes, layers = compute_module_sizes(model, dtype=dtype), {id(layer) for layer in OwnDecoder(model).layers}
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
