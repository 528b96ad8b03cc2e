"""What a place of a block sees: of the context before the block, and of the block's other places. Knows no drafter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sight:
    """Of one layer. By default a place sees all of the context and all of its block.

    window: how far back a place sees, None = to the beginning. from_root: the window is counted from the block's root
    (as speculators does), not from the place itself (as z-lab does). causal: of its block it sees no later place.
    """

    window: int | None = None
    from_root: bool = False
    causal: bool = False

    @property
    def everything(self) -> bool:
        """Whether there is nothing to hide."""
        return self.window is None and not self.causal

    def context(self, root: Tensor, size: int, keys: Tensor) -> Tensor:
        """Bool [.., size, K]: which positions keys [K] the places of a block see whose root is at root [..].

        Keys at or behind the root are none of the context; they are never seen.
        """
        places = torch.arange(size, device=keys.device)
        before = (keys < root[..., None, None]).expand(*root.shape, size, len(keys))
        if self.window is None:
            return before
        near = root[..., None] - self.window if self.from_root else root[..., None] + places - self.window + 1
        return before & (keys >= near[..., None])

    def block(self, size: int, device: torch.device) -> Tensor:
        """Bool [size, size]: which places of its block each place sees."""
        places = torch.arange(size, device=device)
        back = places[:, None] - places  # how far the other place lies back
        seen = back >= 0 if self.causal else torch.ones_like(back, dtype=torch.bool)
        return seen if self.window is None or self.from_root else seen & (back.abs() < self.window)
