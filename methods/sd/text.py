"""Drafting through text, for a draft of another vocabulary: Universal Assisted Generation (as transformers has it).

The newest tokens' text -> the draft's tokens -> its continuation -> text -> the target's tokens. Tokens are made again
with a few before them, so that words are cut as their neighbours have it; a bad cut costs acceptance, nothing else.
"""

from __future__ import annotations

from typing import Any

PARTIAL = "\ufffd"  # the text of a token that ends within a character


class Bridge:
    """What the draft has been told of the target's text, in the draft's tokens.

    ids: these tokens; the last `tell` left the first `settled` of them as they were. told: of the target's tokens.
    """

    ids: list[int]
    told: int
    settled: int

    def __init__(self, ours: Any, theirs: Any, lookbehind: int) -> None:
        self.ours, self.theirs, self.lookbehind = ours, theirs, lookbehind
        self.begin()

    def begin(self) -> None:
        """A new prompt."""
        self.ids, self.told, self.settled = [], 0, 0

    def tell(self, ids: list[int]) -> bool:
        """Take in the target's tokens. False where they end within a character: the draft has to wait."""
        if self.told == len(ids):
            self.settled = len(self.ids)
            return True
        text = added(self.ours, ids[max(0, self.told - self.lookbehind) : self.told], ids[self.told :])
        if text.endswith(PARTIAL):
            return False
        if self.told:
            self.settled = max(0, len(self.ids) - self.lookbehind)
            self.ids = extended(self.theirs, self.ids, text, self.lookbehind)
        else:
            self.ids = list(self.theirs(text)["input_ids"])  # with what the draft begins a text with
        self.told = len(ids)
        return bool(self.ids)

    def candidates(self, ids: list[int], drafted: list[int]) -> list[int]:
        """The draft's tokens as those of the target that follow `ids`."""
        text = added(self.theirs, self.ids[-self.lookbehind :], drafted).rstrip(PARTIAL)
        return following(self.ours, ids[-self.lookbehind :], text)


def decoded(tokenizer: Any, ids: list[int]) -> str:
    """Text, special tokens left out."""
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def encoded(tokenizer: Any, text: str) -> list[int]:
    """Tokens of a part of a text."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def added(tokenizer: Any, before: list[int], new: list[int]) -> str:
    """What `new` adds to the text of `before`."""
    known, whole = decoded(tokenizer, before), decoded(tokenizer, before + new)
    return whole[len(known) :] if whole.startswith(known) else decoded(tokenizer, new)


def following(tokenizer: Any, before: list[int], text: str) -> list[int]:
    """Tokens of the text behind `before`, which stay as they are."""
    known = decoded(tokenizer, before)
    apart, together = encoded(tokenizer, known), encoded(tokenizer, known + text)
    return together[len(apart) :] if together[: len(apart)] == apart else encoded(tokenizer, text)


def extended(tokenizer: Any, ids: list[int], text: str, lookbehind: int) -> list[int]:
    """ids continued by the text; the last `lookbehind` of them may change, so that words are cut as they should be."""
    cut = max(0, len(ids) - lookbehind)
    tail = ids[cut:]
    again = encoded(tokenizer, decoded(tokenizer, tail) + text)
    if tail and again[:1] != tail[:1]:  # the window begins within a word: nothing before the new text is touched
        return ids + following(tokenizer, tail, text)
    return ids[:cut] + again
