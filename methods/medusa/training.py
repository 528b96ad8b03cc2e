"""Training Medusa-1 heads: cross-entropy of head i on the token i + 2 ahead, weight 0.8^i (Medusa sec. 2.2.1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specbench_ss.engine.target import Target
from specbench_ss.methods.medusa.heads import MedusaHeads
from specbench_ss.training.batches import Anchors, Batch
from specbench_ss.training.guess_accuracy import TOP, ranked
from specbench_ss.training.losses import head_loss
from specbench_ss.training.targets import Targets, told_targets
from specbench_ss.training.trainee import BaseStates, Trainee

DECAY = 0.8


def new_heads(target: Target, heads: int, own_unembed: bool = True) -> MedusaHeads:
    """Heads that start as the base's LM head behind an identity block."""
    made = MedusaHeads(heads, 1, target.hidden_size, target.vocab_size, own_unembed)
    if made.unembed is not None:
        made.unembed.data.copy_(target.unembed.expand_as(made.unembed))
    return made


def config_of(heads: MedusaHeads) -> dict[str, Any]:
    """As published configs have it."""
    return {"medusa_num_heads": heads.count, "medusa_num_layers": heads.weight.shape[1]}


def heads_loss(
    heads: MedusaHeads,
    x: Tensor,
    shared: Callable[[Tensor], Tensor],
    batch: Batch,
    teacher: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Eq. 1-2 of Medusa on states x [B, A, h] at the anchors. shared: the LM head of the model itself.

    teacher: logits [B*A, n, V] of the base, whose distributions are learnt instead of the text.
    """
    logits = heads(x.flatten(0, 1), shared).transpose(0, 1)  # [B*A, n, V]
    n = heads.count
    labels, whole = (b.anchors.labels[..., 1 : n + 1].flatten(0, 1) for b in (batch, batch.whole))
    return head_loss(logits, labels, [DECAY**i for i in range(n)], whole, teacher)


class MedusaTrainee(Trainee):
    """Heads on the frozen base. heads: how many new ones, or those that there are. targets: published is the text."""

    name = "medusa"

    def __init__(
        self,
        target: Target,
        heads: int | MedusaHeads = 4,
        lr: float = 1e-3,
        own_unembed: bool = True,
        targets: Targets = "tokens",
    ) -> None:
        self.module: MedusaHeads = new_heads(target, heads, own_unembed) if isinstance(heads, int) else heads
        self.config = config_of(self.module)
        self.shared = target.logits
        self.lr, self.targets = lr, targets

    def about(self) -> dict[str, Any]:
        """What the heads learn."""
        return told_targets(self.targets, "tokens")

    def loss(self, states: BaseStates, batch: Batch) -> tuple[Tensor, Tensor]:
        """Of all heads."""
        teacher = None
        if self.targets == "distribution":
            with torch.no_grad():
                teacher = self.shared(states.ahead(batch.anchors.at, self.module.count).flatten(0, 1))
        return heads_loss(self.module, states.at(states.final, batch.anchors), self.shared, batch, teacher)

    @torch.no_grad()
    def accuracies(self, states: BaseStates, batch: Batch) -> tuple[Tensor, Tensor]:
        """(hits [n, top], positions [n])."""
        return heads_accuracies(self.module, states, batch.anchors, self.shared)


def heads_accuracies(
    heads: MedusaHeads, states: BaseStates, anchors: Anchors, shared: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """How often the r-th guess of head i is right: (hits [n, top], positions [n])."""
    logits: Tensor = heads(states.at(states.final, anchors).flatten(0, 1), shared)  # [n, B*A, V]
    return ranked(logits.topk(min(TOP, logits.shape[-1])).indices, anchors)
