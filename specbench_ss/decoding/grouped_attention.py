"""Attention of a few rows over many keys where query heads share keys: transformers' sdpa without its copies.

With a mask transformers repeats keys and values for every head of a group. `ar` has no mask and repeats nothing, so
speculation alone paid for the copies. In decoding on a CPU torch's kernel lets the heads of a group share keys by
itself; elsewhere the heads of a group are so many more rows over the same keys. In bfloat16 a CPU may have fast
products of matrices and a slow kernel of attention: where that is measured, a few rows attend by two products
(docs/log.md).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import logging

from specbench_ss.decoding.parts import Parts

NAME = "ssbench_grouped_sdpa"
NOT_HERE = (
    "softcap",
    "s_aux",
    "position_bias",
)  # what some layers ask of attention, and sdpa would leave out in silence
TRIES, CLEARLY = 7, 1.25
MOST_ROWS = 512  # of more, as in prefilling and training, the repeated mask is the larger copy


def grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """query [B, heads, q, d], key, value [B, kv_heads, n, d], additive mask [1 or B, 1, q, n] -> [B, q, heads, d]."""
    if unknown := [name for name in NOT_HERE if kwargs.get(name) is not None]:
        raise NotImplementedError(f"attention with {', '.join(unknown)}")
    if isinstance(key, Parts):  # of several requests, each of which sees its own

        def one(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
            return grouped_attention(module, query, key, value, mask, **kwargs)[0]

        return key.attended(one, query, cast("Parts", value), attention_mask), None
    b, heads, q, d = query.shape
    if query.dtype == torch.bfloat16 and _by_products(module, query, attention_mask):
        return two_products(query, key, value, attention_mask, kwargs.get("scaling")), None
    groups = heads // key.shape[1]
    few = attention_mask is not None and groups > 1 and q <= MOST_ROWS and attention_mask.shape[1] == 1
    if attention_mask is None or not few or module.training:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if query.device.type == "cpu" and torch.is_inference_mode_enabled():
        scale = kwargs.get("scaling")
        out = F.scaled_dot_product_attention(query, key, value, attention_mask, scale=scale, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None
    rows = query.reshape(b, key.shape[1], groups * q, d)
    mask = attention_mask.repeat(1, 1, groups, 1)
    out = F.scaled_dot_product_attention(rows, key, value, mask, scale=kwargs.get("scaling"))
    return out.reshape(b, heads, q, -1).transpose(1, 2).contiguous(), None


def _by_products(module: nn.Module, query: Tensor, mask: Tensor | None) -> bool:
    """Say whether attention in bfloat16 goes by two products. Without a mask one row may, which sees all."""
    rows = query.shape[2]
    if query.device.type != "cpu" or module.training or not torch.is_inference_mode_enabled():
        return False
    if mask is not None and (mask.dtype != query.dtype or mask.shape[1] != 1):  # of bool, True is what is seen
        return False
    return rows <= (1 if mask is None else MOST_ROWS) and products_are_faster(torch.get_num_threads())


@lru_cache(maxsize=8)
def products_are_faster(threads: int) -> bool:
    """Say whether two products take clearly less time here than torch's kernel does, as measured once in a process."""
    query, keys = torch.zeros(1, 8, 4, 64, dtype=torch.bfloat16), torch.zeros(1, 4, 256, 64, dtype=torch.bfloat16)
    mask, taken = torch.zeros(1, 1, 4, 256, dtype=torch.bfloat16), dict.fromkeys(("kernel", "products"), math.inf)
    for _ in range(TRIES):
        begun = time.perf_counter()
        F.scaled_dot_product_attention(query, keys, keys, mask, enable_gqa=True)
        between = time.perf_counter()
        two_products(query, keys, keys, mask, None)
        times = {"kernel": between - begun, "products": time.perf_counter() - between}
        taken = {name: min(best, times[name]) for name, best in taken.items()}
    return taken["kernel"] >= CLEARLY * taken["products"]


def two_products(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Shapes as in `grouped_attention`. Scores and their softmax are rounded to the format of query."""
    b, heads, q, d = query.shape
    pairs, rows = b * key.shape[1], heads // key.shape[1] * q
    keys, none = key.reshape(pairs, -1, d), query.new_zeros(1, 1, 1)
    scores = torch.baddbmm(none, query.reshape(pairs, rows, d), keys.mT, beta=0, alpha=scale or d**-0.5)
    if mask is not None:
        scores.view(b, -1, q, keys.shape[1]).add_(mask)  # mask: [1 or B, 1, q, n]
    out = torch.bmm(scores.softmax(-1), value.reshape(pairs, keys.shape[1], -1))
    return out.view(b, heads, q, -1).transpose(1, 2).contiguous()


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
