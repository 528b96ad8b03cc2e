"""Attention of a few rows in bfloat16 on a CPU, by the fastest of three ways, as measured once in a process.

A CPU may multiply matrices fast in bfloat16 and yet have a slow kernel of attention: of one row without a mask, torch's
took up to ten times what two products take (docs/log.md).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor

    # query [B, heads, q, d], key, value [B, kv_heads, n, d], additive mask [1 or B, 1, q, n], scale
    # -> [B, q, heads, d]
    Way = Callable[[Tensor, Tensor, Tensor, Tensor | None, float | None], Tensor]

TRIES, CLEARLY = 7, 1.25  # how often each is measured; times as fast as the kernel another has to be
SHORT, LONG, FEW = 256, 1024, 4  # of the probe: keys of either length, and rows that have a mask
FROM = 512  # keys from where what is faster over the longer ones counts


def by_kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Torch's kernel, in which the heads of a group share keys."""
    out = F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).contiguous()


def by_kernel_in_float32(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """The same on copies in float32: nothing is rounded between the scores and the result."""
    wide = None if mask is None else mask.float()
    return by_kernel(query.float(), key.float(), value.float(), wide, scale).to(query.dtype)


def by_products(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Two products of matrices; scores and their softmax are rounded to the format of query."""
    b, heads, q, d = query.shape
    pairs, rows = b * key.shape[1], heads // key.shape[1] * q
    keys, none = key.reshape(pairs, -1, d), query.new_zeros(1, 1, 1)
    scores = torch.baddbmm(none, query.reshape(pairs, rows, d), keys.mT, beta=0, alpha=scale or d**-0.5)
    if mask is not None:
        scores.view(b, -1, q, keys.shape[1]).add_(mask)
    out = torch.bmm(scores.softmax(-1), value.reshape(pairs, keys.shape[1], -1))
    return out.view(b, heads, q, -1).transpose(1, 2).contiguous()


WAYS: dict[str, Way] = {
    "torch's kernel": by_kernel,
    "torch's kernel in float32": by_kernel_in_float32,
    "two products": by_products,
}
KERNEL, _, PRODUCTS = WAYS


@lru_cache(maxsize=16)
def fastest(one_row: bool, long: bool, threads: int) -> str:
    """Return the name of the way that takes clearly less time than torch's kernel, or that of the kernel.

    one_row: without a mask, as in plain decoding; else a few rows with one. long: over how many keys.
    """
    rows, count = 1 if one_row else FEW, LONG if long else SHORT
    query, keys = torch.zeros(1, 8, rows, 64, dtype=torch.bfloat16), torch.zeros(1, 4, count, 64, dtype=torch.bfloat16)
    mask = None if one_row else torch.zeros(1, 1, rows, count, dtype=torch.bfloat16)
    taken = dict.fromkeys(WAYS, math.inf)
    for _ in range(TRIES):
        for name, way in WAYS.items():
            begun = time.perf_counter()
            way(query, keys, keys, mask, None)
            taken[name] = min(taken[name], time.perf_counter() - begun)
    best = min(taken, key=lambda name: taken[name])
    return best if taken[KERNEL] >= CLEARLY * taken[best] else KERNEL


def way_of(one_row: bool, keys: int, sequences: int = 1) -> str:
    """Return the name of the way for rows over so many keys of so many sequences, on the threads torch has now."""
    name = fastest(one_row, keys >= FROM, torch.get_num_threads())
    # many copies in float32 are no longer small; what a slow kernel leaves then are the products
    return name if sequences == 1 or name == KERNEL else PRODUCTS


def in_words() -> str:
    """Say for the record by which ways rows attend here. Measured now, so that no step has to."""
    of = [f"of {name} by {_by_length(one_row)}" for name, one_row in (("one row", True), ("few", False))]
    return f"attention {', '.join(of)}"


def _by_length(one_row: bool) -> str:
    short, long = way_of(one_row, SHORT), way_of(one_row, LONG)
    return short if short == long else f"{short} ({long} from {FROM} keys)"
