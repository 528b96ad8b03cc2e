"""Draft vocabulary of a drafter's LM head, and the mask token.

d2t int64 [draft vocabulary]: the target's id of draft word d is d + d2t[d]. t2d bool [V]: which words are drafted.
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

MAPS = ("d2t", "t2d")
SPREAD = 0.15  # of random weights: with more, a drafter is sure of one token
N = TypeVar("N", bound="DrafterNetwork")


@torch.no_grad()
def choose_words(drafter: Any, words: Tensor) -> None:
    """Set the draft vocabulary to these of the target's tokens, int64 [draft vocabulary], ascending."""
    drafter.d2t.copy_(words - torch.arange(len(words), device=words.device))
    drafter.get_buffer("t2d").zero_()[words.to(drafter.d2t.device)] = True


def randomised(drafter: N, vocab: int) -> N:
    """Give a drafter random weights; a reduced draft vocabulary lacks some of the target's `vocab` first tokens."""
    if "d2t" in drafter.state_dict():
        choose_words(drafter, torch.arange(vocab - drafter.draft_vocab, vocab))
    randomise(drafter, 3, SPREAD)
    return drafter


def read_shapes_and_words(path: Path, keep: Keep | None = None) -> dict[str, Tensor]:
    """Read a drafter's tensors without their values, except for d2t and t2d, which `check_words` needs."""
    return read_shapes(path, keep, valued=lambda name: name.rpartition(".")[2] in MAPS)


def check_words(tensors: Mapping[str, Tensor], vocab: int) -> None:
    """Raise UserError where d2t maps outside the model's vocabulary, to a token twice, or to others than t2d marks.

    tensors: a drafter's, by name, of the right shapes; without values of d2t nothing is checked.
    """
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None or d2t.is_meta:
        return
    if not torch.equal(d2t, d2t.long().to(d2t.dtype)):
        raise UserError("d2t holds numbers that are not whole")
    words = d2t.long() + torch.arange(len(d2t), device=d2t.device)
    if int(words.min()) < 0 or int(words.max()) >= vocab:
        outside = int(words.min()) if int(words.min()) < 0 else int(words.max())
        raise UserError(f"d2t leads to token {outside}, the model has a vocabulary of {vocab}")
    found, times = words.unique(return_counts=True)
    if len(found) < len(words):
        raise UserError(f"d2t leads to token {int(found[times > 1][0])} more than once")
    if t2d is not None and not torch.equal(found, t2d.nonzero()[:, 0]):
        raise UserError(f"d2t leads to other words than the {int((t2d != 0).sum())} that t2d marks")


def vocabulary_fields(
    stated: int | None, tensors: Mapping[str, Tensor], base: ModelInfo, headless: bool = False
) -> dict[str, Any]:
    """Return the fields of a drafter's shape that concern its embedding and LM head.

    Raise UserError where tensors, configuration and base do not fit together.

    Args:
        stated: size of the draft vocabulary by config.json, None where it does not state one.
        tensors: the drafter's, by name.
        base: the model that is drafted for.
        headless: the drafter may lack an LM head and use the base's.
    """
    names = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")
    embedding, head, d2t, t2d = (len(tensors[n]) if n in tensors and tensors[n].ndim else 0 for n in names)
    for name in MAPS:
        if name in tensors and tensors[name].ndim != 1:
            raise UserError(f"{name} has shape {tuple(tensors[name].shape)}, it should be a list")
    words = stated or head or d2t or base.vocab_size
    if words > base.vocab_size:
        raise UserError(f"the drafter's vocabulary has {words} words, the model's {base.vocab_size}")
    for name, length in (("lm_head.weight", head), ("d2t", d2t)):
        if length and length != words:
            raise UserError(f"config.json states that the drafter has {words} words, {name} has {length}")
    if t2d and t2d != base.vocab_size:
        raise UserError(f"t2d is for a vocabulary of {t2d}, the model has {base.vocab_size}")
    if embedding and embedding != base.vocab_size:
        raise UserError(f"the drafter is for a vocabulary of {embedding}, the model has {base.vocab_size}")
    reduced = words < base.vocab_size
    wanted = [("lm_head.weight", head, reduced or d2t or not headless), ("d2t", d2t, reduced)]
    if missing := [name for name, length, needed in wanted if needed and not length]:
        size = f"the drafter has {words} words, the model {base.vocab_size}, and it" if reduced else "the drafter"
        raise UserError(f"{size} lacks tensors: {', '.join(missing)}")
    return {"vocab": embedding, "draft_vocab": head, "mapped": bool(d2t), "marked": bool(t2d)}


def mask_token(base: ModelInfo, embedding: Tensor) -> int:
    """Return the tokenizer's mask token, else the last token whose embedding is not zero."""
    given = None if base.tokenizer is None else base.tokenizer.mask_token_id
    return int(embedding.any(-1).nonzero()[-1]) if given is None else int(given)


def check_mask_token(token: int, base: ModelInfo, where: str = "") -> None:
    """Raise UserError where the base has no such token. where: appended to the name, as ' in config.json'."""
    if not 0 <= token < base.vocab_size:
        raise UserError(f"mask_token_id{where} is {token}, the model has tokens 0 to {base.vocab_size - 1}")
