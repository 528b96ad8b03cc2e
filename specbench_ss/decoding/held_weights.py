"""How a target whose linear layers are held in fewer bits than they are computed with says so, and has others held so.

Knows neither formats nor packages: `models/quantising.py` does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """How the weights of a target's linear layers are held.

    words: what was done, for the record. hold: does the same to another model, in place, and returns the words;
    raises UserError where it cannot. reread: returns the target's model as it was published; None: nobody can.
    """

    words: str
    hold: Callable[[Any], str]
    reread: Callable[[], Any] | None = None

    def of_another(self, model: Any) -> HeldWeights:
        """Hold another model's weights in the same way, in place. Raises UserError where that cannot be."""
        return replace(self, words=self.hold(model), reread=None)


def holds_numbers(weight: Tensor) -> bool:
    """Say whether a parameter is a tensor of numbers, and not of a class that holds them in fewer bits."""
    plain = type(weight) is torch.nn.Parameter and type(weight.data) is torch.Tensor
    return plain and weight.is_floating_point()
