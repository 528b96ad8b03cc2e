"""Options of `medusa`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from specbench_ss.methods._shared.heads_options import LOSSY, HeadsOptions


@dataclass(frozen=True, slots=True)
class MedusaOptions(HeadsOptions):
    """Options of `medusa`."""

    accept: Literal["exact", "typical", "nucleus"] = field(  # type: ignore[assignment]
        default="exact", metadata={"help": f"{LOSSY}, or nucleus (rows judged one by one)"}
    )
