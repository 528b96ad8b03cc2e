"""Device of each layer of a model on several GPUs, and the transfer of rows between them.

Embedding, final norm and LM head lie on the first device, where drafters, trees, masks and sampling are; layers may
lie on others. A tensor goes from device to device in `to_device` alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on the device: itself where it lies there.

    Between two GPUs the copy waits for what is under way on both, by events: the host waits for nothing.
    """
    return tensor if tensor.device == device else tensor.to(device)


class PerDevice(ABC):
    """What holds tensors that layers are given."""

    @abstractmethod
    def on(self, device: torch.device) -> Any:
        """Return the same with its tensors on the device."""


def to_device_recursive(value: Any, device: torch.device) -> Any:
    """Return a value with all tensors in it on the device: a tensor, something `PerDevice`, a tuple, list or dict."""
    if isinstance(value, torch.Tensor):
        return to_device(value, device)
    if isinstance(value, PerDevice):
        return value.on(device)
    if isinstance(value, dict):
        return {name: to_device_recursive(one, device) for name, one in value.items()}
    return type(value)(to_device_recursive(one, device) for one in value) if isinstance(value, (tuple, list)) else value


class PerDeviceInputs:
    """What layers are given beside rows, moved once to each device in a pass, however many layers lie there.

    A pass goes up the layers. A layer that is not above the last one begins another: masks may be written anew by then.
    """

    def __init__(self) -> None:
        self.layer = -1
        self.made: dict[tuple[int, torch.device], tuple[Any, Any]] = {}  # what was given is held: its id stays its own

    def on(self, device: torch.device, layer: int, *values: Any) -> list[Any]:
        """Return what this layer is given on its device."""
        if layer <= self.layer:
            self.made.clear()
        self.layer = layer
        return [None if value is None else self._one(value, device) for value in values]

    def _one(self, value: Any, device: torch.device) -> Any:
        key = id(value), device
        if key not in self.made:
            self.made[key] = value, to_device_recursive(value, device)
        return self.made[key][1]


class DeviceBlock:
    """A block of a model whose layers lie on several devices. It takes rows from any, and returns them there.

    So whoever calls blocks one after the other needs to know nothing of devices. Who brings the rows to `device` first
    (`Target.carried`) spares that they go there and back at every layer.
    """

    def __init__(self, block: Any, number: int, device: torch.device, given: PerDeviceInputs) -> None:
        self.block, self.number, self.device, self.given = block, number, device, given

    def __getattr__(self, name: str) -> Any:
        if name == "block":  # of one that is being copied, and has nothing yet
            raise AttributeError(name)
        return getattr(self.block, name)

    def __call__(self, x: Tensor, cache: Any, mask: Any, rotary: Any) -> Tensor:
        """Return the whole layer's result, as `architectures.Block` does."""
        return self._called(self.block, x, cache, mask, rotary)

    def attend(self, x: Tensor, cache: Any, mask: Any, rotary: Any) -> Tensor:
        """Return attention's contribution, as `architectures.Block` does."""
        return self._called(self.block.attend, x, cache, mask, rotary)

    def run_mlp(self, x: Tensor) -> Tensor:
        """Return the MLP's contribution, as `architectures.Block` does."""
        return to_device(self.block.run_mlp(to_device(x, self.device)), x.device)

    def _called(self, part: Callable[..., Tensor], x: Tensor, cache: Any, mask: Any, rotary: Any) -> Tensor:
        here = self.given.on(self.device, self.number, mask, rotary)
        return to_device(part(to_device(x, self.device), cache, *here), x.device)


def device_of(module: nn.Module) -> torch.device | None:
    """Return the device that a module's weights lie on; None where it has none."""
    weight = next(module.parameters(), None)
    return None if weight is None else weight.device


def place_blocks(blocks: Sequence[Any], modules: Sequence[nn.Module], first: torch.device) -> list[Any]:
    """Return the blocks, each of which knows its device where one of them lies on another than the first.

    modules: of each block, one that lies where it does.
    """
    devices = [device_of(module) or first for module in modules]
    if set(devices) <= {first}:
        return list(blocks)
    given = PerDeviceInputs()
    return [DeviceBlock(block, i, device, given) for i, (block, device) in enumerate(zip(blocks, devices, strict=True))]


def layer_devices(blocks: Sequence[Any], first: torch.device) -> dict[torch.device, list[int]]:
    """Return the layers that lie on each device, the first device first, ascending."""
    found: dict[torch.device, list[int]] = {first: []}
    for i, block in enumerate(blocks):
        found.setdefault(block.device if isinstance(block, DeviceBlock) else first, []).append(i)
    return found
