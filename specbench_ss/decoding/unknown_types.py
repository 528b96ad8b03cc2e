"""What a configuration tells of an architecture that is not known by name: whether it can be driven at all.

Verification takes refused tokens back, and hides tokens of other branches of a tree. Both need a cache of keys and
values and attention with a mask; a recurrent state has neither.
"""

from __future__ import annotations

from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from specbench_ss.errors import UserError

KINDS_OF_LAYERS = {"full_attention", "sliding_attention"}


def cannot_be_used(config: Any, why: str) -> UserError:
    """The refusal of an architecture, with the reason."""
    return UserError(f"model type {config.model_type!r} cannot be used: {why}")


def check_unknown(config: Any) -> None:
    """Raises UserError, with the reason, for a model that is no decoder of attention layers with a cache."""
    if problem := _problem(config):
        raise cannot_be_used(config, problem)


def _problem(config: Any) -> str:
    if getattr(config, "is_encoder_decoder", False):
        return "it has an encoder; targets are models with a decoder alone"
    if _keeps_a_state(config):
        return "it is recurrent, in all layers or some: its state cannot take back a refused token"
    if others := sorted(set(getattr(config, "layer_types", None) or ()) - KINDS_OF_LAYERS):
        return f"it has layers of the kind {others[0]}; those of full_attention and sliding_attention can be driven"
    if getattr(config, "attention_chunk_size", None):
        return "its attention is cut into chunks, which no sliding window describes"
    if lacking := [name for name in ("num_hidden_layers", "hidden_size", "vocab_size") if not hasattr(config, name)]:
        return f"its configuration states no {lacking[0]}: it is more, or something else, than a language model"
    return ""


def _keeps_a_state(config: Any) -> bool:
    """Whether transformers says so of the class that loads it."""
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return bool(getattr(kind, "_is_stateful", False))
