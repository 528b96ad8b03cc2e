"""The training of one drafter, with a log of every step's loss, evaluations on held-out text, and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from specbench_ss.decoding.target import Target
from specbench_ss.files import crash_safe, records
from specbench_ss.training.processes import Processes
from specbench_ss.training.resumable import digest
from specbench_ss.training.side_by_side import Budget, Outcome, TogetherTrainer
from specbench_ss.training.text.packed_batches import PackedText
from specbench_ss.training.trainee import Trainee

LOG = "training.jsonl"
JUDGED_ROWS = 64  # of the held-out text, at most, in one look


def estimated_tau(right: Sequence[float]) -> float:
    """Return 1 + a_1 + a_1 a_2 + ... for top-1 shares a_j: a chain's tokens per pass if guesses were independent."""
    products: list[float] = list(accumulate(right, mul))
    return 1 + sum(products)


class _LogLine(msgspec.Struct):
    """The fields of a line of training.jsonl that resuming needs."""

    step: int


class DrafterTraining(TogetherTrainer):
    """Trains one drafter. `training.jsonl` has a line for each step; after a cut it ends where the checkpoint does."""

    def __init__(
        self,
        target: Target,
        trainee: Trainee,
        text: PackedText,
        held_out: PackedText,
        budget: Budget,
        folder: Path,
        processes: Processes,
        eval_every: int,
        about: Mapping[str, Any],
    ) -> None:
        self.processes, self.held_out, self.eval_every = processes, held_out, eval_every
        masked = {"completions": digest(text.packed.mask), "documents": digest(text.packed.documents)}
        super().__init__(target, [trainee], text, budget, folder, processes, {**about, **masked})
        self.log_file = folder / LOG
        if processes.first:
            crash_safe.cut(self.log_file, records.decoder(_LogLine), lambda line: line.step <= self.step)
        if not self.resumed:
            processes.alike(trainee.module)
        processes.wait()

    @property
    def trainee(self) -> Trainee:
        """The one drafter that is trained."""
        return self.trainees[0]

    def advance(self) -> str:
        """Take one step and log it."""
        said = super().advance()
        line = {"step": self.step, "tokens": self.step * self.tokens_per_step, **_numbers(self.outcomes)}
        if self.step % self.eval_every == 0 or self.step == self.total:
            held_out = self.judge()
            if held_out is not None:
                tau = estimated_tau(held_out.right)
                line |= {"held_out_loss": held_out.loss, "held_out_right": held_out.right, "estimated_tau": tau}
                said += f"; held out: loss {held_out.loss:.3f}, estimated tau {tau:.2f}"
        if self.processes.first:
            with self.log_file.open("ab", buffering=0) as file:
                crash_safe.append(file, [line])
        return said

    @torch.no_grad()
    def judge(self) -> Outcome | None:
        """Return loss and shares of right guesses on held-out rows, as one batch; None where nothing is held out.

        The rows are always the same.
        """
        count, n = min(len(self.held_out.rows), JUDGED_ROWS), self.budget.rows_per_step
        if not count:
            return None
        rng = np.random.default_rng(self.held_out.seed)
        whole = self.held_out.chosen(np.arange(count), self.budget, rng).to(self.target.device)
        outcomes = []
        for start in range(0, count, n):  # as many rows at a time as in a step: there is memory for that
            batch = whole.rows(slice(start, start + n))
            with self.processes.autocast():
                loss, right = self.trainee.loss(self._states(batch), batch)
            outcomes.append(torch.cat((loss[None], right)))
        total = torch.stack(outcomes).sum(0).tolist()
        return Outcome(total[0], tuple(total[1:]))

    def save(self) -> None:
        """Have the first process write the checkpoint while the others wait."""
        if self.processes.first:
            super().save()
        self.processes.wait()


def _numbers(outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    (outcome,) = outcomes.values()
    return {"loss": outcome.loss, "right": outcome.right}
