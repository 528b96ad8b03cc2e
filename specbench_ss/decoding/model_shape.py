"""What a pass of a model reads and computes, by the shapes of its weights, for counting costs when results are read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from specbench_ss.decoding.target import Target


def model_shape(target: Target) -> dict[str, Any]:
    """Return the shape of one forward pass, as JSON-ready data.

    weight_bytes: all weights but those of tables that are only looked up. matrix_parameters: entries of the matrices
    that each row is multiplied by, the LM head included. kv_bytes: keys and values that each layer keeps of a token.
    attention_flops: of one row with one token of the context, in each layer. windows: how far back each layer sees,
    None for all.
    """
    weights = read_by_a_pass(target.model)
    heads = target.config.num_attention_heads
    head_dim = getattr(target.config, "head_dim", None) or target.hidden_size // heads
    kv_heads = getattr(target.config, "num_key_value_heads", None) or heads
    return {
        "weight_bytes": sum(w.numel() * w.element_size() for w in weights),
        "matrix_parameters": sum(w.numel() for w in weights if w.ndim == 2),
        "kv_bytes": 2 * kv_heads * head_dim * target.dtype.itemsize,
        "attention_flops": 4 * heads * head_dim,
        "windows": list(target.windows),
    }


def drafter_shape(weights: Iterable[Tensor] | None, target: Target) -> dict[str, Any] | None:
    """Return bytes and matrix parameters of what `Decoder.drafter_weights` states; None where it states nothing.

    What a drafter shares with the target, such as the LM head, is no part of them.
    """
    if weights is None:
        return None
    targets = {w.data_ptr() for w in target.model.parameters()}
    own = [w for w in {w.data_ptr(): w for w in weights}.values() if w.data_ptr() not in targets]
    return {
        "weight_bytes": sum(w.numel() * w.element_size() for w in own),
        "matrix_parameters": sum(w.numel() for w in own if w.ndim == 2),
    }


def read_by_a_pass(module: torch.nn.Module) -> list[Tensor]:
    """Return the module's parameters, each once, without those of tables that are only looked up."""
    looked_up = {id(m.weight) for m in module.modules() if isinstance(m, torch.nn.Embedding)}
    multiplied = {
        id(m.weight) for m in module.modules() if isinstance(m, torch.nn.Linear)
    }  # an LM head may be tied to one
    return [w for w in module.parameters() if id(w) not in looked_up - multiplied]
