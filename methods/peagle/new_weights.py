"""New drafters for a target: to be trained, or random ones to be held to the laws."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import LlamaConfig

from specbench_ss.engine.target import Target
from specbench_ss.methods._shared.draft_vocabulary import choose_words
from specbench_ss.methods._shared.layer_configs import sizes_of
from specbench_ss.methods._shared.mask_token import mask_token
from specbench_ss.methods._shared.small_llama import llama_layer
from specbench_ss.methods.peagle.drafter import Drafter, Shape
from specbench_ss.methods.peagle.feature_layers import feature_layers
from specbench_ss.models.tiny import randomise

SPREAD = 0.15  # of random weights: with more, a drafter is sure of one word


def new_drafter(
    target: Target,
    depths: int,
    layers: int = 1,
    draft_vocab: int = 0,
    mask: int | None = None,
    own_embedding: bool = False,
    windows: Sequence[int | None] = (),
) -> Drafter:
    """An untrained drafter, of Llama layers. draft_vocab: 0 = all words; else the first ones, until they are chosen.

    own_embedding: it begins as the target's.
    """
    table = target.model.get_input_embeddings().weight
    draft_vocab = 0 if draft_vocab >= target.vocab_size else draft_vocab
    mask = mask_token(target, table) if mask is None else mask
    shape = Shape(
        feature_layers(target.n_layers), depths, mask, tuple(windows[:layers]) or (None,) * layers,
        draft_vocab or target.vocab_size, target.vocab_size * own_embedding, bool(draft_vocab), bool(draft_vocab),
    )  # fmt: skip
    sizes = sizes_of(llama_layer(target)) | {"num_hidden_layers": layers, "vocab_size": target.vocab_size}
    drafter = Drafter(shape, LlamaConfig(**sizes), target.vocab_size)
    assert drafter.lm_head is not None
    with torch.no_grad():
        drafter.lm_head.weight.copy_(target.unembed[: shape.draft_vocab])
        if drafter.embed_tokens is not None:
            drafter.embed_tokens.weight.copy_(table)
    if draft_vocab:
        choose_words(drafter, torch.arange(draft_vocab))
    return drafter


def random_drafter(
    target: Target, layers: int = 2, draft_vocab: int = 0, windows: Sequence[int | None] = ()
) -> Drafter:
    """Random weights: five places. A reduced vocabulary leaves some of the target's first words out."""
    drafter = new_drafter(target, 5, layers, draft_vocab, own_embedding=layers > 1, windows=windows)
    if "d2t" in drafter.state_dict():
        choose_words(drafter, torch.arange(target.vocab_size - draft_vocab, target.vocab_size))
    randomise(drafter, 3, SPREAD)
    return drafter
