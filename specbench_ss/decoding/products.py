"""Products of rows with a matrix of weights on a CPU by a copy of the weights in an order of its own.

A pass over a draft has 2 to 32 rows. torch gives such a product to a library that reorders the matrix each time, which
takes as long as several rows. Two libraries that torch brings along take a matrix that was reordered once:

- oneDNN, in float32: 8 rows take about 1.6 times as long as one, and not 2.2 times. In bfloat16, where the processor
  multiplies it: all products of SmolLM2 take half of the time for 1 to 16 rows (docs/log.md).
- FBGEMM, with weights rounded to float16 numbers: it reads half of the bytes and computes in float32, so the product is
  that of the rounded weights but for the order of its sums. A pass of SmolLM2 took 0.7 of the time (docs/results).

Which of them is the model's number format, never how a weight happens to be: where the base alone read half of its
bytes, since it was published in float16, a method that changes the base would be held against a model it cannot have.

The copy adds a half to the memory of the weights, or doubles it; it is made only where the machine has plenty.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST_ROWS, MOST_ROWS = 2, 32  # of oneDNN; with fewer or more, the other library is as fast
MOST_ROWS_HALF = 256  # of FBGEMM
TINY = 1 << 14  # weights: fewer gain nothing (128 x 128, AVX2, 1 to 16 rows: 4 to 10 us, by oneDNN 25 to 30)
LARGE = 1_500_000  # weights, from where a single row gains by oneDNN too, unless it was measured
CLEARLY = 1.25  # times as fast as the usual way another has to be, so that loading twice rarely rounds in two ways
PACKED = (torch.float32, torch.bfloat16)  # formats that oneDNN's copies are made in
OFF = {torch.float32: 1e-4, torch.bfloat16: 0.05}  # by how much products of 16 numbers below one may differ
TRIES = 5
SHARE = 4  # of the machine's memory the weights may take one part in so many
HINT = 8  # rows that the order of the weights is chosen for


Packing = Literal["", "whole", "half"]  # the second copy of weights: none, reordered in float32, in float16

_HALVED: WeakSet[Product] = WeakSet()
Key = tuple[torch.Size, torch.dtype, int]  # shape and format of weights, threads
_one_row: dict[Key, int] = {}  # fewest rows of the copy, as measured


class Product:
    """x [.., in] -> x weight^T + bias [.., out], for inference. weight: [out, in].

    pack: `half` takes weights that are float16 numbers, as those of a model in that format and of its drafters are.
    parts: the weights that this one is a copy of, where it is one.
    """

    __slots__ = ("__weakref__", "bias", "half", "least", "most", "packed", "parts", "weight")

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, pack: Packing = "", parts: Sequence[Tensor] = ()
    ) -> None:
        self.weight, self.bias, self.parts = weight, bias, (*parts, weight)
        self.half = pack == "half" and is_half(weight)  # whether the copy is FBGEMM's
        self.packed: Any = None  # the copy, where there is one
        self.least, self.most = 1, MOST_ROWS_HALF  # rows that go through the copy
        if self.half:
            self.packed = _packed_half(weight, bias)
            _HALVED.add(self)
        elif pack and weight.numel() >= TINY and _works(weight.dtype):
            self.packed = _packed(weight)
            by_size = 1 if weight.numel() >= LARGE or weight.dtype == torch.bfloat16 else LEAST_ROWS
            self.least, self.most = _one_row.get(_key(weight), by_size), MOST_ROWS

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product."""
        if self.packed is None or x.ndim < 2 or not self.least <= x.shape[:-1].numel() <= self.most:
            if x.ndim == 3 and len(x) == 1:  # torch takes a slice of rows for a batch and copies the weight in bfloat16
                return F.linear(x[0], self.weight, self.bias)[None]
            return F.linear(x, self.weight, self.bias)
        if self.half:
            out: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self.packed)
        else:
            out = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out


@torch.inference_mode()
def measure_one_row(products: Iterable[Product]) -> None:
    """Let one row take the copy where this machine multiplies it clearly faster so, and the weight itself elsewhere.

    All products of a shape run one after the other, so that weights come from where they come from in a pass. A
    baseline whose one row is slower than it has to be flatters every method: with AVX-512, without this, a pass of
    SmolLM2 over one row took 1.3 times as long as one over five (docs/log.md). Once measured, a shape keeps its way in
    this process: a changed model and a drafter's layer of the same shapes go the base's.
    """
    shapes: dict[torch.Size, list[Product]] = {}
    for product in products:
        if product.packed is not None and not product.half:
            shapes.setdefault(product.weight.shape, []).append(product)
    for same in shapes.values():
        key = _key(same[0].weight)
        if key not in _one_row:
            _one_row[key] = _faster(same)
        for product in same:
            product.least = _one_row[key]


def _key(weight: Tensor) -> Key:
    return weight.shape, weight.dtype, torch.get_num_threads()


