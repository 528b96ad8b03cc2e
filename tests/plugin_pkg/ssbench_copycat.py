"""Decoding method `copycat`. As written it copies what followed the last occurrence of the newest tokens.

Change `propose`, which drafts the tokens of a step, `summary`, and the options `ngram` and `length`.
"""

from dataclasses import dataclass, field
from typing import Annotated

import torch
from annotated_types import Ge

from specbench_ss import Decoder, DecodeState, DraftTree


@dataclass(frozen=True)
class Options:
    """Options of `copycat`; every field becomes `--set copycat.NAME=VALUE`."""

    ngram: Annotated[int, Ge(1)] = field(default=2, metadata={"help": "How many tokens must match."})
    length: Annotated[int, Ge(1)] = field(default=6, metadata={"help": "How many tokens are copied at most."})


class Copycat(Decoder):
    """Draft one chain: the tokens after the latest earlier occurrence of the last `ngram` tokens."""

    name = "copycat"
    summary = "copies what followed the last occurrence of the newest tokens"
    Options = Options
    node_options = ("length",)  # what `--nodes` sets

    def max_tokens_per_step(self) -> int:
        return 1 + self.options.length

    def search_space(self) -> dict[str, tuple[int, ...]]:
        return {"length": (2, 4, 6, 10, 16), "ngram": (2, 1, 3)}

    def propose(self, state: DecodeState) -> DraftTree:
        ids, n = torch.tensor(state.ids), self.options.ngram
        if len(ids) > n:
            windows = ids[:-1].unfold(0, n, 1)  # [S - n, n], the newest n-gram itself left out
            found = (windows == ids[-n:]).all(1).nonzero()
            if len(found):
                start = int(found[-1]) + n
                copied = ids[start : start + self.options.length].to(state.root.device)
                return DraftTree.chain(state.root, copied)
        return DraftTree.root_only(state.root)
