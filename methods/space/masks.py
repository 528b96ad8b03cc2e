"""Mask tokens: k of them behind a token predict the k tokens after the next one. Knows rows, no decoding.

Row j of a group stands where the token j places on will stand, sees all that the token sees, itself included, and rows
1..j of its own group: so rows and groups are a tree, and positions and visibility follow from it.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn

from specbench_ss.decoding.target import Target
from specbench_ss.decoding.tree import TreeShape, shape_of
from specbench_ss.errors import UserError

MASKS = 5  # as published


class MaskToken(nn.Module):
    """The learnt embedding of the mask, as an offset [h] from that of the token `mask_id`.

    A model with a mask of its own in its vocabulary has no offset: zero.
    """

    def __init__(self, hidden: int, masks: int = MASKS, mask_id: int = 0) -> None:
        super().__init__()
        if masks < 1:
            raise UserError(f"space: masks must be at least 1, not {masks}")
        self.offset = nn.Parameter(torch.zeros(hidden))
        self.masks, self.mask_id = masks, mask_id

    def embed(self, target: Target, ids: Tensor, positions: Tensor, masks: int) -> Tensor:
        """Rows ids [B, q] and behind them `masks` mask rows, at positions [B, q + masks] -> [B, q + masks, h]."""
        tokens = torch.cat((ids, ids.new_full((ids.shape[0], masks), self.mask_id)), 1)
        x = target.embed(tokens, positions)
        return torch.cat((x[:, : ids.shape[1]], x[:, ids.shape[1] :] + self.offset.to(x.dtype)), 1)


@lru_cache(maxsize=64)
def rows_of(nodes: int, masks: int) -> TreeShape:
    """A chain of `nodes` tokens, then the group of each: node 0's masks, node 1's, ..."""
    chain = range(-1, nodes - 1)
    first = (nodes + g * masks for g in range(nodes))
    groups = ((g, *range(start, start + masks - 1)) for g, start in enumerate(first))
    return shape_of((*chain, *(parent for group in groups for parent in group)))
