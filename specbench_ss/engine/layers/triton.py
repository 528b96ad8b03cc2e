"""Triton kernels for layers of few query tokens on CUDA, in half precision.

torch's operators launch 16 kernels for a layer, of which 12 only move a few kilobytes; these launch 9
(`triton_kernels.py`). Without Triton or its C compiler, before compute capability 8, or with SSBENCH_NATIVE=0, torch's
operators are used. The order of a sum never depends on the number of query tokens, up to MOST_ROWS.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Hashable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specbench_ss.engine.layers.cpu import VARIABLE
from specbench_ss.errors import first_line

MOST_ROWS = 64  # query tokens of a product; with more, cuBLAS is as fast
MOST_QUERIES = 512  # query tokens of a layer, as of `cuda_graphs.MAX_UNPADDED`
HALF = (torch.bfloat16, torch.float16)
LEAST_CAPABILITY = (8, 0)
SPLIT = 128  # keys of one program; constant, since it determines the order of sums
LONG_SPLIT = 1024  # of more than MOST_ROWS query tokens, whose products have another order already
KEYS = (128, 64, 32)  # keys of one iteration, the first that fits
MOST_WIDTH = 256  # of a head
MOST_BLOCK = 64  # query rows of a program of attention
WIDE = 8192  # outputs; narrower products have few programs
MOST_SHARED = 232_448  # bytes of an H100
LEAST_SHARED = 49_152  # of every device
SPARE_SHARED = 4096  # further bytes that Triton uses


@functools.cache
def _load(device: torch.device) -> tuple[ModuleType | None, str]:
    """Return the kernels and '', or None and the reason why they cannot be used on this device."""
    if os.environ.get(VARIABLE) == "0":
        return None, f"{VARIABLE} is 0"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not (interpreted and device.type == "cpu"):
        return None, "they need a CUDA device"
    try:
        from specbench_ss.engine.layers import triton_kernels
    except ImportError as error:
        return None, f"Triton cannot be imported: {first_line(error)}"
    if interpreted:
        return triton_kernels, ""
    if torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return None, "they need compute capability 8.0"
    try:
        ones = torch.ones(2, 16, device=device, dtype=torch.bfloat16)
        _norm(triton_kernels, ones, ones[0], 0.0)
        torch.cuda.synchronize(device)
    except Exception as error:  # of Triton, its compiler or the driver, which have no common class
        return None, f"Triton cannot compile them: {first_line(error)}"
    return triton_kernels, ""


def kernels(like: Tensor) -> ModuleType | None:
    """Return the kernels for tensors like this one; None where they cannot be used.

    Half precision alone, whose products are as fast as memory; Triton's interpreter has only those of float32.
    """
    module = _load(like.device)[0]
    return module if like.dtype in ((torch.float32,) if like.device.type == "cpu" else HALF) else None


def problem(device: torch.device) -> str:
    """Return why there are no kernels on this device, or ''."""
    return _load(device)[1]


_variants = set[Hashable]()


def n_variants() -> int:
    """Return the number of variants of the kernels launched so far; Triton compiles one when it is first launched."""
    return len(_variants)


def _launch(kernel: Any, grid: tuple[int, ...], first: Tensor, *arguments: Any, **constants: Any) -> None:
    """Launch a kernel on the device of its first argument."""
    numbers = (a.data_ptr() if isinstance(a, Tensor) else a for a in (first, *arguments))
    marks = tuple((n % 16 == 0, n == 1) for n in numbers if isinstance(n, int))  # for which Triton specialises
    _variants.add((kernel, first.dtype, first.device, marks, *constants.values()))
    with torch.cuda.device_of(first):
        kernel[grid](first, *arguments, **constants)


def power(size: int) -> int:
    """Return the next power of two, at least 16: the least size of a product."""
    return max(16, 1 << (size - 1).bit_length())


def _norm(module: ModuleType, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.contiguous()
    out, size = torch.empty_like(x), x.shape[-1]
    _launch(module.rms_norm, (x.numel() // size,), x, weight, out, size, eps, WIDTH=power(size), num_warps=8)
    return out


def tree_mask(visible: Tensor, past: Tensor, keys: int, dtype: torch.dtype) -> Tensor | None:
    """Return the additive mask [1, 1, q, keys] of visible [q, m] behind `past` [1] rows; None without kernels."""
    mask = torch.empty(1, 1, len(visible), keys, dtype=dtype, device=visible.device)
    module = kernels(mask)
    if module is None:
        return None
    visible, width = visible.contiguous(), 1024
    _launch(
        module.tree_mask, (len(visible), -(-keys // width)),
        mask, visible.view(torch.uint8), past, visible.shape[1], keys, torch.finfo(dtype).min, WIDTH=width,
    )  # fmt: skip
    return mask


class CudaNorm:
    """RMSNorm by the kernel in inference of few rows, else by the module."""

    def __init__(self, module: Any, eps: float) -> None:
        self.module, self.weight, self.eps = module, module.weight.data, eps

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normed states [.., h]."""
        few = (
            0 < x.shape[:-1].numel() <= MOST_QUERIES and x.dtype == self.weight.dtype and x.device == self.weight.device
        )
        module = kernels(x) if few and torch.is_inference_mode_enabled() else None
        if module is None:
            out: Tensor = self.module(x)
            return out
        return _norm(module, x, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class Tile:
    """Outputs of a program, inputs of an iteration, and how Triton compiles it."""

    columns: int
    block: int
    warps: int
    stages: int


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may use."""
    if device.type == "cpu":
        return MOST_SHARED
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", LEAST_SHARED))


def _stages(device: torch.device, stage_bytes: int, other_bytes: int, most: int) -> int:
    """Return how many iterations of so many bytes can be loaded ahead."""
    return max(1, min(most, (_shared_memory(device) - other_bytes) // stage_bytes))


@functools.cache
def tile_of(device: torch.device, outputs: int, inputs: int, gated: bool, rows: int) -> Tile:
    """Return the tile of a product of half-precision weights [outputs, inputs].

    Measured on an H100 for the shapes of a 7B (docs/log.md). All tiles give the same bits: a sum goes through the
    inputs in order.
    """
    columns = 64 if rows > 16 and outputs >= WIDE else 32
    for block in (256, 128, 64):
        loaded = 2 * block * (columns * (2 if gated else 1) + rows)
        stages = _stages(device, loaded, SPARE_SHARED, 5 if rows == 16 else 4)
        if inputs % block == 0 and stages > 2 and (block < 256 or rows == 16):
            break
    return Tile(columns, block, 4, stages)


@functools.cache
def keys_of(device: torch.device, width: int) -> int:
    """Return the keys of one iteration for heads of this width, whatever the number of query tokens is."""
    queries = 4 * MOST_BLOCK * width + SPARE_SHARED
    return next((keys for keys in KEYS if _stages(device, 4 * keys * width, queries, 2) == 2), KEYS[-1])


def fits(device: torch.device, d: int) -> bool:
    """Return True if attention with heads of dimension d fits a program's shared memory."""
    width = power(d)
    needed = 4 * width * (KEYS[-1] + MOST_BLOCK) + SPARE_SHARED
    return width <= MOST_WIDTH and needed <= _shared_memory(device)


class CudaLinear:
    """A product of few rows: x [.., in] -> x weight^T + bias [.., out], weight [out, in].

    gated: weight [2 out, in], gate before up; silu(x gate^T) (x up^T) instead.
    """

    __slots__ = ("bias", "gated", "inputs", "kernel", "outputs", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, gated: bool = False) -> None:
        module = kernels(weight)
        assert module is not None
        self.kernel, self.weight, self.bias, self.gated = module.linear, weight, bias, gated
        self.outputs, self.inputs = len(weight) // (2 if gated else 1), weight.shape[1]

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the result, plus residual [.., out]."""
        x = x.contiguous()
        n = x.numel() // self.inputs
        if n > MOST_ROWS:
            return self._by_torch(x, residual)
        out, rows = x.new_empty((*x.shape[:-1], self.outputs)), power(n)
        tile = tile_of(x.device, self.outputs, self.inputs, self.gated, rows)
        _launch(
            self.kernel, (-(-self.outputs // tile.columns),),
            x, self.weight, x if self.bias is None else self.bias, x if residual is None else residual.contiguous(),
            out, n, INPUTS=self.inputs, OUTPUTS=self.outputs, GATED=self.gated, BIASED=self.bias is not None,
            RESIDUAL=residual is not None, ROWS=rows, COLUMNS=tile.columns, BLOCK=tile.block,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        return out

    def _by_torch(self, x: Tensor, residual: Tensor | None) -> Tensor:
        out = F.linear(x.view(-1, self.inputs), self.weight, self.bias).view(*x.shape[:-1], -1)
        if self.gated:
            gate, up = out.chunk(2, -1)
            out = F.silu(gate).mul_(up)
        return out if residual is None else out.add_(residual)


Norm = tuple[Tensor, float]  # weight and epsilon of an RMSNorm


class CudaLayer:
    """Attention and MLP of a decoder layer by the kernels.

    heads, kv_heads, d: of attention. head_norm: weight [heads + kv_heads, d] and epsilon of the norm of queries and
    keys, or None. scale: factor of the scores.
    """

    __slots__ = (
        "d", "down", "gate_up", "head_norm", "heads", "kernels", "kv_heads", "norm1", "norm2", "out", "qkv", "scale",
    )  # fmt: skip

    def __init__(
        self,
        norm1: Norm | None,
        qkv: CudaLinear,
        out: CudaLinear,
        norm2: Norm,
        gate_up: CudaLinear,
        down: CudaLinear,
        heads: int,
        kv_heads: int,
        d: int,
        head_norm: Norm | None,
        scale: float,
    ) -> None:
        self.norm1, self.qkv, self.out = norm1, qkv, out
        self.norm2, self.gate_up, self.down = norm2, gate_up, down
        self.heads, self.kv_heads, self.d, self.head_norm, self.scale = heads, kv_heads, d, head_norm, scale
        module = kernels(qkv.weight)
        assert module is not None
        self.kernels = module

    def attend(
        self,
        x: Tensor,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        count: int,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Return attention's contribution to x [1, q, h], plus the residual; write keys and values of x.

        Args:
            x: states [1, q, h] of up to MOST_QUERIES query tokens.
            keys, values: [1, kv_heads, capacity, d] of the layer.
            positions: int64 [q], rows of the cache for x.
            count: number of rows to attend to, those of x included.
            rotary: cos and sin [1, q, d].
            mask: additive [1, 1, q, count]; None: every query attends to every row.
            residual: [1, q, h].
        """
        n, heads, d, width = x.shape[1], self.heads, self.d, power(self.d)
        rows = self.qkv(x if self.norm1 is None else _norm(self.kernels, x, *self.norm1))
        query, out = x.new_empty(heads, n, d), x.new_empty(1, n, heads * d)
        norm, eps = (x, 0.0) if self.head_norm is None else self.head_norm
        split = SPLIT if n <= MOST_ROWS else LONG_SPLIT
        stride, splits, group = keys.stride(1), -(-count // split), heads // self.kv_heads * n
        partial = x.new_empty(splits, heads * n, d, dtype=torch.float32)
        largest, total = x.new_empty(2, splits, heads * n, dtype=torch.float32)
        block = min(power(group), MOST_BLOCK)
        step = keys_of(x.device, width)
        stages = _stages(x.device, 4 * step * width, 4 * block * width + SPARE_SHARED, 3)
        _launch(
            self.kernels.rope_and_write, (n, heads + 2 * self.kv_heads),
            rows, *rotary, norm, positions, query, keys, values, stride, n, heads, self.kv_heads, eps,
            NORMED=self.head_norm is not None, D=d, HALF=width // 2, num_warps=1,
        )  # fmt: skip
        _launch(
            self.kernels.attend, (self.kv_heads, splits, -(-group // block)),
            query, keys, values, x if mask is None else mask, partial, largest, total, stride,
            0 if mask is None else mask.stride(2), n, group, count, self.scale,
            MASKED=mask is not None, SPLIT=split, ROWS=block, KEYS=step, D=d, WIDTH=width,
            num_warps=4, num_stages=stages,
        )  # fmt: skip
        parts = max(4, 1 << (splits - 1).bit_length())
        _launch(
            self.kernels.combine, (n, heads), partial, largest, total, out, n, heads, splits,
            SPLITS=parts, PART=min(parts, 16), D=d, WIDTH=width, num_warps=2,
        )  # fmt: skip
        return self.out(out, residual)

    def mlp(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the MLP's contribution to x [.., h] of up to MOST_QUERIES query tokens, plus the residual."""
        return self.down(self.gate_up(_norm(self.kernels, x, *self.norm2)), residual)
