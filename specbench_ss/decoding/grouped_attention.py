"""Attention of a few rows over many keys where query heads share keys: transformers' sdpa without its copies.

With a mask transformers repeats keys and values for every head of a group. `ar` has no mask and repeats nothing, so
speculation alone paid for the copies. In decoding on a CPU torch's kernel lets the heads of a group share keys by
itself; elsewhere the heads of a group are so many more rows over the same keys. In bfloat16 on a CPU a few rows attend
by the way that is measured to be the fastest one (`attention_ways`). On CUDA the way is fixed: a row without a mask by
torch's kernel for grouped heads (flash), few rows with a mask by its kernel on joined heads, which no copy precedes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import logging

from specbench_ss.decoding import attention_ways
from specbench_ss.decoding.attention_ways import Heads
from specbench_ss.decoding.parts import Parts

NAME = "ssbench_grouped_sdpa"
NOT_HERE = (
    "softcap",
    "s_aux",
    "position_bias",
)  # what some layers ask of attention, and sdpa would leave out in silence
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
    kv_heads, few, scale = key.shape[1], _few(query, attention_mask), kwargs.get("scaling")
    inferred = torch.is_inference_mode_enabled() and not module.training
    of = Heads(str(query.device), query.dtype, heads, kv_heads, d)
    adds = attention_mask is None or attention_mask.dtype == query.dtype  # of bool, True is what is seen
    if few and inferred and adds and of.ways:
        way = attention_ways.WAYS[attention_ways.way_of(of, q == 1, attention_mask is not None, key.shape[2], b)]
        return way(query, key, value, attention_mask, scale), None
    if attention_mask is None or not few or heads == kv_heads or module.training:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    by = attention_ways.by_kernel if inferred and query.device.type == "cpu" else attention_ways.by_joined_heads
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
