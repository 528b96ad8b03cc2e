"""Batches and texts made by hand, for what trainers learn from."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.training.batch import Anchors, Batch
from specbench_ss.training.data import TrainingRows
from specbench_ss.training.loop import PackedText
from specbench_ss.training.masks import Documents


def answers_of(ids: Tensor, first: int, ahead: int = 3) -> Batch:
    """Rows [R, T] whose answers go from position `first` to the end, with labels for `ahead` tokens after the next."""
    labels = torch.full((*ids.shape, ahead + 1), -100)
    t = ids.shape[1]
    for j in range(ahead + 1):
        labels[:, first - 1 : t - 1 - j, j] = ids[:, first + j :]
    at = torch.arange(first - 1, t - 2).expand(len(ids), -1)
    return Batch(ids, labels, Anchors(at, labels[:, first - 1 : t - 2]))


def batch_of(ids: Tensor, at: Tensor, documents: Documents | None = None, ahead: int = 5) -> Batch:
    """Anchors at [B, A]; every token of a row counts as answer."""
    b, t = ids.shape
    labels = torch.full((b, t, 1 + ahead), -100)
    for j in range(1 + ahead):
        labels[:, : t - 1 - j, j] = ids[:, 1 + j :]
    chosen = labels.gather(1, at[..., None].expand(-1, -1, 1 + ahead))
    return Batch(ids, labels, Anchors(at, chosen), documents)


def plain_text(ids: NDArray[np.int32], answer: NDArray[np.bool_], seed: int = 0) -> PackedText:
    """Rows [R, T] of one text each. answer: True inside answers, broadcast to the rows."""
    mask = np.broadcast_to(answer, ids.shape).copy()
    return PackedText(TrainingRows(ids, mask, np.zeros(ids.shape, np.int32)), seed, plain=True)


def text_of(target: Target) -> PackedText:
    """The target's own answers to single tokens, after a prompt of one."""
    rows = [[i, *generate(Autoregressive(target), [i], StopParams(23), SamplingParams()).tokens] for i in range(3, 19)]
    return plain_text(np.array(rows, np.int32), np.arange(len(rows[0])) > 0, 1)
