"""Options of `peagle`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from annotated_types import Ge, Le

from specbench_ss.methods._shared.place_options import PlaceOptions

DEPTHS = 8  # that are published
MOST_DEPTHS = 64


@dataclass(frozen=True, slots=True)
class PEagleOptions(PlaceOptions):
    """How far is drafted, and what is verified of it. Raises UserError for values that do not go together."""

    owner: ClassVar[str] = "peagle"
    depths: Annotated[int, Ge(0), Le(MOST_DEPTHS)] = field(
        default=0, metadata={"help": "Tokens drafted a step; at most as many as were trained. 0: as trained."}
    )
