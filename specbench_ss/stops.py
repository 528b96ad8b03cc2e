"""What ends an answer: the user's stop texts made into what the loop watches. Knows target and tokenizer, no loop.

Special tokens have no text in an answer, so a stop text that is one becomes a token id.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specbench_ss.errors import UserError
from specbench_ss.generate import Limits

if TYPE_CHECKING:
    from specbench_ss.target import Target


def limits(target: Target, max_new_tokens: int, stop: Sequence[str] = ()) -> Limits:
    """Where answers of this target end: its end tokens, the stop texts, `max_new_tokens`. Raises as `stop_ids` does."""
    special = stop_ids(target.tokenizer, stop)
    return Limits(max_new_tokens, target.eos_ids.union(special.values()), tuple(x for x in stop if x not in special))


def stop_ids(tokenizer: Any, stop: Sequence[str]) -> dict[str, int]:
    """Those of the stop texts that are exactly one special token, with its id.

    Raises UserError for a text that holds a special token among other characters: it would never be found.
    """
    special = special_tokens(tokenizer) if stop else {}
    for text in stop:
        inside = [token for token in special if token in text]
        if inside and text not in special:
            raise UserError(
                f"--stop {text!r} holds the special token {max(inside, key=len)!r} among other characters; answers are "
                "searched without special tokens: give the token alone, or the text without it"
            )
    return {text: special[text] for text in stop if text in special}


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Text -> id of every token that is left out of decoded text; empty without a tokenizer."""
    if tokenizer is None:
        return {}
    named = {token: tokenizer.convert_tokens_to_ids(token) for token in tokenizer.all_special_tokens}
    added = {str(token): i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return {token: i for token, i in {**added, **named}.items() if token and i is not None}
