"""Attention masks and positions in training: several documents in a row, and rows drafted at anchors.

A drafted row attends to the text up to its anchor, and to earlier rows of the same anchor. Boolean masks are True where
a row attends to a key. B: rows of text in a batch, T: tokens of a row, A: anchors of a row.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Documents:
    """Several independent texts per row, as prompts are in decoding.

    document_ids: int64 [B, T], index of each token's text, ascending; -1 in padding. position_ids: int64 [B, T],
    position in it.
    """

    document_ids: Tensor
    position_ids: Tensor

    def to(self, device: torch.device) -> Documents:
        """Return a copy of the documents on the device."""
        return Documents(self.document_ids.to(device), self.position_ids.to(device))

    def same(self, at: Tensor, until: int) -> Tensor:
        """Return bool [B, q, until]: True if rows `at` [B, q] and keys 0..until-1 belong to one text."""
        return self.document_ids.gather(1, at)[..., None] == self.document_ids[:, None, :until]

    def masks(self, widths: Iterable[int | None], dtype: torch.dtype) -> dict[int | None, Tensor]:
        """Return {width: additive mask [B, 1, T, T]}, causal within each text. width: a sliding window's, or None."""
        at = torch.arange(self.document_ids.shape[1], device=self.document_ids.device).expand_as(self.document_ids)
        return {w: additive(text_visibility(at, at.shape[1], self, w), dtype) for w in dict.fromkeys(widths)}


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the additive mask [B, 1, q, k] of a bool mask [B, q, k]."""
    return torch.zeros(visible.shape, device=visible.device, dtype=dtype).masked_fill_(
        ~visible, torch.finfo(dtype).min
    )[:, None]


def text_visibility(
    at: Tensor, t: int, documents: Documents | None = None, window: int | None = None, steps: Tensor | int = 0
) -> Tensor:
    """Return the mask bool [B, q, t] of rows at anchors `at` int64 [B, q] over the first t tokens of the text.

    A row attends to the tokens up to its anchor, of the same document, and with a sliding window to those less than
    `window` positions before its own. steps: int64 [q], positions of the rows relative to their anchors.
    """
    keys = torch.arange(t, device=at.device)
    visible = keys <= at[..., None]
    if documents is not None:
        visible = visible & documents.same(at, t)
    if window is not None:
        visible = visible & ((at + steps)[..., None] - keys < window)
    return visible


def group_visibility(within: Tensor, groups: int) -> Tensor:
    """Return the mask bool [groups * n, groups * n] of groups of n rows. within: bool [n, n], the mask of one group."""
    return torch.kron(torch.eye(groups, dtype=torch.bool, device=within.device), within)


def draft_visibility(
    at: Tensor, steps: Tensor, t: int, documents: Documents | None = None, window: int | None = None
) -> Tensor:
    """Return the mask bool [B, A * n, t + A * n] of n drafted rows at each anchor `at` int64 [B, A].

    Keys are the t tokens of the text, then the drafted rows. Row i of an anchor attends to the text as in
    `text_visibility`, and to rows 0..i of the anchor. steps: int64 [n], positions of the rows relative to the anchor.
    """
    n, anchors = len(steps), at.shape[1]
    text = text_visibility(at.repeat_interleave(n, 1), t, documents, window, steps.repeat(anchors))
    within = torch.ones(n, n, dtype=torch.bool, device=at.device).tril()
    if window is not None:
        within = within & (steps[:, None] - steps < window)
    return torch.cat((text, group_visibility(within, anchors).expand(len(at), -1, -1)), 2)


def draft_positions(at: Tensor, steps: Tensor, context_length: int) -> Tensor:
    """Return the positions int64 [.., m * n] of rows `steps` int64 [n] after positions `at` int64 [.., m].

    They are at most the last position of the model's context.
    """
    return (at[..., None] + steps).clamp_max(context_length - 1).flatten(-2)
