"""Losses and counts of right guesses, of drafters and of small language models. Knows arrays, no method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    pass


def weighted_loss(logits: Tensor, labels: Tensor, weights: Tensor, whole: Tensor | None = None) -> Tensor:
    """Cross-entropy [B, T, V] against [B, T], averaged with per-token weights [B, T].

    whole: the weights of the batch that these are a share of.
    """
    loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none")
    return (loss * weights.flatten()).sum() / (weights if whole is None else whole).sum().clamp_min(1e-6)


def head_sums(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """logits [.., ahead, V], labels [.., ahead] -> sums of cross-entropy [ahead] and of right top-1 guesses [ahead]."""
    ahead, vocab = logits.shape[-2:]
    flat = labels.reshape(-1, ahead)
    losses = F.cross_entropy(logits.reshape(-1, vocab).float(), flat.flatten(), ignore_index=-100, reduction="none")
    right = logits.detach().argmax(-1).reshape(-1, ahead) == flat
    return losses.view(-1, ahead).sum(0), right.sum(0)


def mean_loss(sums: tuple[Tensor, Tensor], labels: Tensor, weights: Sequence[float]) -> tuple[Tensor, Tensor]:
    """(weighted sum of mean cross-entropies, share right [ahead]) from sums; means over labels [.., ahead].

    labels: those that were summed over, or where that was a share of a batch, all of the batch's.
    """
    known = (labels.reshape(-1, labels.shape[-1]) != -100).sum(0).clamp_min(1)
    total = (sums[0] / known * torch.tensor(weights, device=known.device)).sum()
    return total, sums[1] / known


def head_loss(
    logits: Tensor, labels: Tensor, weights: Sequence[float], whole: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """logits [.., ahead, V], labels [.., ahead] -> (weighted sum of mean cross-entropies, share right [ahead]).

    whole: labels of the batch that these are a share of.
    """
    return mean_loss(head_sums(logits, labels), labels if whole is None else whole, weights)
