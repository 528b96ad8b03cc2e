"""Folders as the package `speculators` writes them and vLLM serves them: what config.json of all their types has.

Facts: speculators 0.9 (Apache-2.0). Knows configurations and lengths of tensors, no drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from specbench_ss import registry
from specbench_ss.decoding.outline import Outline
from specbench_ss.errors import UserError, first_line
from specbench_ss.methods._shared.rotary import Rotary, check_rope

TYPE = "speculators_model_type"
READ_BY_A_METHOD = ("eagle3", "peagle", "dflash")  # types, named as the methods that read them
LAYER = "transformer_layer_config"
PRUNED = ("lm_head.weight", "d2t", "t2d")  # tensors of a draft vocabulary


def check_type(config: Mapping[str, Any], wanted: str) -> bool:
    """Whether config.json is of this format. Raises UserError where it is, and of another type than `wanted`."""
    kind = config.get(TYPE)
    if kind is None or kind == wanted:
        return kind is not None
    readers = [name for name in registry.names(registry.METHODS) if name in READ_BY_A_METHOD]
    advice = f"use the method {kind}" if kind in readers else f"types that can be read are {', '.join(readers)}"
    raise UserError(f"config.json describes a speculator of the type {kind!r}, not {wanted!r}: {advice}")


def layer_config(
    given: Any, layers: str, made: Callable[[PretrainedConfig], PretrainedConfig] = lambda layer: layer
) -> PretrainedConfig:
    """The draft layers' configuration, with its model type's own defaults for what is not stated.

    layers: in words, what must be described; made: the configuration that layers are computed by. Raises UserError for
    what transformers does not take, and for a rope that changes with the length of the text.
    """
    if not isinstance(given, dict | None):
        raise UserError(f"{LAYER} in config.json is not an object")
    given = given or {}
    known = {k: v for k, v in given.items() if k not in ("architectures", "auto_map", "model_type")}
    kind = given.get("model_type") or "qwen3"
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise UserError(f"config.json speaks of layers of the type {kind!r}, which is not known")
    try:
        layer = AutoConfig.for_model(kind, **known)
        check_rope(layer)
        with torch.device("cpu"):  # `check` makes everything else without numbers
            Rotary(made(layer), torch.device("cpu"))
    except Exception as error:  # of many kinds: whatever transformers finds wrong
        raise UserError(f"config.json does not describe {layers}: {first_line(error)}") from None
    return layer


def check_fits(stated: Mapping[str, tuple[int, int]]) -> None:
    """stated: {what it is: (as config.json has it, as the model has it)}. Raises UserError where these differ."""
    for name, (said, own) in stated.items():
        if said != own:
            raise UserError(f"the drafter is for a model with a {name} of {said}, the model has {own}")


def check_layers(ids: Sequence[int], name: str, base: Outline) -> None:
    """Raises UserError where the list `name` of config.json is empty, or has a layer that the model does not have."""
    if not ids:
        raise UserError(f"{name} in config.json names no layer")
    last = base.n_layers - 1
    for layer in ids:
        if not 0 <= layer <= last:
            raise UserError(f"{name} in config.json names layer {layer}, of the model's can be read: 0 to {last}")


def lengths(tensors: Mapping[str, torch.Tensor], names: Sequence[str]) -> dict[str, int]:
    """Rows of each of these tensors, 0 = it is not there."""
    return {name: len(tensors[name]) if name in tensors and tensors[name].ndim else 0 for name in names}


def draft_vocab(said: int | None, own: Mapping[str, int], base: Outline) -> int:
    """Words of its own LM head, 0 = it has none. said: draft_vocab_size; own: `lengths` of PRUNED.

    Raises UserError where they do not fit each other or the model.
    """
    head, d2t, t2d = (own[name] for name in PRUNED)
    stated = said or head or d2t or base.vocab_size
    if stated > base.vocab_size:
        raise UserError(f"the drafter's vocabulary has {stated} words, the model's {base.vocab_size}")
    for name, words in (("lm_head.weight", head), ("d2t", d2t)):
        if words and words != stated:
            raise UserError(f"config.json says that the drafter has {stated} words, {name} has {words}")
    if t2d and t2d != base.vocab_size:
        raise UserError(f"t2d is for a vocabulary of {t2d}, the model has {base.vocab_size}")
    missing = [name for name, words in (("lm_head.weight", head), ("d2t", d2t)) if not words]
    if stated < base.vocab_size and missing:
        raise UserError(
            f"the drafter has {stated} words, the model {base.vocab_size}, and it lacks tensors: {', '.join(missing)}"
        )
    if d2t and not head:
        raise UserError("the drafter has d2t, and lacks tensors: lm_head.weight")
    return head


def config_of(
    kind: str, architecture: str, layer: Mapping[str, Any], words: int, drafts: int, base: Outline
) -> dict[str, Any]:
    """What config.json of every type has. layer: of the draft layers; words: that it drafts; drafts: tokens a step."""
    return {
        "architectures": [architecture],
        TYPE: kind,
        LAYER: dict(layer),
        "draft_vocab_size": words,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": drafts}],
            "default_proposal_method": "greedy",
            "verifier": {
                "name_or_path": None if base.is_lab else base.name,  # the lab is known by that name here alone
                "architectures": getattr(base.config, "architectures", None) or [],
            },
        },
    }
