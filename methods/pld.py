"""Prompt lookup decoding: what followed an earlier occurrence of the newest tokens is the draft. Lossless.

Saxena 2023 (Prompt-Lookup-Decoding); transformers' `prompt_lookup_num_tokens` is the same search with other defaults:
docs/methods/pld.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le

from specbench_ss.engine.decoder import Decoder, DecodeState
from specbench_ss.engine.target import Target
from specbench_ss.engine.tree import MOST_NODES, DraftTree, indices
from specbench_ss.options import Bounded, option


@dataclass(frozen=True, slots=True)
class LookupOptions(Bounded):
    """Options of `pld`. Raises UserError for values beyond their bounds."""

    owner: ClassVar[str] = "pld"
    ngram: Annotated[int, Ge(1), Le(MOST_NODES)] = option(
        3, "Length of the longest n-gram that is looked up. Shorter ones follow where it is new."
    )
    length: Annotated[int, Ge(1), Le(MOST_NODES - 1)] = option(10, "How many tokens are copied at most.")
    match: Literal["first", "last"] = option("first", "Whether the first or the last earlier occurrence is copied.")
    complete: bool = option(
        False, "Copy only from occurrences that `length` tokens follow, as first published. Off: from any."
    )


class PromptLookup(Decoder):
    """The request is held as a string, a character for each token: its search is one of the fastest there are."""

    name = "pld"
    summary = "prompt lookup: copies what followed the newest n-gram before"
    paper = "Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding"
    Options = LookupOptions
    node_options = ("length",)

    def __init__(self, target: Target, options: LookupOptions | None = None) -> None:
        super().__init__(target, options)
        self.text = ""

    @classmethod
    def test_instances(cls, target: Target) -> Mapping[str, Callable[[], Decoder]]:
        shapes = {
            "first": LookupOptions(),
            "last": LookupOptions(ngram=2, length=4, match="last"),
            "complete": LookupOptions(length=6, complete=True),
        }
        return {label: partial(cls, target, options) for label, options in shapes.items()}

    def search_space(self) -> Mapping[str, Sequence[Any]]:
        return {
            "length": (2, 4, 6, 10, 16, 24),
            "ngram": (1, 2, 3, 4),
            "match": ("first", "last"),
        }

    def max_tokens_per_step(self) -> int:
        return 1 + int(self.options.length)

    def on_prefill(self, state: DecodeState) -> None:
        """The prompt and the first token."""
        self.text = "".join(map(chr, state.ids))

    def propose(self, state: DecodeState) -> DraftTree:
        """The continuation of the longest n-gram that is found."""
        self.text += "".join(map(chr, state.ids[len(self.text) :]))
        copied = look_up(self.text, self.options)
        if not copied:
            return DraftTree.root_only(state.root)
        return DraftTree.chain(state.root, indices([ord(c) for c in copied], state.root.device))


def look_up(text: str, options: LookupOptions) -> str:
    """At most `length` characters that followed the first (or last) occurrence of the newest n-gram, n descending.

    Only occurrences that at least one character follows, or `length` of them where `complete` is asked for.
    """
    end = len(text)
    find = text.find if options.match == "first" else text.rfind
    for n in range(min(options.ngram, end - 1), 0, -1):
        start = find(text[end - n :], 0, max(0, end - (options.length if options.complete else 1)))
        if start >= 0:
            return text[start + n : start + n + options.length]
    return ""
