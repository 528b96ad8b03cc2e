"""How often a drafter's r-th guess for a draft position is right. Automatic trees are built from these accuracies.

This module knows no method by name.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from specbench_ss.engine.target import Target
from specbench_ss.training.batches import Anchors, Batch
from specbench_ss.training.side_by_side import Budget, Machine, Text
from specbench_ss.training.trainee import BaseStates, base_states

TOP = 10  # guesses of a level that are looked at


class Guesser(Protocol):
    """A trainee whose guesses can be ranked."""

    @property
    def module(self) -> nn.Module:
        """Return the module that has learnt."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Return the layers of the base whose inputs it needs."""

    def accuracies(self, states: BaseStates, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return (hits [levels, top], positions [levels]): how often a level's r-th guess is right, out of how many.

        The tokens before the guessed one are those of the text.
        """


def ranked(guesses: Tensor, anchors: Anchors) -> tuple[Tensor, Tensor]:
    """Compare guesses [levels, B*A, top] with the tokens after the next one.

    Return (hits [levels, top], positions [levels]).
    """
    labels = anchors.labels[..., 1 : len(guesses) + 1].flatten(0, 1).T  # [levels, B*A]
    return (guesses == labels[..., None]).sum(1), (labels != -100).sum(1)


def mean_accuracies(
    target: Target, trainee: Guesser, text: Text, budget: Budget, batches: int, machine: Machine | None = None
) -> list[list[float]]:
    """Return top-k accuracies [level][rank] over some batches of held-out text."""
    trainee.module.eval()
    hits, seen = torch.zeros(()), torch.zeros(())
    for step in range(batches):
        batch = text.batch(step, budget, target.device)
        with (machine or Machine(target.device)).autocast(), torch.no_grad():
            states = base_states(target, batch.ids, trainee.taps, target.n_layers, batch.documents)
            new_hits, new_seen = trainee.accuracies(states, batch)
        hits, seen = hits + new_hits.cpu(), seen + new_seen.cpu()
    return [[round(x, 4) for x in row] for row in (hits / seen.clamp_min(1)[:, None]).tolist()]
