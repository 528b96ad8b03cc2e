"""Options of `sd`, and what cannot go together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from specbench_ss.decoding.tree import MOST_NODES
from specbench_ss.errors import UserError

LONGEST = 64  # tokens of a chain whose length is not fixed: more has never paid


@dataclass(frozen=True, slots=True)
class TwoModelOptions:
    """Raises UserError for what cannot be drafted."""

    weights: str = field(default="", metadata={"help": "the draft: folder or hub id; empty = the model's own"})
    form: Literal["chain", "tree"] = field(default="chain", metadata={"help": "of the draft"})
    gamma: int = field(default=4, metadata={"help": "tokens of a chain, at first where it adapts; depth of a tree"})
    threshold: float = field(
        default=0.0,
        metadata={"help": "chain: ends with a token less probable to the draft than this; 0 = fixed length"},
    )
    schedule: Literal["constant", "heuristic"] = field(
        default="constant", metadata={"help": "chain: heuristic = 2 longer where all were accepted, else 1 shorter"}
    )
    k: int = field(default=3, metadata={"help": "tree: candidates of a node, and nodes of a level that have some"})
    nodes: int = field(default=12, metadata={"help": "tree: drafted nodes, the best by joint probability; 0 = all"})
    candidates: Literal["auto", "top", "drawn"] = field(
        default="auto",
        metadata={"help": "at T>0: drawn from the draft (auto for chains), or its best (auto for trees)"},
    )
    retokenise: bool = field(
        default=False,
        metadata={"help": "where the vocabularies differ: draft through text, the best tokens as a chain"},
    )
    lookbehind: int = field(default=10, metadata={"help": "tokens that new text is re-tokenised with"})

    def __post_init__(self) -> None:
        for name, least in (("gamma", 1), ("k", 1), ("nodes", 0), ("lookbehind", 1)):
            if getattr(self, name) < least:
                raise UserError(f"sd: {name} must be at least {least}, not {getattr(self, name)}")
        if not 0 <= self.threshold < 1:
            raise UserError(f"sd: threshold must be 0 or more and below 1, not {self.threshold}")
        if self.form == "tree" and (self.threshold or self.schedule != "constant"):
            raise UserError("sd: threshold and schedule are for chains, not for form=tree")
        if self.form == "tree" and self.retokenise:
            raise UserError("sd: what is drafted through text is a chain: no retokenise=on with form=tree")
        if self.form == "chain" and self.gamma > LONGEST:
            raise UserError(f"sd: gamma must be at most {LONGEST}, not {self.gamma}")
        if self.form == "tree" and self.whole_tree() >= MOST_NODES:
            raise UserError(f"sd: k={self.k} with gamma={self.gamma} makes a tree of more than {MOST_NODES} nodes")

    def whole_tree(self) -> int:
        """Nodes that a tree has before the best are chosen, root excluded."""
        return self.k + (self.gamma - 1) * self.k**2

    def drawn(self, greedy: bool) -> bool:
        """Whether candidates are drawn from the draft's distribution."""
        drawn = self.form == "chain" if self.candidates == "auto" else self.candidates == "drawn"
        return drawn and not greedy

    def most_drafted(self) -> int:
        """Drafted nodes of a step, at most."""
        if self.form == "tree":
            drawn = self.candidates == "drawn"  # nothing that was drawn may be dropped
            return self.whole_tree() if drawn else min(self.nodes, self.whole_tree()) or self.whole_tree()
        return LONGEST if self.retokenise or self.schedule == "heuristic" else self.gamma