def _faster(same: Sequence[Product]) -> int:
    """Return the fewest rows that products of one shape had better send through the copy: 1 or LEAST_ROWS."""
    usual = same[0].least
    other = LEAST_ROWS if usual == 1 else 1
    seconds: dict[int, list[float]] = {usual: [], other: []}
    for _ in range(TRIES):
        for least, taken in seconds.items():
            taken.append(_seconds(same, least))
    return other if min(seconds[usual]) >= CLEARLY * min(seconds[other]) else usual


def _seconds(same: Sequence[Product], least: int, rows: int = 1) -> float:
    """Return how long rows take through every one of these, the copy serving so many rows and more."""
    for product in same:
        product.least = least
    x = same[0].weight.new_ones(rows, same[0].weight.shape[1])
    start = time.perf_counter()
    for product in same:
        product(x)
    return time.perf_counter() - start


def packing(weight: Tensor, weights_bytes: int, rounded: bool) -> Packing:
    """Return by which second copy products with weights like this one gain, where there is room for one.

    weights_bytes: of all weights of the model. rounded: the model's number format is float16 weights.
    """
    if weight.device.type != "cpu" or weight.dtype not in PACKED or not has_room(weights_bytes):
        return ""
    if rounded and may_halve():
        return "half"
    return "whole" if _works(weight.dtype) and (weight.dtype == torch.float32 or bfloat16_gains()) else ""


def has_room(weights_bytes: int) -> bool:
    """Say whether a second copy of weights of so many bytes leaves the machine plenty of memory."""
    return SHARE * weights_bytes <= _memory()


def bytes_read(weights: Iterable[Tensor]) -> int:
    """Return the bytes that a pass over these weights reads: a product that holds one in float16 reads half of them."""
    held = {part.untyped_storage().data_ptr() for product in _HALVED for part in product.parts}
    return sum(_stored(w, held) for w in weights)


def _stored(weight: Tensor, held: set[int]) -> int:
    """Return the bytes of one weight; of one that is held in fewer bits, those of the tensors that it is made of."""
    if hasattr(weight, "__tensor_flatten__"):
        parts = [getattr(weight, name) for name in weight.__tensor_flatten__()[0]]
        return sum(part.numel() * part.element_size() for part in parts)
    if (state := getattr(weight, "quant_state", None)) is not None:  # bitsandbytes' scales, and theirs
        nested = getattr(state, "state2", None)  # which its first pass on a CPU with bfloat16 resolves, and removes
        scales = [state.absmax, *([nested.absmax] if nested is not None else [])]
        return weight.numel() + sum(int(part.numel()) * int(part.element_size()) for part in scales)
    half = weight.ndim == 2 and weight.untyped_storage().data_ptr() in held
    return weight.numel() * (2 if half else weight.element_size())


def entries(weight: Tensor) -> int:
    """Return how many numbers a weight stands for, which bitsandbytes holds two of in a byte."""
    state = getattr(weight, "quant_state", None)
    return weight.numel() if state is None else int(state.shape.numel())


def is_half(weight: Tensor) -> bool:
    """Say whether every one of these float32 numbers is a float16 number."""
    if weight.dtype != torch.float32 or weight.is_meta:
        return False
    return bool((weight.half().float() == weight).all())


def _packed(weight: Tensor) -> Tensor:
    made: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), HINT)
    return made


def _packed_half(weight: Tensor, bias: Tensor | None) -> Any:
    return torch.ops.quantized.linear_prepack_fp16(weight.detach(), None if bias is None else bias.detach())


def _memory() -> int:
    """Return the bytes of the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@functools.cache
def _works(dtype: torch.dtype) -> bool:
    """Say whether this build of torch has oneDNN's operators, no part of its API, and they give what F.linear gives."""
    if not torch.backends.mkldnn.is_available():
        return False
    return _gives(lambda x, weight: torch.ops.mkldnn._linear_pointwise(x, _packed(weight), None, "none", [], ""), dtype)


@functools.cache
@torch.inference_mode()
def bfloat16_gains() -> bool:
    """Say whether few rows go clearly faster through the copy in bfloat16, as where the processor multiplies it.

    Asked once in a process, with the threads that torch has then.
    """
    weight = torch.full((4096, 4096), 0.01, dtype=torch.bfloat16)  # more than a cache holds
    usual, copied = Product(weight), Product(weight, None, "whole")
    taken: dict[Product, list[float]] = {usual: [], copied: []}
    for _ in range(TRIES):
        for product, seconds in taken.items():
            seconds.append(_seconds([product], 1, HINT))
    return min(taken[usual]) >= CLEARLY * min(taken[copied])


@functools.cache
def may_halve() -> bool:
    """Say whether this build of torch and this processor multiply float32 rows with weights kept in float16."""
    return _gives(lambda x, weight: torch.ops.quantized.linear_dynamic_fp16(x, _packed_half(weight, None)))


def _gives(product: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype = torch.float32) -> bool:
    x, weight = (torch.arange(n * 16, dtype=torch.float32).sin().half().to(dtype).view(n, 16) for n in (2, 24))
    try:
        with torch.inference_mode():
            return bool(torch.allclose(product(x, weight), F.linear(x, weight), atol=OFF.get(dtype, 0.0)))
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
