"""Options of `hydra`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from specbench_ss.methods._shared.heads_options import HeadsOptions


@dataclass(frozen=True, slots=True)
class HydraOptions(HeadsOptions):
    """Options of `hydra`."""

    owner: ClassVar[str] = "hydra"
    accept: Literal["exact", "typical"] = field(
        default="exact",
        metadata={
            "help": "Rule by which drafted tokens are accepted where tokens are sampled. typical (Medusa sec. 2.3.1) "
            "is lossy."
        },
    )
