"""Options of DFlash and P-EAGLE."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Le

from specbench_ss.engine.tree import MOST_NODES
from specbench_ss.errors import UserError
from specbench_ss.options import Bounded

MOST_BLOCK = 256  # positions of a DFlash block; 16 are the most that were published
DEPTHS = 8  # draft positions of published P-EAGLE drafters
MOST_DEPTHS = 64


@dataclass(frozen=True, slots=True)
class BlockDraftOptions(Bounded):
    """Options of both methods. Raises UserError for values that do not go together."""

    weights: str = field(
        default="", metadata={"help": "Folder, file or hub id of the drafter. Empty: the one that came with the model."}
    )
    mode: Literal["chain", "tree"] = field(
        default="chain",
        metadata={
            "help": "Draft shape. chain: the top token of each position, as published. tree: the nodes with the "
            "greatest product of the positions' probabilities, which is this project's addition."
        },
    )
    nodes: Annotated[int, Ge(1), Le(MOST_NODES)] = field(
        default=31, metadata={"help": "With mode=tree: number of drafted nodes of the tree."}
    )
    k: Annotated[int, Ge(1), Le(64)] = field(
        default=8, metadata={"help": "With mode=tree: most candidates of a position, the best ones."}
    )
    sample: Literal["on", "off"] = field(
        default="off",
        metadata={"help": "With sampling and mode=chain: draw drafts from the positions' distributions."},
    )

    def check_together(self) -> None:
        """Raise UserError for a sampled tree."""
        if self.sample == "on" and self.mode == "tree":
            raise UserError(f"{self.owner}: sample=on draws a chain: it does not go with mode=tree")


@dataclass(frozen=True, slots=True)
class DFlashOptions(BlockDraftOptions):
    """Options of `dflash`."""

    owner: ClassVar[str] = "dflash"
    block_size: Annotated[int, Ge(0), Le(MOST_BLOCK)] = field(
        default=0,
        metadata={"help": "Positions of a block, the root's included; at most as many as were trained. 0: as trained."},
    )


@dataclass(frozen=True, slots=True)
class PEagleOptions(BlockDraftOptions):
    """Options of `peagle`."""

    owner: ClassVar[str] = "peagle"
    depths: Annotated[int, Ge(0), Le(MOST_DEPTHS)] = field(
        default=0, metadata={"help": "Tokens drafted a step; at most as many as were trained. 0: as trained."}
    )
