"""A second device that any machine has: its tensors hold numbers, and an operation that mixes devices raises.

Tensors of the class `Second` lie in the machine's own memory and state that they lie on another device. Torch's
functions
see their class: a call that is given both kinds raises, as CUDA does for tensors of two GPUs, and what a call makes of
tensors of the second device lies there too. Numbers alone, such as 3, go with both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from specbench_ss.engine import device_map, target
from specbench_ss.engine.generic_model import HfDecoder
from specbench_ss.engine.layers import fused

SECOND = torch.device("cpu", 1)  # a name that torch has on any machine, and a device that none has


class MixedDevicesError(RuntimeError):
    """An operation was given tensors of both devices."""


class Second(Tensor):
    """A tensor on the second device."""

    device = SECOND  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(one, Tensor) and not isinstance(one, Second) for one in leaves((args, kwargs or {}))):
            raise MixedDevicesError(f"{getattr(func, '__name__', func)} is given tensors of both devices")
        return super().__torch_function__(func, types, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            copied = self.detach().clone()
            memo[id(self)] = nn.Parameter(copied, requires_grad=False) if isinstance(self, nn.Parameter) else copied
        return memo[id(self)]  # type: ignore[no-any-return]


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        for one in value:
            yield from leaves(one)
    else:
        yield value


class _Factories(TorchFunctionMode):
    """Tensor that was made on the second device, or sent there by torch itself."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs and kwargs.get("device") == SECOND:
            return func(*args, **kwargs | {"device": "cpu"}).as_subclass(Second)
        if func is Tensor.to:
            there = [one for one in args[1:] if one == SECOND or isinstance(one, Second)]
            if there and not isinstance(args[0], Second):
                return args[0].as_subclass(Second).to(*(one for one in args[1:] if one not in there), **kwargs)
        return func(*args, **kwargs)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """As `placement.to_device`, with a copy wherever the device is another one."""
    if tensor.device == device:
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        copied = tensor.as_subclass(Tensor).clone()
    return copied.as_subclass(Second) if device == SECOND else copied


def send(module: nn.Module) -> None:
    """Move a module to the second device."""
    for owner in module.modules():
        for name, p in list(owner._parameters.items()):
            if p is not None:
                owner._parameters[name] = nn.Parameter(p.data.as_subclass(Second), requires_grad=False)
        for name, b in list(owner._buffers.items()):
            if b is not None:
                owner._buffers[name] = b.as_subclass(Second)


@contextmanager
def second_device(monkeypatch: pytest.MonkeyPatch, move: Callable[..., Tensor] = to_device) -> Iterator[None]:
    """Within: tensors can be made there, and go there through the one function that moves tensors."""
    for module in list(sys.modules.values()):
        if getattr(module, "to_device", None) is device_map.to_device and module is not device_map:
            monkeypatch.setattr(module, "to_device", move)
    monkeypatch.setattr(device_map, "to_device", move)
    monkeypatch.setattr(target, "packing", lambda *_: None)  # copies of weights are for CPUs
    monkeypatch.setattr(fused, "holds_numbers", torch.is_floating_point)  # else of torch's own class alone
    with _Factories():
        yield


def send_layers(model: Any, layers: Sequence[int]) -> None:
    """Move these layers of a causal LM to the second device."""
    every = HfDecoder(model).layers
    for i in layers:
        send(every[i])
