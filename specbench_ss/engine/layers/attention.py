"""Attention of a few query tokens over many keys, where no kernel runs the whole layer.

With a mask, transformers repeats keys and values for every head of a group. `ar` has no mask and repeats nothing, so
speculation alone would pay for the copies. On a CPU torch's kernel lets the heads of a group share keys in decoding;
elsewhere the heads of a group become further query rows over the same keys. In bfloat16 torch's kernel takes up to ten
times as long as two matmuls on some CPUs (docs/log.md): one sequence is computed in float32, several by matmuls. On
CUDA torch's kernel for grouped heads (flash) serves one row without a mask, its kernel on joined heads few rows with a
mask, which needs no copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import logging

from specbench_ss.engine.kv_cache import RaggedTensor


def by_kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Use torch's kernel, in which the heads of a group share keys."""
    out = F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).contiguous()


def by_kernel_in_float32(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Use torch's kernel on float32 copies, so that nothing is rounded between scores and result."""
    wide = None if mask is None else mask.float()
    return by_kernel(query.float(), key.float(), value.float(), wide, scale).to(query.dtype)


def by_joined_heads(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Use torch's kernel with the heads of a group as further rows over the same keys. Without a mask: one row."""
    b, heads, q, d = query.shape
    groups = heads // key.shape[1]
    rows = query.reshape(b, key.shape[1], groups * q, d)
    repeated = mask if mask is None or groups == 1 else mask.repeat(1, 1, groups, 1)
    out = F.scaled_dot_product_attention(rows, key, value, repeated, scale=scale)
    return out.reshape(b, heads, q, -1).transpose(1, 2).contiguous()


def by_matmul(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Use two matmuls; scores and their softmax are rounded to the dtype of query."""
    b, heads, q, d = query.shape
    pairs, rows = b * key.shape[1], heads // key.shape[1] * q
    keys, none = key.reshape(pairs, -1, d), query.new_zeros(1, 1, 1)
    scores = torch.baddbmm(none, query.reshape(pairs, rows, d), keys.mT, beta=0, alpha=scale or d**-0.5)
    if mask is not None:
        scores.view(b, -1, q, keys.shape[1]).add_(mask)
    out = torch.bmm(scores.softmax(-1), value.reshape(pairs, keys.shape[1], -1))
    return out.view(b, heads, q, -1).transpose(1, 2).contiguous()


NAME = "ssbench_grouped_sdpa"
UNSUPPORTED = ("softcap", "s_aux", "position_bias")  # arguments of some layers that sdpa would silently ignore
MAX_ROWS = 512  # with more, as in prefill and training, joined heads would make the larger copy
MAX_SCORES = 1 << 24  # of a batch, which two matmuls keep in memory twice


def grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend: query [B, heads, q, d], key, value [B, kv_heads, n, d], mask [1 or B, 1, q, n] -> [B, q, heads, d]."""
    if unknown := [name for name in UNSUPPORTED if kwargs.get(name) is not None]:
        raise NotImplementedError(f"attention with {', '.join(unknown)}")
    if isinstance(key, RaggedTensor):  # several requests: each one attends to its own keys

        def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
            return grouped_attention(module, query, key, value, mask, **kwargs)[0]

        return key.attend(attend, query, cast("RaggedTensor", value), attention_mask), None
    b, heads, q, _ = query.shape
    few_rows, scale = _few_rows_one_mask(query, attention_mask), kwargs.get("scaling")
    on_cpu = query.device.type == "cpu" and torch.is_inference_mode_enabled() and not module.training
    if few_rows and on_cpu and query.dtype == torch.bfloat16:
        additive = attention_mask is None or attention_mask.dtype == query.dtype  # in a bool mask True is visible
        if b == 1 and additive:
            return by_kernel_in_float32(query, key, value, attention_mask, scale), None
        if additive and b * heads * q * key.shape[2] <= MAX_SCORES:
            return by_matmul(query, key, value, attention_mask, scale), None
    if attention_mask is None or not few_rows or heads == key.shape[1] or module.training:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    kernel = by_kernel if on_cpu else by_joined_heads
    return kernel(query, key, value, attention_mask, scale), None


def _few_rows_one_mask(query: Tensor, mask: Tensor | None) -> bool:
    """Return True for few rows with one mask for all heads, or one row without a mask."""
    if mask is None:
        return query.shape[2] == 1
    return query.shape[2] <= MAX_ROWS and mask.shape[1] == 1


@contextmanager
def without_warnings() -> Iterator[None]:
    """Limit the log of transformers to errors within the block."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def set_attention(model: Any, name: str) -> bool:
    """Set the model's attention implementation; return False if the model does not support it."""
    if model.config._attn_implementation != name:
        try:
            with without_warnings():
                model.set_attn_implementation(name)
        except (ValueError, ImportError):
            return False
    return bool(model.config._attn_implementation == name)


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
