"""Number formats of a model's weights: rounding to float16, quantization, elements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specbench_ss.errors import UserError

MAX_FP16 = torch.finfo(torch.float16).max


@torch.no_grad()
def round_matrices(model: Any, name: str) -> None:
    """Round every matrix of a float32 model to float16 values, in place; the dtype stays float32.

    So every kernel computes with the same weights. Norms and biases stay as they are. Raises UserError, before any
    change, for a value outside the range of float16.
    """
    matrices = {parameter: p for parameter, p in model.named_parameters() if p.ndim > 1 and p.numel()}
    unsupported = next((p for p in matrices.values() if p.dtype != torch.float32 or p.device.type != "cpu"), None)
    if unsupported is not None:
        raise UserError(f"{name!r} is {unsupported.dtype} on {unsupported.device}; fp16 weights need float32 on a CPU")
    for parameter, p in matrices.items():
        if p.abs().max() > MAX_FP16:
            raise UserError(
                f"{name!r} has weights outside float16 ({parameter} exceeds {MAX_FP16:,.0f}); use --dtype float32"
            )
    for p in matrices.values():
        p.copy_(p.half())


@dataclass(frozen=True, slots=True)
class Quantization:
    """Quantization of a target's linear layers.

    description: for the record. apply: quantizes another model in place and returns the description; raises UserError
    if it cannot. reread: returns the original model, or None.
    """

    description: str
    apply: Callable[[Any], str]
    reread: Callable[[], Any] | None = None

    def quantize(self, model: Any) -> Quantization:
        """Quantize another model the same way, in place; return its record. Raises UserError if that fails."""
        return replace(self, description=self.apply(model), reread=None)


def holds_numbers(weight: Tensor) -> bool:
    """Return True for a plain tensor of numbers, False for a quantized parameter."""
    plain = type(weight) is torch.nn.Parameter and type(weight.data) is torch.Tensor
    return plain and weight.is_floating_point()


def is_half(weight: Tensor) -> bool:
    """Return True if all of these float32 values are float16 values."""
    if weight.dtype != torch.float32 or weight.is_meta:
        return False
    return bool((weight.half().float() == weight).all())


def entries(weight: Tensor) -> int:
    """Return the number of elements; bitsandbytes packs two into a byte."""
    state = getattr(weight, "quant_state", None)
    return weight.numel() if state is None else int(state.shape.numel())
