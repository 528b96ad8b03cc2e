"""Device of each layer of a model on several GPUs, and transfers between them.

Embedding, final norm and LM head are on the main device, with drafters, trees, masks and sampling; layers may be on
others. Only `to_device` moves tensors between devices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on the device; itself if it is already there.

    A copy between two GPUs is ordered by events, without a host synchronisation.
    """
    return tensor if tensor.device == device else tensor.to(device)


class PerDevice(ABC):
    """Base class of layer inputs that hold tensors."""

    @abstractmethod
    def on(self, device: torch.device) -> Any:
        """Return the same inputs with their tensors on the device."""


def to_device_recursive(value: Any, device: torch.device) -> Any:
    """Move all tensors of a value to the device: a tensor, `PerDevice`, tuple, list or dict."""
    if isinstance(value, torch.Tensor):
        return to_device(value, device)
    if isinstance(value, PerDevice):
        return value.on(device)
    if isinstance(value, dict):
        return {name: to_device_recursive(one, device) for name, one in value.items()}
    return type(value)(to_device_recursive(one, device) for one in value) if isinstance(value, (tuple, list)) else value


class PerDeviceInputs:
    """Layer inputs apart from states, moved once per device and pass.

    A pass goes up the layers: a layer not above the last one begins another pass, whose masks may be new.
    """

    def __init__(self) -> None:
        self.layer = -1
        self.moved: dict[tuple[int, torch.device], tuple[Any, Any]] = {}  # keeps the original, so that its id is unique

    def on(self, device: torch.device, layer: int, *values: Any) -> list[Any]:
        """Return the inputs of this layer on its device."""
        if layer <= self.layer:
            self.moved.clear()
        self.layer = layer
        return [None if value is None else self._one(value, device) for value in values]

    def _one(self, value: Any, device: torch.device) -> Any:
        key = id(value), device
        if key not in self.moved:
            self.moved[key] = value, to_device_recursive(value, device)
        return self.moved[key][1]


class DeviceBlock:
    """A block of a multi-device model: moves its input to its device and the result back.

    Callers need no device logic. `Target.to_layer_device` moves the input first and so saves the way back.
    """

    def __init__(self, block: Any, number: int, device: torch.device, inputs: PerDeviceInputs) -> None:
        self.block, self.number, self.device, self.inputs = block, number, device, inputs

    def __getattr__(self, name: str) -> Any:
        if name == "block":  # not set yet while the object is copied
            raise AttributeError(name)
        return getattr(self.block, name)

    def __call__(self, x: Tensor, cache: Any, mask: Any, rotary: Any) -> Tensor:
        """Return the layer's output, as `architectures.Block` does."""
        return self._called(self.block, x, cache, mask, rotary)

    def attend(self, x: Tensor, cache: Any, mask: Any, rotary: Any) -> Tensor:
        """Return attention's contribution, as `architectures.Block` does."""
        return self._called(self.block.attend, x, cache, mask, rotary)

    def attend_by_torch(self, x: Tensor, cache: Any, mask: Any, rotary: Any) -> Tensor:
        """Return attention's contribution without kernels of layers, as `architectures.Block` does."""
        return self._called(self.block.attend_by_torch, x, cache, mask, rotary)

    def run_mlp(self, x: Tensor) -> Tensor:
        """Return the MLP's contribution, as `architectures.Block` does."""
        return to_device(self.block.run_mlp(to_device(x, self.device)), x.device)

    def _called(self, part: Callable[..., Tensor], x: Tensor, cache: Any, mask: Any, rotary: Any) -> Tensor:
        moved = self.inputs.on(self.device, self.number, mask, rotary)
        return to_device(part(to_device(x, self.device), cache, *moved), x.device)


def device_of(module: nn.Module) -> torch.device | None:
    """Return the device of a module's weights, or None if it has none."""
    weight = next(module.parameters(), None)
    return None if weight is None else weight.device


def place_blocks(blocks: Sequence[Any], modules: Sequence[nn.Module], first: torch.device) -> list[Any]:
    """Return the blocks, wrapped in `DeviceBlock` if one is not on the first device.

    modules: one module of each block on the block's device.
    """
    devices = [device_of(module) or first for module in modules]
    if set(devices) <= {first}:
        return list(blocks)
    inputs = PerDeviceInputs()
    return [
        DeviceBlock(block, i, device, inputs) for i, (block, device) in enumerate(zip(blocks, devices, strict=True))
    ]


def layer_devices(blocks: Sequence[Any], first: torch.device) -> dict[torch.device, list[int]]:
    """Return the layers on each device, ascending, the first device first."""
    by_device: dict[torch.device, list[int]] = {first: []}
    for i, block in enumerate(blocks):
        by_device.setdefault(block.device if isinstance(block, DeviceBlock) else first, []).append(i)
    return by_device
