"""`ssbench train mtp`: an MTP head on the frozen base, trained for recursive drafts (FastMTP, arXiv:2509.18362).

Step k is a dense pass over whole rows: row t reads the true token x_{t+k} and the state of step k - 1, whose gradient
flows through, and predicts x_{t+k+1}. All steps have the same positions, and keys and values of their own. In decoding
a drafted row attends to rows of step 1 and to the drafts before it; EAGLE-3's training-time test has that mix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from specbench_ss.engine.target import FINAL, Target
from specbench_ss.methods.eagle.drafter import MOST_DEPTH
from specbench_ss.methods.eagle.train import UnrolledTrainer, causal_mask
from specbench_ss.methods.mtp.checkpoint import config_of
from specbench_ss.methods.mtp.heads import MTPDrafter, new_head
from specbench_ss.models.checkpoint import write_checkpoint
from specbench_ss.options import Bounded, option
from specbench_ss.training.batch import BaseStates, Batch
from specbench_ss.training.losses import LossKind, loss_option


@dataclass(frozen=True, slots=True)
class MTPTraining(Bounded):
    """Options of `ssbench train mtp`."""

    owner: ClassVar[str] = "mtp"
    num_speculative_tokens: Annotated[int, Ge(1), Le(MOST_DEPTH)] = option(
        3, "Number of recursive steps, and of drafted tokens."
    )
    beta: Annotated[float, Gt(0)] = option(0.6, "Weight of a step's loss relative to the step before it.")
    loss: LossKind = loss_option("ce")


class MTPTrainer(UnrolledTrainer):
    """Trainer of one MTP head; the base's embedding and LM head stay frozen."""

    name = "mtp"
    summary = "an MTP head on the frozen base, trained for recursive drafts (FastMTP)"
    method = "mtp"
    Options = MTPTraining
    lr = 3e-4
    module: MTPDrafter

    def __init__(self, target: Target, options: Any = None, lr: float | None = None) -> None:
        super().__init__(target, options, lr)
        head = new_head(target).to(target.device)
        self.config = {}
        self.use(head, (FINAL,), head.config, self.options.num_speculative_tokens)

    def unrolled(self, features: list[Tensor], batch: Batch, levels: int) -> Iterator[Tensor]:
        """Yield output states [B, A, h] at the anchors, step after step; step j of anchor t predicts x_{t+2+j}."""
        at = batch.anchors.at
        slots = torch.arange(batch.ids.shape[1], device=at.device).expand(len(at), -1)
        state, mask = self.module.fuse(features), causal_mask(batch)
        for j in range(levels):
            state = self.run_slots(batch, slots, batch.positions, state, None, j, mask)
            yield state.gather(1, at[..., None].expand(-1, -1, state.shape[-1]))

    def loss(self, states: BaseStates, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the sum of the steps' losses with the weights beta^j, normalised to sum 1."""
        weights = [self.options.beta**j for j in range(self.ahead)]
        return self.unrolled_loss(states, batch, [w / sum(weights) for w in weights])

    def save(self, folder: Path, about: dict[str, Any]) -> None:
        """Write the folder in speculators' layout."""
        write_checkpoint(folder, self.module, {**config_of(self.module.config, self.ahead, self.target), **about})
