"""Options of `medusa` and `medusa2`."""

from __future__ import annotations

from dataclasses import dataclass

from specbench_ss.methods._shared.heads_options import HeadsOptions


@dataclass(frozen=True, slots=True)
class MedusaOptions(HeadsOptions):
    """Options of `medusa` and `medusa2`."""
