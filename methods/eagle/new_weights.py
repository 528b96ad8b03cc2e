"""New drafters for a target: to be trained, or random ones to be held to the laws."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from specbench_ss.engine.target import Target
from specbench_ss.methods._shared.draft_vocabulary import choose_words
from specbench_ss.methods._shared.small_llama import llama_layer
from specbench_ss.methods.eagle.drafter import Eagle1Drafter, Eagle3Drafter, Shape
from specbench_ss.methods.eagle.feature_layers import published_levels
from specbench_ss.models.tiny import randomise

SPREAD = 0.15  # of random weights: with more, a drafter is sure of one word


def shape_for(target: Target) -> Shape:
    """A layer of the target's width and heads."""
    c = llama_layer(target)
    assert c.num_key_value_heads and c.head_dim
    return Shape(
        c.hidden_size, c.intermediate_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim,
        feature=target.hidden_size,
    )  # fmt: skip


def config_for(target: Target, shape: Shape) -> dict[str, Any]:
    """config.json of a drafter of this shape, as the published ones have it."""
    rope = getattr(target.config, "rope_parameters", None) or {}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": float(rope.get("rope_theta") or 10000.0),
        "max_position_embeddings": target.context_length,
        "vocab_size": target.vocab_size,
    }


def new_eagle(target: Target) -> tuple[Eagle1Drafter, dict[str, Any]]:
    """Return an untrained EAGLE drafter and its config.

    `fc` has no bias, which vLLM would drop. `bias` is stated: the authors' code takes a missing one for true.
    """
    shape = shape_for(target)
    config = config_for(target, shape) | {"bias": False}
    return Eagle1Drafter(shape, shape.llama(config)), config


def new_eagle3(
    target: Target, draft_vocab: int, layers: tuple[int, ...] = ()
) -> tuple[Eagle3Drafter, dict[str, Any], tuple[int, ...]]:
    """An untrained EAGLE-3 drafter, its config and the layers it reads. Its draft vocabulary is the first words.

    layers: empty = the published ones.
    """
    layers = layers or published_levels(target.n_layers)
    draft_vocab = min(draft_vocab, target.vocab_size)
    shape = replace(shape_for(target), draft_vocab=draft_vocab, levels=len(layers))
    config = config_for(target, shape) | {
        "draft_vocab_size": draft_vocab, "target_hidden_size": target.hidden_size, "feature_layers": list(layers)
    }  # fmt: skip
    drafter = Eagle3Drafter(shape, shape.llama(config), True, target.vocab_size)
    choose_words(drafter, torch.arange(draft_vocab))
    return drafter, config, layers


def random_eagle(target: Target) -> Eagle1Drafter:
    """Random weights."""
    drafter, _ = new_eagle(target)
    randomise(drafter, 3, SPREAD)
    return drafter


def random_eagle3(target: Target, reduced: bool = True) -> tuple[Eagle3Drafter, dict[str, Any], tuple[int, ...]]:
    """Random weights; reduced: the draft vocabulary leaves some of the target's first words out."""
    words = target.vocab_size * 3 // 4 if reduced else target.vocab_size
    drafter, config, layers = new_eagle3(target, words)
    choose_words(drafter, torch.arange(target.vocab_size - words, target.vocab_size))
    randomise(drafter, 3, SPREAD)
    return drafter, config, layers
