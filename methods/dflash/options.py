"""Options of `dflash`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Le

from specbench_ss.decoding.tree import MOST_NODES
from specbench_ss.errors import UserError
from specbench_ss.options import Bounded

MOST_BLOCK = 256  # places of a block; 16 are the most that were published


@dataclass(frozen=True, slots=True)
class DFlashOptions(Bounded):
    """How a block is drafted, and what is verified of it. Raises UserError for values that do not go together."""

    owner: ClassVar[str] = "dflash"
    weights: str = field(
        default="", metadata={"help": "Folder, file or hub id of the drafter. Empty: the one that came with the model."}
    )
    block_size: Annotated[int, Ge(0), Le(MOST_BLOCK)] = field(
        default=0,
        metadata={"help": "Places of a block, the root's included; at most as many as were trained. 0: as trained."},
    )
    mode: Literal["chain", "tree"] = field(
        default="chain",
        metadata={
            "help": "What of a block is verified. chain: the best token of every place, as published. tree: the nodes "
            "with the greatest product of the places' probabilities, which is this project's addition."
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
            raise UserError("dflash: sample=on draws a chain: it does not go with mode=tree")
