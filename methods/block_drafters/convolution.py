"""Convolutions around the sublayers of a block drafter (DFlash2), with kernels computed for each position.

out_t = sum over taps i of (base_i + delta_{t,i}) x_{t-i}, where delta is a linear function of the sublayer's normed
input, equal within a group of channels. Positions before the block count as zeros, so blocks never mix. Definition:
vLLM 0.32, `qwen3_dflash2.py`; the package speculators 0.9.0, `models/dflash2`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specbench_ss.engine.layers.linear import PackedDtype, PrepackedLinear


class BlockConvolution(nn.Module):
    """Convolve the input and the output of a sublayer; both kernels follow from the input.

    Parameters are named as published tensors. taps: positions that a kernel reads. group: channels with the same delta,
    a divisor of `hidden`. A new module changes nothing.
    """

    def __init__(self, hidden: int, taps: int, group: int) -> None:
        super().__init__()
        self.taps, self.group = taps, group
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * taps * (hidden // group), bias=False)
        nn.init.ones_(self.base_kernel[:, 0])
        nn.init.zeros_(self.kernel_projection.weight)
        self.project: PrepackedLinear | None = None

    def finalize(self, pack: PackedDtype) -> None:
        """Prepare for inference with final weights."""
        self.project = self.project or PrepackedLinear(self.kernel_projection.weight, None, pack)

    def forward(self, x: Tensor, inside: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the sublayer's output [B, n, h] for its normed input x [B, n, h], both convolved.

        inside: [B, n, taps - 1], from `inside_block`.
        """
        packed = self.project is not None and torch.is_inference_mode_enabled()
        delta = (self.project if packed and self.project is not None else self.kernel_projection)(x)
        delta = delta.unflatten(-1, (2, self.taps, -1, 1))  # [B, n, 2, taps, groups, 1]
        kernels = (self.base_kernel.unflatten(-1, (-1, self.group)) + delta).flatten(-2)
        before, after = kernels.unbind(2)
        return convolve(sublayer(convolve(x, before, inside)), after, inside)


def convolve(x: Tensor, kernel: Tensor, inside: Tensor) -> Tensor:
    """Return the convolution [B, n, h] of x [B, n, h] with kernels [B, n, taps, h]. inside: [B, n, taps - 1]."""
    n, out = x.shape[1], kernel[:, :, 0] * x
    for tap in range(1, kernel.shape[2]):
        earlier = F.pad(x, (0, 0, tap, 0))[:, :n] * inside[..., tap - 1 : tap]
        out = torch.addcmul(out, kernel[:, :, tap], earlier)
    return out


def inside_block(n: int, size: int, taps: int, like: Tensor) -> Tensor:
    """Return [1, n, taps - 1] for n rows of blocks of `size` positions, in the dtype and on the device of `like`.

    Column i - 1 is 1 for rows whose i-th row before belongs to the same block, else 0.
    """
    position = torch.arange(n, device=like.device) % size
    return (position[:, None] >= torch.arange(1, taps, device=like.device)).to(like.dtype)[None]
