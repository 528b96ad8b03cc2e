"""The training of drafters, with a log of every step's loss, evaluations on held-out text, and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from specbench_ss import storage, user_files
from specbench_ss.engine.target import Target
from specbench_ss.training.processes import Processes
from specbench_ss.training.resumable import digest
from specbench_ss.training.side_by_side import Budget, Outcome, Text, TogetherTrainer
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


@dataclass(frozen=True, slots=True)
class Trained:
    """One drafter of a training. total: steps. tokens_per_step: of all processes. log_file: its training.jsonl."""

    trainee: Trainee
    target: Target
    text: Text
    held_out: PackedText
    budget: Budget
    processes: Processes
    total: int
    tokens_per_step: int
    log_file: Path


class DrafterTraining(TogetherTrainer):
    """Trains drafters side by side, each with a folder for its log, the checkpoint of all being in `folder`.

    `training.jsonl` has a line for each step; after a cut it ends where the checkpoint does.
    """

    def __init__(
        self,
        target: Target,
        trainees: Mapping[Path, Trainee],
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
        super().__init__(target, list(trainees.values()), text, budget, folder, processes, {**about, **masked})
        self.logs = [place / LOG for place in trainees]
        for log in self.logs if processes.first else ():
            log.parent.mkdir(parents=True, exist_ok=True)
            storage.cut(log, user_files.decoder(_LogLine), lambda line: line.step <= self.step)
        if not self.resumed:
            for trainee in self.trainees:
                processes.alike(trainee.module)
        processes.wait()

    @property
    def parts(self) -> list[Trained]:
        """Return every drafter, in order."""
        shared = (self.target, self.text, self.held_out, self.budget, self.processes, self.total, self.tokens_per_step)
        return [Trained(t, *shared, log) for t, log in zip(self.trainees, self.logs, strict=True)]

    def advance(self) -> str:
        """Take one step and log it."""
        said = super().advance()
        judged: Mapping[str, Outcome] = {}
        if self.step % self.eval_every == 0 or self.step == self.total:
            judged = self.judge()
        for trainee, log in zip(self.trainees, self.logs, strict=True):
            learnt = self.outcomes[trainee.name]
            line: dict[str, Any] = {"step": self.step, "tokens": self.step * self.tokens_per_step}
            line |= {"loss": learnt.loss, "right": learnt.right}
            if held_out := judged.get(trainee.name):
                tau = estimated_tau(held_out.right)
                line |= {"held_out_loss": held_out.loss, "held_out_right": held_out.right, "estimated_tau": tau}
                whose = f"{trainee.name} " if len(self.trainees) > 1 else ""
                said += f"; held out: {whose}loss {held_out.loss:.3f}, estimated tau {tau:.2f}"
            if self.processes.first:
                with log.open("ab", buffering=0) as file:
                    storage.append(file, [line])
        return said

    @torch.no_grad()
    def judge(self) -> dict[str, Outcome]:
        """Return each drafter's loss and shares of right guesses on held-out rows, taken as one batch.

        The rows are always the same. Where none are held out there is nothing.
        """
        count, n = min(len(self.held_out.rows), JUDGED_ROWS), self.budget.rows_per_step
        if not count:
            return {}
        rng = np.random.default_rng(self.held_out.seed)
        whole = self.held_out.chosen(np.arange(count), self.budget, rng).to(self.target.device)
        sums: dict[str, Tensor | float] = dict.fromkeys((t.name for t in self.trainees), 0.0)
        for start in range(0, count, n):  # as many rows at a time as in a step: there is memory for that
            batch = whole.rows(slice(start, start + n))
            with self.processes.autocast():
                states = self.states(batch)
                for trainee in self.trainees:
                    loss, right = trainee.loss(states, batch)
                    sums[trainee.name] = sums[trainee.name] + torch.cat((loss[None], right))
        totals = {name: total.tolist() for name, total in sums.items() if isinstance(total, Tensor)}
        return {name: Outcome(total[0], tuple(total[1:])) for name, total in totals.items()}

    def save(self) -> None:
        """Have the first process write the checkpoint while the others wait."""
        if self.processes.first:
            super().save()
        self.processes.wait()
