"""How often heads guess right on text: what an auto tree is built from (Medusa sec. 2.3.3). Knows no kind of head."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from specbench_ss.methods.together import Budget, Machine, Text
from specbench_ss.methods.training import Anchors, BaseStates, Batch, Trainee, base_states
from specbench_ss.target import Target

TOP = 10  # guesses of a head that a tree may hold


class HeadsTrainee(Trainee):
    """Heads in training, or trained ones to be measured."""

    @abstractmethod
    def guesses(self, states: BaseStates, anchors: Anchors, top: int) -> Tensor:
        """The best `top` tokens of every head at the anchors, int64 [n, B*A, top].

        Heads that read earlier drafted tokens are given the text's.
        """

    def seen(self, target: Target, batch: Batch) -> BaseStates:
        """The states that the heads read, of a whole batch."""
        return base_states(target, batch.ids, self.taps, target.n_layers, batch.documents)


def mean_accuracies(
    target: Target, trainee: HeadsTrainee, text: Text, budget: Budget, batches: int, machine: Machine | None = None
) -> list[list[float]]:
    """Accuracies [head][rank] over some batches of text, held out where there is some."""
    trainee.module.eval()
    hits, seen = torch.zeros(()), torch.zeros(())
    for step in range(batches):
        batch = text.batch(step, budget, target.device)
        with (machine or Machine(target.device)).autocast(), torch.no_grad():
            states = trainee.seen(target, batch)
            guesses = trainee.guesses(states, batch.anchors, min(TOP, target.vocab_size))  # [n, B*A, top]
        labels = batch.anchors.labels[..., 1 : len(guesses) + 1].flatten(0, 1).T  # [n, B*A]
        hits = hits + (guesses == labels[..., None]).sum(1).cpu()
        seen = seen + (labels != -100).sum(1).cpu()
    return [[round(x, 4) for x in row] for row in (hits / seen.clamp_min(1)[:, None]).tolist()]
