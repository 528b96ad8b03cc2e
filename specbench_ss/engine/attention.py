"""Attention of a few query tokens over many keys: backends for CPUs and grouped heads.

With a mask, transformers repeats keys and values for every head of a group. `ar` has no mask and repeats nothing, so
speculation alone would pay for the copies. On a CPU torch's kernel lets the heads of a group share keys in decoding;
elsewhere the heads of a group become further query rows over the same keys. In bfloat16 on a CPU the fastest measured
backend is used: of two processors with the same instructions, one took up to ten times as long by torch's kernel as by
two matmuls, the other a third as long (docs/log.md). On CUDA the backend is fixed: torch's kernel for grouped heads
(flash) for one row without a mask, its kernel on joined heads for few rows with a mask, which needs no copy.
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
PROBE_KEYS = {256: 0, 1024: 512}  # keys of a measurement -> number of keys from which its result applies
PROBE_ROWS = 4  # with a mask
PROBE_SEQUENCES = 8  # of a measurement that applies to any number from two on
ONE, SEVERAL = CASES = ("one row", "few")


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


BACKENDS: dict[str, AttentionBackend] = {
    "torch's kernel": by_kernel,
    "torch's kernel in float32": by_kernel_in_float32,
    "two products": by_matmul,
    "torch's kernel on joined heads": by_joined_heads,
}
KERNEL, IN_FLOAT32, PRODUCTS, JOINED = BACKENDS


class Heads(NamedTuple):
    """Attention heads of a layer. device: cpu, or a GPU such as cuda:0. d: head dimension."""

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
        """Return the names of the backends to measure, the default first; () to keep torch's choice."""
        return (KERNEL, IN_FLOAT32, PRODUCTS) if (self.kind, self.dtype) == ("cpu", torch.bfloat16) else ()


@lru_cache(maxsize=256)
def fastest(heads: Heads, case: str, count: int, threads: int, sequences: int) -> str:
    """Return the name of the clearly fastest of `heads.backends`, else of the first.

    Float32 copies of several sequences are not measured, since the time of large copies varies most.

    case: of CASES. count: number of keys. threads: of the processor, a key of the cache. sequences: in the batch.
    """
    rows = PROBE_ROWS if case == SEVERAL else 1
    like = torch.zeros(0, dtype=heads.dtype, device=heads.device)
    query = like.new_zeros(sequences, heads.heads, rows, heads.d)
    keys = like.new_zeros(sequences, heads.kv_heads, count, heads.d)
    mask = None if case == ONE else like.new_zeros(sequences, 1, rows, count)
    names = [name for name in heads.backends if sequences == 1 or name != IN_FLOAT32]
    return clearly_fastest({name: partial(BACKENDS[name], query, keys, keys, mask, None) for name in names})


def backend_of(heads: Heads, one_row: bool, masked: bool, keys: int, sequences: int = 1) -> str:
    """Return the backend's name for this number of keys and sequences, at torch's current number of threads."""
    case = ONE if one_row and not masked else SEVERAL
    count = max(length for length in PROBE_KEYS if keys >= PROBE_KEYS[length])
    return fastest(heads, case, count, torch.get_num_threads(), PROBE_SEQUENCES if sequences > 1 else 1)


def describe(heads: Heads) -> str:
    """Return a description of the measured backends; '' if none are measured.

    Measures now for one sequence, so that no step has to. Batches of sequences, which only own answers are made in,
    measure in their first pass.
    """
    lines = [
        f"of {case} {name} from {start} keys"
        for case in CASES
        if heads.backends
        for start, name in {
            start: backend_of(heads, case == ONE, case != ONE, start) for start in PROBE_KEYS.values()
        }.items()
    ]
    return f"attention {', '.join(lines)}" if lines else ""


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
    b, heads, q, d = query.shape
    kv_heads, few_rows, scale = key.shape[1], _few_rows_one_mask(query, attention_mask), kwargs.get("scaling")
    inference = torch.is_inference_mode_enabled() and not module.training
    shape = Heads(str(query.device), query.dtype, heads, kv_heads, d)
    additive = attention_mask is None or attention_mask.dtype == query.dtype  # in a bool mask True is visible
    small = b == 1 or b * heads * q * key.shape[2] <= MAX_SCORES
    if few_rows and small and inference and additive and shape.backends:
        backend = BACKENDS[backend_of(shape, q == 1, attention_mask is not None, key.shape[2], b)]
        return backend(query, key, value, attention_mask, scale), None
    if attention_mask is None or not few_rows or heads == kv_heads or module.training:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    kernel = by_kernel if inference and query.device.type == "cpu" else by_joined_heads
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
