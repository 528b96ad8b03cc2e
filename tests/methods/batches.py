"""Batches made by hand, for what trainers learn from."""

from __future__ import annotations

import torch
from torch import Tensor

from specbench_ss.training.batch import Anchors, Batch


def answers_of(ids: Tensor, first: int, ahead: int = 3) -> Batch:
    """Rows [R, T] whose answers go from position `first` to the end, with labels for `ahead` tokens after the next."""
    labels = torch.full((*ids.shape, ahead + 1), -100)
    t = ids.shape[1]
    for j in range(ahead + 1):
        labels[:, first - 1 : t - 1 - j, j] = ids[:, first + j :]
    at = torch.arange(first - 1, t - 2).expand(len(ids), -1)
    return Batch(ids, labels, Anchors(at, labels[:, first - 1 : t - 2]))
