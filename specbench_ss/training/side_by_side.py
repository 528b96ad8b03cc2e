"""Train drafters on a frozen base: the base runs once a batch, and any number of trainees learn from its states.

All have the same text, batches and budget, so that they can be compared. This module knows no method by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from specbench_ss.engine.target import Target
from specbench_ss.training.batches import Batch, future_labels, pick_anchors
from specbench_ss.training.resumable import Resumable, digest
from specbench_ss.training.trainee import BaseStates, Trainee, base_states

UNTIL_COOLDOWN = "at its peak until a cooldown"
SCANNED = 1000  # batches, at most, that a trainee may look through before it begins


@dataclass(frozen=True, slots=True)
class Budget:
    """How long to train: steps of rows_per_step rows, with anchors_per_row positions that each draft `ahead` tokens.

    cooldown: share of the steps, at the end, over which the learning rate falls from its peak to 0. None: it falls
    along a cosine from the start.
    """

    steps: int
    rows_per_step: int = 8
    anchors_per_row: int = 128
    ahead: int = 4
    warmup: int = 50
    cooldown: float | None = None

    @property
    def falls_from(self) -> int | None:
        """Step at which the cooldown begins. Until there a training does not depend on how long it will be."""
        return None if self.cooldown is None else self.steps - math.ceil(self.cooldown * self.steps)

    def rate(self, step: int) -> float:
        """Return the learning rate of a step (from 0) as a share of the peak."""
        rise = min(1.0, (step + 1) / max(1, self.warmup))
        if self.falls_from is None:
            return rise * (0.5 + 0.5 * math.cos(math.pi * step / self.steps))
        return rise * min(1.0, (self.steps - step) / (self.steps - self.falls_from))

    def about(self) -> dict[str, Any]:
        """Return what trainings agree in of which one goes on where the other stopped, as JSON-ready data."""
        facts = asdict(self)
        del facts["cooldown"]
        if self.cooldown is not None:
            del facts["steps"]
            facts["learning rate"] = UNTIL_COOLDOWN
        return facts


@dataclass(frozen=True, slots=True)
class DrafterText:
    """Packed rows [R, T] and where in them there is something to draft.

    answer_mask: for a row [T], returns True inside answers. end: the token that ends an answer.
    """

    rows: NDArray[np.int32]
    answer_mask: Callable[[NDArray[np.int32]], NDArray[np.bool_]]
    end: int
    seed: int = 0

    def batch(self, step: int, budget: Budget, device: torch.device) -> Batch:
        """Return the batch of a step.

        It depends on seed and step alone, so that a resumed run sees the same batches.
        """
        rng = np.random.default_rng((self.seed, step))
        n = budget.rows_per_step
        epoch, first = divmod(step * n, max(1, len(self.rows) - n + 1))
        order = np.random.default_rng((self.seed, epoch, 1)).permutation(len(self.rows))
        rows = self.rows[np.sort(order[first : first + n])]
        ids = rows.astype(np.int64)
        answer = np.stack([self.answer_mask(r) for r in rows])
        labels = future_labels(ids, answer, self.end, budget.ahead)
        anchors = pick_anchors(labels, budget.anchors_per_row, rng)
        return Batch(torch.from_numpy(ids), torch.from_numpy(labels), anchors).to(device)


class Text(Protocol):
    """Text to train on: rows int32 [R, T], and the batch of any step."""

    @property
    def rows(self) -> NDArray[np.int32]:
        """Return all token ids."""

    @property
    def seed(self) -> int:
        """Seed of the order of batches and of the anchors."""

    def batch(self, step: int, budget: Budget, device: torch.device) -> Batch:
        """Return the batch of a step, which depends on seed and step alone."""


class Machine:
    """Where a step is computed: in this process, on its device.

    exact: in float32 throughout, instead of bfloat16 where autocast allows it.
    """

    def __init__(self, device: torch.device, exact: bool = False) -> None:
        self.device, self.exact = device, exact

    @property
    def count(self) -> int:
        """Number of processes."""
        return 1

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context that sets the precision of forward passes."""
        return nullcontext() if self.exact else torch.autocast(self.device.type, dtype=torch.bfloat16)

    def share(self, batch: Batch) -> Batch:
        """Return the part of a batch that this process computes."""
        return batch

    def gradients(self, loss: Tensor, parameters: Sequence[nn.Parameter]) -> None:
        """Compute the gradients of the whole batch's loss from this share's part of it, and clip them to norm 1."""
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)

    def total(self, value: Tensor) -> Tensor:
        """Return the sum over all processes of what each has found on its share."""
        return value


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a trainee did on a batch: its loss, and the share of right top-1 guesses at each drafted position."""

    loss: float
    right: tuple[float, ...]


class TogetherTrainer(Resumable):
    """Trains several drafters side by side on the same batches. It can be resumed at any step.

    about: further facts that a checkpoint has to agree in. machine: None means this process alone, in bfloat16 by
    autocast.
    """

    def __init__(
        self,
        target: Target,
        trainees: Sequence[Trainee],
        text: Text,
        budget: Budget,
        folder: Path,
        machine: Machine | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self.target, self.trainees, self.text, self.budget = target, trainees, text, budget
        self.machine = machine or Machine(target.device)
        self.outcomes: dict[str, Outcome] = {}  # of the newest step
        for trainee in trainees:
            trainee.module.to(target.device).train()
        optimizers = [torch.optim.AdamW(t.parameter_groups(), weight_decay=0.0) for t in trainees]
        self.peaks = [[group["lr"] for group in o.param_groups] for o in optimizers]
        about = {
            **(about or {}),
            **budget.about(),
            "drafters": [t.name for t in trainees],
            **{f"{t.name}'s {key}": value for t in trainees for key, value in t.about().items()},
            "learning rates": self.peaks,
            "processes": self.machine.count,
            "seed": text.seed,
            "text": digest(text.rows),
            "base": target.weights_hash,
        }
        tokens = budget.rows_per_step * text.rows.shape[1]
        modules, kept = [t.module for t in trainees], budget.falls_from
        super().__init__(folder, modules, optimizers, budget.steps, tokens, about, kept)
        if not self.resumed:
            looked = SCANNED if budget.cooldown else min(budget.steps, SCANNED)  # a longer training looks at the same
            for trainee in trainees:
                trainee.scan(text.batch(s, budget, torch.device("cpu")) for s in range(looked))
            first = text.batch(0, budget, target.device).rows(slice(1))  # of all processes the same
            with self.machine.autocast():
                states = self.states(first)
                for trainee in trainees:
                    trainee.prepare(states, first)

    def agree(self, stops: bool) -> bool:
        """Let all processes stop where one of them is asked to."""
        return bool(self.machine.total(torch.tensor(float(stops), device=self.machine.device)))

    def states(self, batch: Batch) -> BaseStates:
        """Return the states of the base that the trainees ask for."""
        if not any(t.needs_base for t in self.trainees):
            return BaseStates(torch.empty(0), {}, {})
        taps = sorted({layer for t in self.trainees for layer in t.taps})
        lows = [t.kv_from for t in self.trainees if t.kv_from is not None]
        return base_states(self.target, batch.ids, taps, min(lows) if lows else None, batch.documents)

    def _update(self) -> str:
        batch = self.machine.share(self.text.batch(self.step, self.budget, self.target.device))
        with self.machine.autocast():
            states = self.states(batch)
        said = []
        for trainee, optimizer, peaks in zip(self.trainees, self.optimizers, self.peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * self.budget.rate(self.step)
            self.outcomes[trainee.name] = found = self.learn(trainee, optimizer, states, batch)
            shares = " ".join(f"{share:.2f}" for share in found.right)
            said.append(f"{trainee.name} loss {found.loss:.3f} right {shares}")
        return "; ".join(said)

    def learn(self, trainee: Trainee, optimizer: torch.optim.Optimizer, states: BaseStates, batch: Batch) -> Outcome:
        """Take one step of a trainee: loss, gradients, optimizer."""
        with self.machine.autocast():
            loss, right = trainee.loss(states, batch)
        self.machine.gradients(loss, list(trainee.module.parameters()))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        found = self.machine.total(torch.cat((loss.detach()[None], right.detach()))).tolist()
        return Outcome(found[0], tuple(found[1:]))
