"""Attention of a few query tokens over many keys: backends for CPUs and grouped heads.

With a mask transformers repeats keys and values for every head of a group. `ar` has no mask and repeats nothing, so
speculation alone paid for the copies. In decoding on a CPU torch's kernel lets the heads of a group share keys by
itself; elsewhere the heads of a group are so many more rows over the same keys. In bfloat16 on a CPU a few rows
attend by the way that is measured to be the fastest one: of two processors with the same instructions one took up to
ten times as long by torch's kernel as by two products, the other a third as long (docs/log.md). On CUDA the way is
fixed: a row without a mask by torch's kernel for grouped heads (flash), few rows with a mask by its kernel on joined
heads, which no copy precedes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import logging

from specbench_ss.engine.kv_cache import RaggedTensor
from specbench_ss.engine.timing import clearly_fastest

AttentionBackend = Callable[[Tensor, Tensor, Tensor, Tensor | None, float | None], Tensor]
FROM = {256: 0, 1024: 512}  # keys of a probe -> from how many keys what is fastest there counts
FEW = 4  # rows that have a mask
ONE, SEVERAL = CASES = ("one row", "few")


def by_kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Torch's kernel, in which the heads of a group share keys."""
    out = F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).contiguous()


def by_kernel_in_float32(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """The same on copies in float32: nothing is rounded between the scores and the result."""
    wide = None if mask is None else mask.float()
    return by_kernel(query.float(), key.float(), value.float(), wide, scale).to(query.dtype)


def by_joined_heads(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Torch's kernel, to which the heads of a group are so many more rows over the same keys. No mask: one row."""
    b, heads, q, d = query.shape
    groups = heads // key.shape[1]
    rows = query.reshape(b, key.shape[1], groups * q, d)
    seen = mask if mask is None or groups == 1 else mask.repeat(1, 1, groups, 1)
    out = F.scaled_dot_product_attention(rows, key, value, seen, scale=scale)
    return out.reshape(b, heads, q, -1).transpose(1, 2).contiguous()


def by_matmul(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Two products of matrices; scores and their softmax are rounded to the format of query."""
    b, heads, q, d = query.shape
    pairs, rows = b * key.shape[1], heads // key.shape[1] * q
    keys, none = key.reshape(pairs, -1, d), query.new_zeros(1, 1, 1)
    scores = torch.baddbmm(none, query.reshape(pairs, rows, d), keys.mT, beta=0, alpha=scale or d**-0.5)
    if mask is not None:
        scores.view(b, -1, q, keys.shape[1]).add_(mask)
    out = torch.bmm(scores.softmax(-1), value.reshape(pairs, keys.shape[1], -1))
    return out.view(b, heads, q, -1).transpose(1, 2).contiguous()


WAYS: dict[str, AttentionBackend] = {
    "torch's kernel": by_kernel,
    "torch's kernel in float32": by_kernel_in_float32,
    "two products": by_matmul,
    "torch's kernel on joined heads": by_joined_heads,
}
KERNEL, IN_FLOAT32, PRODUCTS, JOINED = WAYS


class Heads(NamedTuple):
    """What rows attend with. device: cpu, or a GPU such as cuda:0. d: numbers a head."""

    device: str
    dtype: torch.dtype
    heads: int
    kv_heads: int
    d: int

    @property
    def kind(self) -> str:
        """Return cpu or cuda."""
        return self.device.partition(":")[0]

    @property
    def backends(self) -> tuple[str, ...]:
        """Names of the ways that are measured, the one to beat first; none where torch's own choice is kept."""
        return (KERNEL, IN_FLOAT32, PRODUCTS) if (self.kind, self.dtype) == ("cpu", torch.bfloat16) else ()


@lru_cache(maxsize=256)
def fastest(of: Heads, case: str, count: int, threads: int) -> str:
    """Return the name of the way that takes clearly less time than the first of `of.ways`, or the name of that.

    case: of CASES. count: of keys. threads: of the processor, on which the answer depends.
    """
    rows = FEW if case == SEVERAL else 1
    like = torch.zeros(0, dtype=of.dtype, device=of.device)
    query, keys = like.new_zeros(1, of.heads, rows, of.d), like.new_zeros(1, of.kv_heads, count, of.d)
    mask = None if case == ONE else like.new_zeros(1, 1, rows, count)
    return clearly_fastest({name: partial(WAYS[name], query, keys, keys, mask, None) for name in of.backends})


def backend_of(of: Heads, one_row: bool, masked: bool, keys: int, sequences: int = 1) -> str:
    """Return the name of the way for rows over so many keys of so many sequences, on the threads torch has now."""
    case = ONE if one_row and not masked else SEVERAL
    count = max(length for length in FROM if keys >= FROM[length])
    name = fastest(of, case, count, torch.get_num_threads())
    # many copies in float32 are no longer small; what a slow kernel leaves then are the products
    return PRODUCTS if name == IN_FLOAT32 and sequences > 1 else name


def describe(of: Heads) -> str:
    """Say for the record by which ways rows attend here; '' where nothing is measured.

    Measured now, so that no step has to.
    """
    ways = [
        f"of {case} {name} from {start} keys"
        for case in CASES
        if of.backends
        for start, name in {start: backend_of(of, case == ONE, case != ONE, start) for start in FROM.values()}.items()
    ]
    return f"attention {', '.join(ways)}" if ways else ""


NAME = "ssbench_grouped_sdpa"
NOT_HERE = ("softcap", "s_aux", "position_bias")  # what some layers ask for, and sdpa would leave out in silence
MOST_ROWS = 512  # of more, as in prefilling and training, the repeated mask is the larger copy


def grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """query [B, heads, q, d], key, value [B, kv_heads, n, d], additive mask [1 or B, 1, q, n] -> [B, q, heads, d]."""
    if unknown := [name for name in NOT_HERE if kwargs.get(name) is not None]:
        raise NotImplementedError(f"attention with {', '.join(unknown)}")
    if isinstance(key, RaggedTensor):  # of several requests, each of which sees its own

        def one(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
            return grouped_attention(module, query, key, value, mask, **kwargs)[0]

        return key.attended(one, query, cast("RaggedTensor", value), attention_mask), None
    b, heads, q, d = query.shape
    kv_heads, few, scale = key.shape[1], _few(query, attention_mask), kwargs.get("scaling")
    inferred = torch.is_inference_mode_enabled() and not module.training
    of = Heads(str(query.device), query.dtype, heads, kv_heads, d)
    adds = attention_mask is None or attention_mask.dtype == query.dtype  # of bool, True is what is seen
    if few and inferred and adds and of.backends:
        way = WAYS[backend_of(of, q == 1, attention_mask is not None, key.shape[2], b)]
        return way(query, key, value, attention_mask, scale), None
    if attention_mask is None or not few or heads == kv_heads or module.training:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    by = by_kernel if inferred and query.device.type == "cpu" else by_joined_heads
    return by(query, key, value, attention_mask, scale), None


def _few(query: Tensor, mask: Tensor | None) -> bool:
    """Say whether these are few rows with one mask for all heads. Without a mask one row may, which sees all."""
    if mask is None:
        return query.shape[2] == 1
    return query.shape[2] <= MOST_ROWS and mask.shape[1] == 1


@contextmanager
def without_warnings() -> Iterator[None]:
    """Within: transformers says nothing but errors."""
    told = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(told)


def set_attention(model: Any, name: str) -> bool:
    """Have the model compute attention so, and say whether it does; some compute it in one way alone."""
    if model.config._attn_implementation != name:
        try:
            with without_warnings():
                model.set_attn_implementation(name)
        except (ValueError, ImportError):
            return False
    return bool(model.config._attn_implementation == name)


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
