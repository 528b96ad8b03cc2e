"""Training Medusa-1 heads: cross-entropy of head i on the token i + 2 ahead, weight 0.8^i (Medusa sec. 2.2.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from specbench_ss.methods.medusa.heads import MedusaHeads
from specbench_ss.methods.together import Budget, Machine, Text
from specbench_ss.methods.training import Anchors, BaseStates, Batch, Trainee, base_states, head_loss
from specbench_ss.target import Target


class MedusaTrainee(Trainee):
    """Heads that start as copies of the base's LM head behind an identity block."""

    name = "medusa"

    def __init__(self, target: Target, heads: int = 4, lr: float = 1e-3) -> None:
        self.module: MedusaHeads = MedusaHeads(heads, 1, target.hidden_size, target.vocab_size)
        self.shared = target.unembed
        assert self.module.unembed is not None
        self.module.unembed.data.copy_(self.shared.expand_as(self.module.unembed))
        self.lr = lr

    def loss(self, states: BaseStates, batch: Batch) -> tuple[Tensor, Tensor]:
        """Eq. 1-2 of Medusa."""
        x = states.at(states.final, batch.anchors).flatten(0, 1)  # [B*A, h]
        logits = self.module(x, self.shared).transpose(0, 1)  # [B*A, n, V]
        n = self.module.count
        labels, whole = (b.anchors.labels[..., 1 : n + 1].flatten(0, 1) for b in (batch, batch.whole))
        return head_loss(logits, labels, [0.8**i for i in range(n)], whole)

    @torch.no_grad()
    def accuracies(self, states: BaseStates, anchors: Anchors, top: int = 10) -> tuple[Tensor, Tensor]:
        """How often the r-th guess of head i is right: (hits [n, top], positions [n])."""
        n = self.module.count
        logits = self.module(states.at(states.final, anchors).flatten(0, 1), self.shared)  # [n, B*A, V]
        guesses = logits.topk(min(top, logits.shape[-1])).indices  # [n, B*A, top]
        labels = anchors.labels[..., 1 : n + 1].flatten(0, 1).T  # [n, B*A]
        return (guesses == labels[..., None]).sum(1), (labels != -100).sum(1)


def mean_accuracies(
    target: Target, medusa: MedusaTrainee, text: Text, budget: Budget, batches: int, machine: Machine | None = None
) -> list[list[float]]:
    """Top-k accuracies [head][rank] over some batches of held-out text: what the auto tree is built from."""
    medusa.module.eval()
    hits, seen = torch.zeros(()), torch.zeros(())
    for step in range(batches):
        batch = text.batch(step, budget, target.device)
        with (machine or Machine(target.device)).autocast(), torch.no_grad():
            states = base_states(target, batch.ids, medusa.taps, target.n_layers, batch.documents)
            new_hits, new_seen = medusa.accuracies(states, batch.anchors)
        hits, seen = hits + new_hits.cpu(), seen + new_seen.cpu()
    return [[round(x, 4) for x in row] for row in (hits / seen.clamp_min(1)[:, None]).tolist()]
