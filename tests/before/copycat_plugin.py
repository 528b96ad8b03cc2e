"""Copy what followed the last time the newest tokens occurred: a whole decoding method in one small file."""

from dataclasses import dataclass, field

import torch

from specbench_ss.decoder import Decoder, State
from specbench_ss.errors import UserError
from specbench_ss.tree import DraftTree


@dataclass(frozen=True)
class Options:
    """Options of `copycat`; every field becomes `--set copycat.NAME=VALUE`."""

    ngram: int = field(default=2, metadata={"help": "tokens that must match"})
    length: int = field(default=6, metadata={"help": "tokens to copy"})

    def __post_init__(self) -> None:
        if min(self.ngram, self.length) < 1:
            raise UserError("copycat: ngram and length must be at least 1")


class Copycat(Decoder):
    """Drafts one chain: the tokens after the latest earlier occurrence of the last `ngram` tokens."""

    name = "copycat"
    summary = "copies what followed the last occurrence of the newest tokens"
    Options = Options

    def max_rows(self) -> int:
        return 1 + self.options.length

    def tunable(self) -> dict[str, tuple[int, ...]]:
        return {"length": (2, 4, 6, 10, 16), "ngram": (2, 1, 3)}

    def propose(self, state: State) -> DraftTree:
        ids, n = torch.tensor(state.ids), self.options.ngram
        if len(ids) > n:
            windows = ids[:-1].unfold(0, n, 1)  # [S - n, n], the newest n-gram itself left out
            found = (windows == ids[-n:]).all(1).nonzero()
            if len(found):
                start = int(found[-1]) + n
                copied = ids[start : start + self.options.length].to(state.root.device)
                return DraftTree.chain(state.root, copied)
        return DraftTree.root_only(state.root)
