"""Options of `sd`, and what cannot go together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Lt

from specbench_ss.engine.tree import MOST_NODES
from specbench_ss.errors import UserError
from specbench_ss.options import Bounded

LONGEST = 64  # tokens of a chain whose length is not fixed: more has never paid


@dataclass(frozen=True, slots=True)
class TwoModelOptions(Bounded):
    """Options of `sd`. Raises UserError for what cannot be drafted."""

    owner: ClassVar[str] = "sd"
    weights: str = field(
        default="",
        metadata={
            "help": "The draft model: folder or hub id, or as `draft-2m` the name of another one that came with the "
            "model. A folder with a LoRA that names no model changes the one that came with the model. Empty: that one."
        },
    )
    form: Literal["chain", "tree"] = field(default="chain", metadata={"help": "Form of the draft."})
    gamma: Annotated[int, Ge(1)] = field(
        default=4,
        metadata={"help": "Length of a chain, at first where a schedule changes it; or depth of a tree."},
    )
    threshold: Annotated[float, Ge(0), Lt(1)] = field(
        default=0.0,
        metadata={
            "help": "Chains only: end the chain with a token that is less probable to the draft model than this. "
            "0: chains of a fixed length."
        },
    )
    schedule: Literal["constant", "heuristic"] = field(
        default="constant",
        metadata={
            "help": "Chains only: how the length changes. heuristic: 2 longer after a chain that was accepted whole, "
            "else 1 shorter."
        },
    )
    k: Annotated[int, Ge(1)] = field(
        default=3,
        metadata={"help": "Trees only: candidates of a node, and how many nodes of a level are given candidates."},
    )
    nodes: Annotated[int, Ge(0)] = field(
        default=12,
        metadata={"help": "Trees only: how many nodes are drafted, the best by joint probability. 0: all of them."},
    )
    candidates: Literal["auto", "top", "drawn"] = field(
        default="auto",
        metadata={
            "help": "Where tokens are sampled: whether candidates are drawn from the draft model's distribution or are "
            "its likeliest tokens (top). auto: drawn for chains, top for trees."
        },
    )
    retokenise: bool = field(
        default=False,
        metadata={
            "help": "Accept a draft model of another vocabulary: its likeliest tokens are turned into text, and that "
            "into the target's tokens, which are the draft (a chain)."
        },
    )
    lookbehind: Annotated[int, Ge(1)] = field(
        default=10, metadata={"help": "With `retokenise`: how many earlier tokens new text is tokenised together with."}
    )

    def check_together(self) -> None:
        """What only a chain can have, and the size of the whole draft."""
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
