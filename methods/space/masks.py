"""The mask token: k of them behind a token predict the k tokens after the next one. Knows no decoding."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.methods.space.rows import MASKS


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
