"""New drafters for a target: to be trained, or random ones to be held to the laws."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import Qwen3Config

from specbench_ss.engine.target import Target
from specbench_ss.methods._shared.draft_vocabulary import choose_words
from specbench_ss.methods._shared.mask_token import mask_token
from specbench_ss.methods._shared.small_llama import llama_layer
from specbench_ss.methods.dflash.drafter import Drafter, Shape
from specbench_ss.methods.dflash.sight import Sight
from specbench_ss.models.tiny import randomise

SPREAD = 0.15  # of random weights: with more, a drafter is sure of one word


def published_layers(draft_layers: int, target_layers: int) -> tuple[int, ...]:
    """The layers of the target whose outputs a new drafter reads, one for each of its own as far as there are so many.

    The last layer's output is left out: it is known only after the final norm.
    """
    if draft_layers == 1:
        return (min(target_layers // 2, max(0, target_layers - 2)),)
    step = (target_layers - 4) / (draft_layers - 1)
    outputs = {round(1 + i * step) for i in range(draft_layers)}
    return tuple(sorted({min(max(0, i), max(0, target_layers - 2)) for i in outputs}))


def layer_config(target: Target, draft_layers: int) -> Qwen3Config:
    """Qwen3 layers of the target's width and heads, with its rotary embedding."""
    c = llama_layer(target)
    assert c.head_dim
    return Qwen3Config(
        vocab_size=target.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=draft_layers,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.rms_norm_eps,
        max_position_embeddings=c.max_position_embeddings,
        rope_parameters=c.rope_parameters,
    )


def new_drafter(
    target: Target,
    draft_layers: int,
    block: int,
    draft_vocab: int = 0,
    mask: int | None = None,
    from_anchor: bool = False,
    sights: Sequence[Sight] | None = None,
) -> Drafter:
    """An untrained drafter. draft_vocab: 0 = all words by the target's LM head; else the first ones by its own."""
    draft_vocab = 0 if draft_vocab >= target.vocab_size else draft_vocab
    own, outputs = bool(draft_vocab), published_layers(draft_layers, target.n_layers)
    inputs = tuple(-1 if i + 1 == target.n_layers else i + 1 for i in outputs)
    mask = mask_token(target, target.model.get_input_embeddings().weight) if mask is None else mask
    every = tuple(sights) if sights is not None else (Sight(),) * draft_layers
    shape = Shape(inputs, block, mask, every, from_anchor, draft_vocab=draft_vocab, mapped=own, marked=own)
    drafter = Drafter(shape, layer_config(target, draft_layers), target.vocab_size)
    if draft_vocab:
        choose_words(drafter, torch.arange(draft_vocab))
    return drafter


def random_drafter(
    target: Target, draft_vocab: int = 0, from_anchor: bool = False, sights: Sequence[Sight] | None = None
) -> Drafter:
    """Random weights: two layers, blocks of five. A reduced vocabulary leaves some of the target's first words out."""
    drafter = new_drafter(target, 2, 5, draft_vocab, from_anchor=from_anchor, sights=sights)
    if drafter.shape.draft_vocab:
        choose_words(drafter, torch.arange(target.vocab_size - draft_vocab, target.vocab_size))
    randomise(drafter, 3, SPREAD)
    return drafter
