"""Matrix products of few query tokens.

A verification pass has 2 to 32 query tokens. torch reorders the weight matrix in each such product, which takes as long
as several rows. On a CPU with native kernels (`cpu`) a product therefore reads a packed copy of the matrix. The copy
adds a half to the memory of the weights or doubles it; it is made only if the machine has plenty.

The model's number format selects the dtype of the copy, never the weights: if only a base that was published in float16
read half of its bytes, a method that changes the base would be compared with a faster model.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor

from specbench_ss.engine.layers import cpu, triton
from specbench_ss.engine.layers.cpu import NativeLinear
from specbench_ss.engine.layers.triton import CudaLinear
from specbench_ss.engine.weights import is_half

MEMORY_SHARE = 4  # the weights may take one part in so many of the machine's memory

PackedDtype = torch.dtype | None  # of the packed copy of weights; None: there is none
_FP16_COPIES: WeakSet[PrepackedLinear] = WeakSet()


class PrepackedLinear:
    """Linear layer for inference: x [.., in] -> x weight^T + bias [.., out]. weight: [out, in].

    pack: dtype of a packed copy for native kernels; float16 needs weights with float16 values (a model with fp16
    weights and its drafters).
    parts: weights that this one is a copy of.
    """

    __slots__ = ("__weakref__", "bias", "half", "most", "native", "parts", "weight")

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, pack: PackedDtype = None, parts: Sequence[Tensor] = ()
    ) -> None:
        self.weight, self.bias, self.parts = weight, bias, (*parts, weight)
        self.native: NativeLinear | CudaLinear | None = None
        self.most = 0  # rows of the kernel
        self.half = False  # the copy is in float16, the weights in float32
        same_dtype = bias is None or bias.dtype == weight.dtype
        if same_dtype and weight.is_contiguous() and triton.kernels(weight) is not None:
            self.native, self.most = CudaLinear(weight, bias), triton.MOST_ROWS
        elif pack is not None and same_dtype and weight.device.type == "cpu":
            copied = torch.float16 if pack == torch.float16 and is_half(weight) else weight.dtype
            if cpu.supports(weight.dtype, copied):
                self.native, self.most = NativeLinear(weight.to(copied), bias, weight.dtype), cpu.MOST_ROWS
                self.half = copied != weight.dtype
                if self.half:
                    _FP16_COPIES.add(self)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product. The kernel checks nothing itself; torch reports errors."""
        weight, rows = self.weight, x.shape[:-1].numel()
        few = x.ndim > 1 and 0 < rows <= self.most and x.shape[-1] == weight.shape[1]
        if few and x.dtype == weight.dtype and x.device == weight.device and torch.is_inference_mode_enabled():
            return self.native(x)  # type: ignore[misc]  # `most` is 0 without a kernel
        if x.ndim == 3 and len(x) == 1:  # torch would treat a slice of rows as a batch and copy a bfloat16 weight
            return F.linear(x[0], self.weight, self.bias)[None]
        return F.linear(x, self.weight, self.bias)


def packing(weight: Tensor, weights_bytes: int, fp16_weights: bool) -> PackedDtype:
    """Return the dtype of packed copies of weights like this one; None without native kernels or memory.

    weights_bytes: of all weights of the model. fp16_weights: the model's number format.
    """
    dtype = torch.float16 if fp16_weights else weight.dtype
    supported = weight.device.type == "cpu" and cpu.supports(weight.dtype, dtype)
    return dtype if supported and has_room(weights_bytes) else None


def has_room(weights_bytes: int) -> bool:
    """Return True if a second copy of the weights leaves the machine plenty of memory."""
    return MEMORY_SHARE * weights_bytes <= _memory()


def _memory() -> int:
    """Return the bytes of the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def bytes_read(weights: Iterable[Tensor]) -> int:
    """Return the bytes that a pass over these weights reads: half for weights with a float16 copy."""
    halved = {part.untyped_storage().data_ptr() for product in _FP16_COPIES for part in product.parts}
    return sum(_bytes_of(w, halved) for w in weights)


def _bytes_of(weight: Tensor, halved: set[int]) -> int:
    """Return the bytes of one weight; of a quantized one, those of its component tensors."""
    if hasattr(weight, "__tensor_flatten__"):
        parts = [getattr(weight, name) for name in weight.__tensor_flatten__()[0]]
        return sum(part.numel() * part.element_size() for part in parts)
    if (state := getattr(weight, "quant_state", None)) is not None:  # bitsandbytes' scales, and their scales
        nested = getattr(state, "state2", None)  # resolved and removed by its first pass on a CPU with bfloat16
        scales = [state.absmax, *([nested.absmax] if nested is not None else [])]
        return weight.numel() + sum(int(part.numel()) * int(part.element_size()) for part in scales)
    half = weight.ndim >= 2 and weight.untyped_storage().data_ptr() in halved
    return weight.numel() * (2 if half else weight.element_size())
