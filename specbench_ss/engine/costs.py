"""Shapes of a pass and a method's extra work, for cost models of steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specbench_ss.engine.layers.linear import bytes_read
from specbench_ss.engine.target import Target
from specbench_ss.engine.weights import entries


def model_shape(target: Target) -> dict[str, Any]:
    """Return the shape of one forward pass, JSON-ready.

    weight_bytes: all weights except tables that are only looked up. matrix_parameters: elements of the matrices of one
    token's pass, with the LM head. kv_bytes: KV cache bytes per token and layer. attention_flops: of one query token
    and one key, per layer. windows: sliding window of each layer, or None. With mixture-of-experts layers the reads
    depend on the tokens: the first two are None.
    """
    weights = read_by_a_pass(target.model)
    dense = not _has_experts(target)
    kv_bytes, attention_flops = _kv_from_config(target) if target.has_layer_access else _kv_from_pass(target)
    return {
        "weight_bytes": bytes_read(weights) if dense else None,
        "matrix_parameters": sum(entries(w) for w in weights if w.ndim == 2) if dense else None,
        "kv_bytes": kv_bytes,
        "attention_flops": attention_flops,
        "windows": list(target.windows),
    }


def _has_experts(target: Target) -> bool:
    """Return True for mixture-of-experts models."""
    return bool(getattr(target.config, "num_experts_per_tok", None)) or any(
        w.ndim > 2 for w in target.model.parameters()
    )


def _kv_from_config(target: Target) -> tuple[int, int]:
    """Return the KV bytes per token and layer, and the attention FLOPs of one query token and one key."""
    heads, kv_heads, head_dim = target.attention_heads
    return 2 * kv_heads * head_dim * target.dtype.itemsize, 4 * heads * head_dim


def _kv_from_pass(target: Target) -> tuple[float, float]:
    """Return the same as means over layers, from the KV cache after a pass over one token."""
    cache = target.new_cache(1)
    target.next_logits([0], cache)
    keys = [t for t in cache.keys if t is not None]
    values = [t for t in cache.values if t is not None]
    kv_bytes = sum(t.numel() * t.element_size() for t in (*keys, *values))
    widths = sum(t.shape[3] for t in (*keys, *values))
    return kv_bytes / len(keys), 2 * target.config.num_attention_heads * widths / len(keys)


def drafter_shape(weights: Iterable[Tensor] | None, target: Target) -> dict[str, Any] | None:
    """Return bytes and matrix elements of `Decoder.drafter_weights`, or None if those are unknown.

    The target's embedding and LM head, which many drafters use too, are not counted.
    """
    if weights is None:
        return None
    ends = (target.model.get_input_embeddings(), target.model.get_output_embeddings())
    shared = {w.data_ptr() for part in ends if part is not None for w in part.parameters()}
    drafter = [w for w in {w.data_ptr(): w for w in weights}.values() if w.data_ptr() not in shared]
    return {
        "weight_bytes": bytes_read(drafter),
        "matrix_parameters": sum(w.numel() for w in drafter if w.ndim == 2),
    }


def read_by_a_pass(module: torch.nn.Module) -> list[Tensor]:
    """Return the module's parameters, each once, without tables that are only looked up."""
    looked_up = {id(m.weight) for m in module.modules() if isinstance(m, torch.nn.Embedding)}
    multiplied = {id(m.weight) for m in module.modules() if isinstance(m, torch.nn.Linear)}  # may be tied to a table
    return [w for w in module.parameters() if id(w) not in looked_up - multiplied]


@dataclass(frozen=True, slots=True)
class ExtraWork:
    """Weight elements multiplied per extra row in the verification pass, beyond the draft nodes.

    Drafting is not included, in particular not the LM head, which most drafters reuse.
    step: per step. node: per row that reaches the last layer, with the root. dropped: per pruned node, in the layers
    below.
    """

    step: float = 0.0
    node: float = 0.0
    dropped: float = 0.0

    def as_dict(self) -> dict[str, float]:
        """Return JSON-ready data."""
        return {"step": self.step, "node": self.node, "dropped": self.dropped}


def of_attention(target: Target, layers: slice = slice(None)) -> int:
    """Return the elements of the attention matrices of these layers; needs layer access."""
    blocks = target.family.blocks[layers]
    return sum(entries(w) for block in blocks for w in block.attention.parameters() if w.ndim == 2)


def of_layers(target: Target, layers: slice = slice(None)) -> int:
    """Return the elements of all matrices of these layers (all layers are alike)."""
    total = sum(entries(w) for w in read_by_a_pass(target.model) if w.ndim == 2) - of_head(target)
    return total * len(range(target.n_layers)[layers]) // target.n_layers


def of_head(target: Target) -> int:
    """Return the elements of the LM head."""
    return entries(target.family.head.weight)
