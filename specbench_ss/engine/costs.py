"""Shapes of a pass and a method's extra FLOPs, for counting what steps cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specbench_ss.engine.cpu_kernels import bytes_read, entries
from specbench_ss.engine.target import Target


def model_shape(target: Target) -> dict[str, Any]:
    """Return the shape of one forward pass, as JSON-ready data.

    weight_bytes: all weights but those of tables that are only looked up. matrix_parameters: entries of the matrices
    that each row is multiplied by, the LM head included. kv_bytes: keys and values that each layer keeps of a token.
    attention_flops: of one row with one token of the context, in each layer. windows: how far back each layer sees,
    None for all. Where a router chooses experts, what a pass reads depends on its rows: the first two are None.
    """
    weights = read_by_a_pass(target.model)
    whole = not _chooses_experts(target)
    kv_bytes, attention_flops = _by_config(target) if target.has_layer_access else _by_a_pass(target)
    return {
        "weight_bytes": bytes_read(weights) if whole else None,
        "matrix_parameters": sum(entries(w) for w in weights if w.ndim == 2) if whole else None,
        "kv_bytes": kv_bytes,
        "attention_flops": attention_flops,
        "windows": list(target.windows),
    }


def _chooses_experts(target: Target) -> bool:
    """Whether rows go through some of several MLPs."""
    return bool(getattr(target.config, "num_experts_per_tok", None)) or any(
        w.ndim > 2 for w in target.model.parameters()
    )


def _by_config(target: Target) -> tuple[int, int]:
    """Bytes that each layer keeps of a token; operations of one row of attention with one token."""
    heads, kv_heads, head_dim = target.attention_heads
    return 2 * kv_heads * head_dim * target.dtype.itemsize, 4 * heads * head_dim


def _by_a_pass(target: Target) -> tuple[float, float]:
    """The same, means over layers, seen in what a pass over one token leaves in the cache."""
    cache = target.new_cache(1)
    target.next_logits([0], cache)
    keys = [t for t in cache.keys if t is not None]
    values = [t for t in cache.values if t is not None]
    kept = sum(t.numel() * t.element_size() for t in (*keys, *values))
    widths = sum(t.shape[3] for t in (*keys, *values))
    return kept / len(keys), 2 * target.config.num_attention_heads * widths / len(keys)


def drafter_shape(weights: Iterable[Tensor] | None, target: Target) -> dict[str, Any] | None:
    """Return bytes and matrix parameters of what `Decoder.drafter_weights` states; None where it states nothing.

    What a drafter shares with the target, such as the LM head, is no part of them.
    """
    if weights is None:
        return None
    targets = {w.data_ptr() for w in target.model.parameters()}
    own = [w for w in {w.data_ptr(): w for w in weights}.values() if w.data_ptr() not in targets]
    return {
        "weight_bytes": bytes_read(own),
        "matrix_parameters": sum(w.numel() for w in own if w.ndim == 2),
    }


def read_by_a_pass(module: torch.nn.Module) -> list[Tensor]:
    """Return the module's parameters, each once, without those of tables that are only looked up."""
    looked_up = {id(m.weight) for m in module.modules() if isinstance(m, torch.nn.Embedding)}
    multiplied = {
        id(m.weight) for m in module.modules() if isinstance(m, torch.nn.Linear)
    }  # an LM head may be tied to one
    return [w for w in module.parameters() if id(w) not in looked_up - multiplied]


@dataclass(frozen=True, slots=True)
class ExtraWork:
    """Entries of matrices that rows of the method's own are multiplied by in the pass that verifies.

    What drafting computes is left out, the LM head above all, which most drafters use again: it is counted of none.
    step: in each step, whatever it verifies. node: for each row that reaches the last layer, the root's included.
    dropped: for each drafted node that does not reach it, in the layers below.
    """

    step: float = 0.0
    node: float = 0.0
    dropped: float = 0.0

    def as_dict(self) -> dict[str, float]:
        """Return JSON-ready data."""
        return {"step": self.step, "node": self.node, "dropped": self.dropped}


def of_attention(target: Target, layers: slice = slice(None)) -> int:
    """Return the entries of the attention matrices of these layers of a model that is taken apart."""
    blocks = target.family.blocks[layers]
    return sum(entries(w) for block in blocks for w in block.attention.parameters() if w.ndim == 2)


def of_layers(target: Target, layers: slice = slice(None)) -> int:
    """Return the entries of all matrices of these layers, which are alike."""
    every = sum(entries(w) for w in read_by_a_pass(target.model) if w.ndim == 2) - of_head(target)
    return every * len(range(target.n_layers)[layers]) // target.n_layers


def of_head(target: Target) -> int:
    """Return the entries of the LM head."""
    return entries(target.family.head.weight)
