"""Training loop: several drafters on the same states of one base, resumable.

All have the same text, batches and budget, so that they can be compared.
"""

from __future__ import annotations

import hashlib
import json
import math
import signal
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from specbench_ss import storage, user_files
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError, os_reason
from specbench_ss.training.batch import BaseStates, Batch, base_states, future_labels, pick_anchors
from specbench_ss.training.data import TrainingRows, positions
from specbench_ss.training.distributed import DistributedContext
from specbench_ss.training.masks import Documents
from specbench_ss.training.trainer import DrafterTrainer

CHECKPOINT = "checkpoint.pt"
KEPT_CHECKPOINT = "checkpoint.pt.kept"


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Defer Ctrl-C instead of raising KeyboardInterrupt; yield a function that returns True after one.

    Another Ctrl-C more than a second later raises as usual. Within that second it is ignored, since a launcher forwards
    the terminal's signal to its processes, so that one Ctrl-C may arrive twice.
    """
    interrupts: list[float] = []

    def remember(*_: object) -> None:
        interrupts.append(time.monotonic())
        if interrupts[-1] > interrupts[0] + 1:
            raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler or current_thread() is not main_thread():
        yield lambda: False  # the signal is ignored, handled elsewhere, or unavailable in this thread
        return
    signal.signal(signal.SIGINT, remember)
    try:
        yield lambda: bool(interrupts)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def digest(*arrays: NDArray[Any]) -> str:
    """Return a short sha256 of the arrays' contents."""
    sha256 = hashlib.sha256()
    for array in arrays:
        sha256.update(np.ascontiguousarray(array).data)
    return sha256.hexdigest()[:16]


class Resumable(ABC):
    """A training of `total` steps that resumes from the checkpoint in its folder.

    about: JSON-ready facts that must equal those of the checkpoint. kept: a step up to which the training is the same
    for any `total`; its checkpoint is kept, and a longer training resumes from it. counts: sums over all steps, of them
    "tokens" without padding. Raises UserError if the checkpoint belongs to another training or cannot be read.
    """

    def __init__(
        self,
        folder: Path,
        modules: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        total: int,
        about: Mapping[str, Any],
        kept: int | None = None,
    ) -> None:
        self.kept = kept
        self.folder, self.modules, self.optimizers = folder, modules, optimizers
        self.total, self.about = total, dict(about)
        self.step, self.counts = 0, Counter[str]()
        folder.mkdir(parents=True, exist_ok=True)
        self.resumed = (folder / CHECKPOINT).exists()
        if self.resumed:
            self._resume(folder / CHECKPOINT)

    @abstractmethod
    def _update(self) -> str:
        """Train on the batch of `self.step` and add to `self.counts`; return a progress text."""

    def advance(self) -> str:
        """Take one step; return a progress text."""
        progress = self._update()
        self.step += 1
        return progress

    def train(self, log: Callable[[str], None], every: int = 20, save_every: int = 100) -> None:
        """Train to the end, with a progress line every `every` steps and a checkpoint every `save_every`.

        Ctrl-C stops after the current step with a checkpoint and raises KeyboardInterrupt with its path.
        """
        started, first = time.monotonic(), self.counts["tokens"]
        with deferred_interrupt() as interrupted:
            while self.step < self.total:
                progress = self.advance()
                stop, ended = self.agree(interrupted()), self.step == self.total
                if ended or self.step % every == 0:
                    rate = (self.counts["tokens"] - first) / (time.monotonic() - started)
                    log(f"{self.folder.name} step {self.step}/{self.total}, {rate:.0f} tokens/s: {progress}")
                if stop or ended or self.step == self.kept or self.step % save_every == 0:
                    self.save()
                if stop:
                    raise KeyboardInterrupt(f"step {self.step} of {self.total} is saved in {self.folder / CHECKPOINT}")

    def agree(self, stop: bool) -> bool:
        """Return True to stop after this step; the same in all processes."""
        return stop

    def save(self) -> None:
        """Write the checkpoint."""
        state = {
            "about": json.dumps(self.about),
            "step": self.step,
            "counts": dict(self.counts),
            "kept": self.kept,
            "total": self.total,
            "modules": [m.state_dict() for m in self.modules],
            "optimizers": [o.state_dict() for o in self.optimizers],
        }
        for name in (KEPT_CHECKPOINT, CHECKPOINT) if self.step == self.kept else (CHECKPOINT,):
            with storage.replacing(self.folder / name) as file:
                torch.save(state, file)

    def _resume(self, path: Path) -> None:
        state = self._load(path)
        before, total = state["kept"], state["total"]
        if (before, total) != (self.kept, self.total) and state["step"] > min(before or 0, self.kept or 0):
            if not path.with_name(KEPT_CHECKPOINT).exists():  # past the step where both trainings are equal
                raise UserError(f"{self.folder} has no {KEPT_CHECKPOINT} and cannot be extended; use another --out")
            state = self._load(path.with_name(KEPT_CHECKPOINT))
            if state["step"] > (self.kept or 0):
                raise UserError(
                    f"{self.folder} is trained for {state['step']} steps at the peak rate; use more --steps or "
                    "another --out"
                )
        for module, tensors in zip(self.modules, state["modules"], strict=True):
            module.load_state_dict(tensors)
        for optimizer, tensors in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(tensors)  # moves tensors to the parameters' device
        self.step, self.counts = int(state["step"]), Counter(state["counts"])

    def _load(self, path: Path) -> dict[str, Any]:
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            about = json.loads(state["about"])
        except OSError as error:
            raise UserError(f"cannot read {path}: {os_reason(error)}") from None
        except Exception:  # truncated, no checkpoint, or of another version: torch raises any class
            raise UserError(
                f"{path} is damaged or not a checkpoint; remove it to start again, or use another --out"
            ) from None
        check_same(f"the checkpoint {path}", about, self.about)
        return state


