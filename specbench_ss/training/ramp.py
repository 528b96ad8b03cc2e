"""A weight of a loss that rises from nothing, so that new parts do not distort what was trained before them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class Ramp(nn.Module):
    """sin(pi/2 * t / steps), then 1; t is saved with the weights (Medusa sec. 2.2.2)."""

    updates: Tensor

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.register_buffer("updates", torch.zeros((), dtype=torch.long))

    def forward(self) -> float:
        """Of the next update. Where no gradient is made it is 1, so that held-out losses of all steps compare."""
        if not torch.is_grad_enabled():
            return 1.0
        t = int(self.updates)
        self.updates += 1
        return math.sin(math.pi / 2 * min(1.0, t / self.steps)) if self.steps else 1.0
