"""What configurations of published drafters say of their decoder layers, in the terms of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig, Qwen3Config

from specbench_ss.errors import UserError, first_line
from specbench_ss.methods._shared.rotary import Rotary, check_rope

if TYPE_CHECKING:
    from specbench_ss.decoding.outline import Outline

SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings", "attention_bias",
    "rope_parameters",
)  # fmt: skip


def described_layers(given: dict[str, Any] | None, family: str) -> PretrainedConfig:
    """The draft layers' configuration, with its model type's own defaults for what is not stated.

    family: whose layers they are, for the message. Raises UserError where they are not of this form.
    """
    known = {k: v for k, v in (given or {}).items() if k not in ("architectures", "auto_map", "model_type")}
    kind = (given or {}).get("model_type") or "qwen3"
    if kind not in CONFIG_MAPPING:
        raise UserError(f"config.json speaks of layers of the type {kind!r}, which is not known")
    try:
        layer = AutoConfig.for_model(kind, **known)
        check_rope(layer)
        sizes = Qwen3Config(**sizes_of(layer))
        with torch.device("cpu"):  # a method's `check` makes everything else without numbers
            Rotary(sizes, torch.device("cpu"))
    except Exception as error:  # of many kinds: whatever transformers finds wrong
        raise UserError(f"config.json does not describe layers as {family} has them: {first_line(error)}") from None
    return layer


def sizes_of(layer: PretrainedConfig) -> dict[str, Any]:
    """What a layer's configuration says of sizes. Sliding windows are not among them: drafters mask by themselves."""
    return {name: getattr(layer, name) for name in SIZES}


def proposals(algorithm: str, tokens: int, base: Outline) -> dict[str, Any]:
    """`speculators_config` of a drafter of so many tokens a step."""
    return {
        "algorithm": algorithm,
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": base.name, "architectures": getattr(base.config, "architectures", None) or []},
    }
