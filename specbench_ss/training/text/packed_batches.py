"""Batches of packed rows in which every conversation stands alone.

This module knows rows, but not where they come from.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from specbench_ss.training.batches import Batch, Documents, future_labels, pick_anchors
from specbench_ss.training.side_by_side import Budget
from specbench_ss.training.text.rows import TrainingRows, positions

NO_END = -1  # completions end where their mask does, not at a token


@dataclass(frozen=True, slots=True)
class PackedText:
    """Rows to train on or to evaluate on."""

    packed: TrainingRows
    seed: int = 0

    @property
    def rows(self) -> NDArray[np.int32]:
        """Return token ids int32 [R, T]."""
        return self.packed.ids

    def batch(self, step: int, budget: Budget, device: torch.device) -> Batch:
        """Return the batch of a step. Every pass over the text takes each row once, in an order of its own."""
        n, r = budget.rows_per_step, len(self.rows)
        rng = np.random.default_rng((self.seed, step))
        epochs, places = np.divmod(np.arange(step * n, (step + 1) * n), r)
        orders = {e: np.random.default_rng((self.seed, e, 1)).permutation(r) for e in np.unique(epochs).tolist()}
        rows = np.array([orders[e][i] for e, i in zip(epochs.tolist(), places.tolist(), strict=True)])
        return self.chosen(rows, budget, rng).to(device)

    def chosen(self, rows: NDArray[np.int64], budget: Budget, rng: np.random.Generator) -> Batch:
        """Return a batch of these rows."""
        ids = self.packed.ids[rows].astype(np.int64)
        numbers = self.packed.documents[rows].astype(np.int64)
        labels = future_labels(ids, np.asarray(self.packed.mask[rows]), NO_END, budget.ahead)
        documents = Documents(torch.from_numpy(numbers), torch.from_numpy(positions(self.packed.documents[rows])))
        anchors = pick_anchors(labels, budget.anchors_per_row, rng)
        return Batch(torch.from_numpy(ids), torch.from_numpy(labels), anchors, documents)