def check_same(what: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise UserError with the first differing field of an earlier result and the requested one.

    Later fields may follow from that one. If the field has fields itself, all of them that differ are listed.
    """
    for name in [*now, *before]:
        old, new = before.get(name), now.get(name)
        if old != new:
            if not (isinstance(old, dict) and isinstance(new, dict)):
                old, new = {name: old}, {name: new}
            raise UserError(f"{what} was made with {_differences(old, new)}; use another --out")


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the differing fields as text: 'steps 2, not 3 and lr none, not 0.1'."""
    names = dict.fromkeys((*now, *before))
    return " and ".join(f"{n} {before.get(n)}, not {now.get(n)}" for n in names if before.get(n) != now.get(n))


UNTIL_COOLDOWN = "at its peak until a cooldown"
MAX_SCANNED = 1000  # batches that a trainer may read before the first step


@dataclass(frozen=True, slots=True)
class Budget:
    """Training budget: steps of rows_per_step rows, with anchors_per_row positions that each draft `ahead` tokens.

    cooldown: share of the steps, at the end, over which the learning rate falls from its peak to 0. None: cosine decay
    from the start.
    """

    steps: int
    rows_per_step: int = 8
    anchors_per_row: int = 128
    ahead: int = 4
    warmup: int = 50
    cooldown: float | None = None

    @property
    def falls_from(self) -> int | None:
        """Return the first step of the cooldown; until then a training does not depend on its length."""
        return None if self.cooldown is None else self.steps - math.ceil(self.cooldown * self.steps)

    def rate(self, step: int) -> float:
        """Return the learning rate of a step (from 0) as a share of the peak."""
        rise = min(1.0, (step + 1) / max(1, self.warmup))
        if self.falls_from is None:
            return rise * (0.5 + 0.5 * math.cos(math.pi * step / self.steps))
        return rise * min(1.0, (self.steps - step) / (self.steps - self.falls_from))

    def about(self) -> dict[str, Any]:
        """Return the facts that must be equal for a training to be resumed, JSON-ready."""
        values = asdict(self)
        del values["cooldown"]
        if self.cooldown is not None:
            del values["steps"]
            values["learning rate"] = UNTIL_COOLDOWN
        return values


@dataclass(frozen=True, slots=True)
class PackedText:
    """Packed rows for training or validation, in batches that depend only on seed and step.

    plain: a row is one text under a causal mask, and an epoch ends before rows would be missing in a batch. The lab's
    models are trained so; other rows consist of documents that do not attend to each other.
    """

    packed: TrainingRows
    seed: int = 0
    plain: bool = False

    @property
    def rows(self) -> NDArray[np.int32]:
        """Return token ids int32 [R, T]."""
        return self.packed.ids

    @property
    def digest(self) -> str:
        """Return a short sha256 of the tokens, and unless plain of completions and documents."""
        return digest(self.rows) if self.plain else digest(self.rows, self.packed.mask, self.packed.documents)

    def batch(self, step: int, budget: Budget, device: torch.device) -> Batch:
        """Return the batch of a step."""
        rng = np.random.default_rng((self.seed, step))
        return self.chosen(self.indices(step, budget.rows_per_step), budget, rng).to(device)

    def indices(self, step: int, n: int) -> NDArray[np.int64]:
        """Return the rows of a step, int64 [n]. Every epoch takes rows in its own order, each at most once."""
        r = len(self.rows)
        if self.plain:
            epoch, first = divmod(step * n, max(1, r - n + 1))
            return np.sort(self._order(epoch)[first : first + n])
        epochs, places = np.divmod(np.arange(step * n, (step + 1) * n), r)
        orders = {epoch: self._order(epoch) for epoch in np.unique(epochs).tolist()}
        return np.array([orders[e][i] for e, i in zip(epochs.tolist(), places.tolist(), strict=True)])

    def _order(self, epoch: int) -> NDArray[np.int64]:
        return np.random.default_rng((self.seed, epoch, 1)).permutation(len(self.rows))

    def chosen(self, rows: NDArray[np.int64], budget: Budget, rng: np.random.Generator) -> Batch:
        """Return a batch of these rows."""
        ids, numbers = self.rows[rows].astype(np.int64), self.packed.documents[rows]
        labels = future_labels(ids, np.asarray(self.packed.mask[rows]), budget.ahead)
        anchors = pick_anchors(labels, budget.anchors_per_row, rng)
        batch = Batch(torch.from_numpy(ids), torch.from_numpy(labels), anchors)
        if not self.plain:
            places = torch.from_numpy(positions(numbers))
            batch.documents = Documents(torch.from_numpy(numbers.astype(np.int64)), places)
        return batch

    def count_tokens(self, step: int, budget: Budget) -> int:
        """Return the number of tokens of a step's batch without padding."""
        return int((self.packed.documents[self.indices(step, budget.rows_per_step)] >= 0).sum())


LOG = "training.jsonl"
MAX_VALIDATION_ROWS = 64  # of one evaluation


@dataclass(frozen=True, slots=True)
class Outcome:
    """Loss of a drafter on a batch, and its top-1 accuracy at each draft position."""

    loss: float
    top1_accuracy: tuple[float, ...]


class _LogLine(msgspec.Struct):
    """Field of a line of training.jsonl that is needed for resuming."""

    step: int


def estimated_tau(top1_accuracy: Sequence[float]) -> float:
    """Return 1 + a_1 + a_1 a_2 + ... for top-1 accuracies a_j: τ of a chain if its drafts were independent."""
    products: list[float] = list(accumulate(top1_accuracy, mul))
    return 1 + sum(products)


class DrafterLoop(Resumable):
    """Training of several drafters on the same batches, resumable at any step.

    Args:
        about: further facts that must equal those of a checkpoint.
        dist: None means this process alone, in bfloat16 by autocast.
        validation: rows that are evaluated every `eval_every` steps and at the end.
        logs: a training.jsonl per drafter, with a line per step, truncated to the checkpoint on resume. Without them
            nothing is evaluated.
    """

    def __init__(
        self,
        target: Target,
        trainers: Sequence[DrafterTrainer],
        text: PackedText,
        budget: Budget,
        folder: Path,
        dist: DistributedContext | None = None,
        about: Mapping[str, Any] | None = None,
        *,
        validation: PackedText | None = None,
        eval_every: int = 100,
        logs: Sequence[Path] = (),
    ) -> None:
        self.target, self.trainers, self.text, self.budget = target, trainers, text, budget
        self.dist = dist or DistributedContext(target.device)
        self.validation, self.eval_every, self.logs = validation, eval_every, logs
        self.outcomes: dict[str, Outcome] = {}  # of the newest step
        for trainer in trainers:
            trainer.module.to(target.device).train()
        optimizers = [torch.optim.AdamW(t.parameter_groups(), weight_decay=0.0) for t in trainers]
        self.peaks = [[group["lr"] for group in o.param_groups] for o in optimizers]
        about = {
            **(about or {}),
            **budget.about(),
            "drafters": [t.name for t in trainers],
            "learning rates": self.peaks,
            **{f"{t.name}'s {key}": value for t in trainers for key, value in t.settings().items()},
            "processes": self.dist.count,
            "seed": text.seed,
            "text": text.digest,
            "base": target.weights_hash,
        }
        modules, kept = [t.module for t in trainers], budget.falls_from
        super().__init__(folder, modules, optimizers, budget.steps, about, kept)
        if not self.resumed:
            self._prepare()
        for log in self.logs if self.dist.first else ():
            log.parent.mkdir(parents=True, exist_ok=True)
            storage.cut(log, user_files.decoder(_LogLine), lambda line: line.step <= self.step)
        self.dist.wait()

    def _prepare(self) -> None:
        """Let every trainer read text and base states before the first step."""
        budget = self.budget  # with a cooldown the training may be extended: read the same batches for all lengths
        count = MAX_SCANNED if budget.cooldown else min(budget.steps, MAX_SCANNED)
        for trainer in self.trainers:
            trainer.scan(self.text.batch(s, budget, torch.device("cpu")) for s in range(count))
        first = self.text.batch(0, budget, self.target.device).rows(slice(1))  # the same in all processes
        with self.dist.autocast():
            states = self.states(first)
            for trainer in self.trainers:
                trainer.prepare(states, first)
        for trainer in self.trainers:
            self.dist.broadcast(trainer.module)

    def agree(self, stops: bool) -> bool:
        """Return True in all processes if one of them is to stop."""
        return bool(self.dist.total(torch.tensor(float(stops), device=self.dist.device)))

    def states(self, batch: Batch) -> BaseStates:
        """Return the base states that the trainers need."""
        if not any(t.needs_base for t in self.trainers):
            return BaseStates(torch.empty(0), {}, {})
        layers = sorted({layer for t in self.trainers for layer in t.aux_hidden_state_layers})
        lowest = min((t.kv_from for t in self.trainers if t.kv_from is not None), default=None)
        return base_states(self.target, batch.ids, layers, lowest, batch.documents)

    def _update(self) -> str:
        whole = self.text.batch(self.step, self.budget, torch.device("cpu"))
        self.counts["tokens"] += self.text.count_tokens(self.step, self.budget)
        self.counts.update({trainer.name: trainer.count_positions(whole) for trainer in self.trainers})
        batch = self.dist.share(whole.to(self.target.device))
        with self.dist.autocast():
            states = self.states(batch)
        parts = []
        for trainer, optimizer, peaks in zip(self.trainers, self.optimizers, self.peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * self.budget.rate(self.step)
            self.outcomes[trainer.name] = outcome = self.learn(trainer, optimizer, states, batch)
            shares = " ".join(f"{share:.2f}" for share in outcome.top1_accuracy)
            parts.append(f"{trainer.name} loss {outcome.loss:.3f} top-1 accuracy {shares}")
        return "; ".join([*parts, *self._log(self.step + 1)])

    def trained_on(self, trainer: DrafterTrainer) -> dict[str, int]:
        """Return the tokens and draft positions that a trainer has read so far, repeats counted, padding not."""
        return {"tokens": self.counts["tokens"], "draft_positions": self.counts[trainer.name]}

    def learn(
        self, trainer: DrafterTrainer, optimizer: torch.optim.Optimizer, states: BaseStates, batch: Batch
    ) -> Outcome:
        """Take one step of a trainer: loss, gradients, optimizer."""
        with self.dist.autocast():
            loss, right = trainer.loss(states, batch)
        self.dist.gradients(loss, list(trainer.module.parameters()))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        sums = self.dist.total(torch.cat((loss.detach()[None], right.detach()))).tolist()
        return Outcome(sums[0], tuple(sums[1:]))

    def _log(self, step: int) -> list[str]:
        """Append the step to every log, with an evaluation if due; return texts on the latter."""
        evaluate = bool(self.logs) and (step % self.eval_every == 0 or step == self.total)
        evaluated = self.evaluate() if evaluate else {}
        parts = []
        for trainer, log in zip(self.trainers, self.logs, strict=False):
            outcome = self.outcomes[trainer.name]
            line: dict[str, Any] = {"step": step, **self.trained_on(trainer)}
            line |= {"loss": outcome.loss, "top1_accuracy": outcome.top1_accuracy}
            if validation := evaluated.get(trainer.name):
                tau = estimated_tau(validation.top1_accuracy)
                line |= {
                    "validation_loss": validation.loss,
                    "validation_accuracy": validation.top1_accuracy,
                    "estimated_tau": tau,
                }
                prefix = f"{trainer.name} " if len(self.trainers) > 1 else ""
                parts.append(f"validation: {prefix}loss {validation.loss:.3f}, estimated tau {tau:.2f}")
            if self.dist.first:
                with log.open("ab", buffering=0) as file:
                    storage.append(file, [line])
        return parts

    @torch.no_grad()
    def evaluate(self) -> dict[str, Outcome]:
        """Return each drafter's loss and top-1 accuracies on fixed validation rows, as one batch, or {}."""
        count = min(len(self.validation.rows), MAX_VALIDATION_ROWS) if self.validation else 0
        if not self.validation or not count:
            return {}
        rng = np.random.default_rng(self.validation.seed)
        batch_of_all = self.validation.chosen(np.arange(count), self.budget, rng).to(self.target.device)
        sums: dict[str, Tensor] = {}
        n = self.budget.rows_per_step  # memory suffices for as many rows as in a step
        for batch in (batch_of_all.rows(slice(start, start + n)) for start in range(0, count, n)):
            with self.dist.autocast():
                states = self.states(batch)
                for trainer in self.trainers:
                    losses = torch.cat([part.reshape(-1) for part in trainer.loss(states, batch)])
                    sums[trainer.name] = sums[trainer.name] + losses if trainer.name in sums else losses
        return {name: Outcome(total[0], tuple(total[1:])) for name, total in ((n, s.tolist()) for n, s in sums.items())}

    def save(self) -> None:
        """Write the checkpoint in the first process while the others wait."""
        if self.dist.first:
            super().save()
        self.dist.wait()
