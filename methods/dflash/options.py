"""Options of `dflash`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from annotated_types import Ge, Le

from specbench_ss.methods._shared.place_options import PlaceOptions

MOST_BLOCK = 256  # places of a block; 16 are the most that were published


@dataclass(frozen=True, slots=True)
class DFlashOptions(PlaceOptions):
    """How a block is drafted, and what is verified of it. Raises UserError for values that do not go together."""

    owner: ClassVar[str] = "dflash"
    block_size: Annotated[int, Ge(0), Le(MOST_BLOCK)] = field(
        default=0,
        metadata={"help": "Places of a block, the root's included; at most as many as were trained. 0: as trained."},
    )
