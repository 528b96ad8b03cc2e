"""Options of all methods that draft every token of a step in one pass, each from a distribution of its own place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Le

from specbench_ss.engine.tree import MOST_NODES
from specbench_ss.errors import UserError
from specbench_ss.options import Bounded


@dataclass(frozen=True, slots=True)
class PlaceOptions(Bounded):
    """Which weights draft, and what of the places is verified. Raises UserError for values that do not go together."""

    weights: str = field(
        default="", metadata={"help": "Folder, file or hub id of the drafter. Empty: the one that came with the model."}
    )
    mode: Literal["chain", "tree"] = field(
        default="chain",
        metadata={
            "help": "What of the places is verified. chain: the best token of every place, as published. tree: the "
            "nodes with the greatest product of the places' probabilities, which is this project's addition."
        },
    )
    nodes: Annotated[int, Ge(1), Le(MOST_NODES)] = field(
        default=31, metadata={"help": "With mode=tree: how many drafted nodes the tree has."}
    )
    k: Annotated[int, Ge(1), Le(64)] = field(
        default=8, metadata={"help": "With mode=tree: how many tokens of a place may be in the tree, the best ones."}
    )
    sample: Literal["on", "off"] = field(
        default="off",
        metadata={"help": "Where tokens are sampled, with mode=chain: draw drafts from the places' distributions."},
    )

    def check_together(self) -> None:
        """A tree is not drawn."""
        if self.sample == "on" and self.mode == "tree":
            raise UserError(f"{self.owner}: sample=on draws a chain: it does not go with mode=tree")
