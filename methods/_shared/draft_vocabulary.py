"""Draft vocabulary of a drafter's LM head, and the mask token.

d2t int64 [draft vocabulary]: draft token d is the target's token d + d2t[d]. t2d bool [V]: marks the drafted tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from specbench_ss.errors import UserError
from specbench_ss.models.checkpoint import Keep, read_shapes
from specbench_ss.models.tiny import randomise

if TYPE_CHECKING:
    from specbench_ss.engine.architectures import ModelInfo
    from specbench_ss.methods._shared.drafter_network import DrafterNetwork

VOCAB_MAPS = ("d2t", "t2d")
SPREAD = 0.15  # standard deviation of random weights: with more, a drafter puts all probability on one token
N = TypeVar("N", bound="DrafterNetwork")


@torch.no_grad()
def set_draft_vocab(drafter: Any, token_ids: Tensor) -> None:
    """Set the draft vocabulary to these token ids of the target, int64 [draft vocabulary], ascending."""
    drafter.d2t.copy_(token_ids - torch.arange(len(token_ids), device=token_ids.device))
    drafter.get_buffer("t2d").zero_()[token_ids.to(drafter.d2t.device)] = True


def randomize_drafter(drafter: N, vocab: int) -> N:
    """Give a drafter random weights; a reduced draft vocabulary lacks some of the target's `vocab` first tokens."""
    if "d2t" in drafter.state_dict():
        set_draft_vocab(drafter, torch.arange(vocab - drafter.draft_vocab, vocab))
    randomise(drafter, 3, SPREAD)
    return drafter


def read_shapes_and_vocab_maps(path: Path, keep: Keep | None = None) -> dict[str, Tensor]:
    """Read the shapes of a drafter's tensors, and the values of d2t and t2d, which `check_draft_vocab` needs."""
    return read_shapes(path, keep, valued=lambda name: name.rpartition(".")[2] in VOCAB_MAPS)


def check_draft_vocab(tensors: Mapping[str, Tensor], vocab: int) -> None:
    """Raise UserError if d2t leaves the model's vocabulary, maps to a token twice, or disagrees with t2d.

    tensors: a drafter's, by name, of the right shapes; if d2t has no values, nothing is checked.
    """
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None or d2t.is_meta:
        return
    if not torch.equal(d2t, d2t.long().to(d2t.dtype)):
        raise UserError("d2t contains numbers that are not integers")
    token_ids = d2t.long() + torch.arange(len(d2t), device=d2t.device)
    least, most = int(token_ids.min()), int(token_ids.max())
    if least < 0 or most >= vocab:
        outside = least if least < 0 else most
        raise UserError(f"d2t maps to token {outside}, the model has a vocabulary of {vocab}")
    unique, counts = token_ids.unique(return_counts=True)
    if len(unique) < len(token_ids):
        raise UserError(f"d2t maps to token {int(unique[counts > 1][0])} more than once")
    if t2d is not None and not torch.equal(unique, t2d.nonzero()[:, 0]):
        raise UserError(f"d2t maps to other tokens than the {int((t2d != 0).sum())} that t2d marks")


def vocabulary_fields(stated: int | None, tensors: Mapping[str, Tensor], base: ModelInfo) -> dict[str, Any]:
    """Return the `VocabularyShape` fields of a drafter, which may lack an embedding or LM head and use the base's.

    Raise UserError if tensors, configuration and base do not fit together.

    Args:
        stated: size of the draft vocabulary in config.json, None if it is not stated.
        tensors: the drafter's, by name.
        base: the model that is drafted for.
    """
    names = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")
    embedding, head, d2t, t2d = (len(tensors[n]) if n in tensors and tensors[n].ndim else 0 for n in names)
    for name in VOCAB_MAPS:
        if name in tensors and tensors[name].ndim != 1:
            raise UserError(f"{name} has shape {tuple(tensors[name].shape)}, it should have one dimension")
    draft_vocab = stated or head or d2t or base.vocab_size
    if draft_vocab > base.vocab_size:
        raise UserError(f"the drafter's vocabulary has {draft_vocab} words, the model's {base.vocab_size}")
    for name, length in (("lm_head.weight", head), ("d2t", d2t)):
        if length and length != draft_vocab:
            raise UserError(f"config.json states that the drafter has {draft_vocab} words, {name} has {length}")
    if t2d and t2d != base.vocab_size:
        raise UserError(f"t2d is for a vocabulary of {t2d}, the model has {base.vocab_size}")
    if embedding and embedding != base.vocab_size:
        raise UserError(f"the drafter is for a vocabulary of {embedding}, the model has {base.vocab_size}")
    reduced = draft_vocab < base.vocab_size
    required = [("lm_head.weight", head, reduced or d2t), ("d2t", d2t, reduced)]
    if missing := [name for name, length, needed in required if needed and not length]:
        sizes = f"the drafter has {draft_vocab} words, the model {base.vocab_size}, and it"
        raise UserError(f"{sizes if reduced else 'the drafter'} lacks tensors: {', '.join(missing)}")
    fc = tensors.get("fc.weight")
    if not head and fc is not None and len(fc) != base.hidden_size:
        raise UserError(f"the drafter has no lm_head.weight, and the model's is {base.hidden_size} wide, not {len(fc)}")
    return {"vocab": embedding, "draft_vocab": head, "mapped": bool(d2t), "marked": bool(t2d)}


def mask_token(base: ModelInfo, embedding: Tensor) -> int:
    """Return the mask token used at draft positions: the tokenizer's, else the last with a nonzero embedding."""
    token = None if base.tokenizer is None else base.tokenizer.mask_token_id
    return int(embedding.any(-1).nonzero()[-1]) if token is None else int(token)


def check_mask_token(token: int, base: ModelInfo, where: str = "") -> None:
    """Raise UserError if the base has no such token. where: appended to the name, as ' in config.json'."""
    if not 0 <= token < base.vocab_size:
        raise UserError(f"mask_token_id{where} is {token}, the model has tokens 0 to {base.vocab_size - 1}")
