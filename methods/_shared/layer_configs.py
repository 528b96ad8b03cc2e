"""What configurations of published drafters say of their decoder layers, in the terms of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig, Qwen3Config

from specbench_ss.errors import UserError, first_line
from specbench_ss.methods._shared.rotary import Rotary, check_rope

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from specbench_ss.decoding.outline import Outline

HUB = "https://huggingface.co/"
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings", "attention_bias",
    "rope_parameters",
)  # fmt: skip


def described_layers(given: Any, family: str) -> PretrainedConfig:
    """The draft layers' configuration, with its model type's own defaults for what is not stated.

    given: what config.json says of them, as it was read. family: whose layers they are, for the message. Raises
    UserError where they are not of this form.
    """
    given = given if isinstance(given, dict) else {}
    known = {k: v for k, v in given.items() if k not in ("architectures", "auto_map", "model_type")}
    kind = given.get("model_type") or "qwen3"
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
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


def sliding_layers(layer: PretrainedConfig) -> list[bool]:
    """Which of its layers have a sliding window. Raises UserError for layers of other kinds, or not a kind for each."""
    kinds = getattr(layer, "layer_types", None) or ["full_attention"] * layer.num_hidden_layers
    if other := [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]:
        raise UserError(f"config.json asks for {other[0]!r}, which is not supported")
    if len(kinds) != layer.num_hidden_layers:
        raise UserError(f"config.json has {len(kinds)} layer_types for {layer.num_hidden_layers} layers")
    return [kind == "sliding_attention" for kind in kinds]


def check_layer_ids(listed: Sequence[int], name: str, base: Outline) -> None:
    """Raises UserError where a list in config.json names no layer, or one that the base lacks."""
    if not listed:
        raise UserError(f"{name} in config.json names no layer")
    for layer in listed:
        if not 0 <= layer < base.n_layers:
            raise UserError(
                f"{name} in config.json names layer {layer}, of the model's can be read: 0 to {base.n_layers - 1}"
            )


def check_sizes(pairs: Iterable[tuple[str, int, int]]) -> None:
    """Raises UserError where the drafter is for a model of other sizes. pairs: (what, the drafter's, the model's)."""
    for name, stated, own in pairs:
        if stated != own:
            raise UserError(f"the drafter is for a model with a {name} of {stated}, the model has {own}")


def proposals(algorithm: str, tokens: int, base: Outline) -> dict[str, Any]:
    """`speculators_config` of a drafter of so many tokens a step."""
    return {
        "algorithm": algorithm,
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
        "default_proposal_method": "greedy",
        "verifier": {
            "name_or_path": known_name(base),
            "architectures": getattr(base.config, "architectures", None) or [],
        },
    }


def known_name(base: Outline) -> str | None:
    """Return what others find the base by: its hub id; None for the lab's models, folders and files of this machine."""
    page = str(base.origin.get("page", ""))
    if page.startswith(HUB):
        return page.removeprefix(HUB)
    return None if base.is_lab or base.folder is not None or "gguf" in base.origin else base.name
