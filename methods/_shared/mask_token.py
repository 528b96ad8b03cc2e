"""The token that stands where a drafter is to say what comes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbench_ss.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from specbench_ss.engine.architectures import Outline


def mask_token(base: Outline, embedding: Tensor) -> int:
    """The tokenizer's mask token, or else the last word whose embedding is not zero: its places must differ."""
    given = None if base.tokenizer is None else base.tokenizer.mask_token_id
    return int(embedding.any(-1).nonzero()[-1]) if given is None else int(given)


def check_mask_token(token: int, base: Outline, where: str = "") -> None:
    """Raises UserError where the base has no such token. where: it stands, as ' in config.json'."""
    if not 0 <= token < base.vocab_size:
        raise UserError(f"mask_token_id{where} is {token}, the model has tokens 0 to {base.vocab_size - 1}")
