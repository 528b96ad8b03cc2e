"""Training of one drafter: processes through Hugging Face accelerate, its log and checkpoints.

Every step of a training makes and frees tensors of some hundred megabytes, rows of logits above all. The GNU C
library gives such memory back to the system at once and asks for it anew, and the system fills every page of it with
zeros: two trainings on two cores spent half of their time so (docs/log.md). It cannot be undone, so it is not for a
process that measures.

One process needs no `accelerate config`; `accelerate launch` starts several, on one machine or many. Each computes
its rows of every batch and its part of the whole batch's loss, and gradients are added up: a step is the one that a
single process would take. The weights that learn are whole in every process. Under FSDP the frozen base is split
among the processes, layer by layer.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from specbench_ss import storage, user_files
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.training.data import TrainingRows, positions
from specbench_ss.training.loop import Budget, Machine, Outcome, Text, TogetherTrainer, digest
from specbench_ss.training.trainee import Batch, Documents, Trainee, future_labels, pick_anchors

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # parameters of mallopt(3)


def keep_freed_memory() -> None:
    """Have the C library keep what is freed, from now on. Only the GNU one is known; with others nothing happens."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if library is not None and hasattr(library, "gnu_get_libc_version"):
        library.mallopt(MMAP_MAX, 0)
        library.mallopt(TRIM_THRESHOLD, -1)


PATIENCE = timedelta(days=30)  # of processes that wait while the first one lets the base answer all the data


class Processes(Machine):
    """The processes of this training. They compute in bfloat16 by autocast, unless `exact` is set.

    device: 'cpu', 'cuda' or 'cuda:N', as resolved; several processes take a GPU each.
    """

    def __init__(self, device: str) -> None:
        from accelerate import Accelerator
        from accelerate.utils import InitProcessGroupKwargs

        cpu = device == "cpu"
        if not cpu and ":" in device:
            torch.cuda.set_device(torch.device(device))
        patient = InitProcessGroupKwargs(timeout=PATIENCE)
        # precision is `autocast`'s, alike everywhere
        self.accelerator = Accelerator(cpu=cpu, mixed_precision="no", kwargs_handlers=[patient])
        several = torch.device("cpu") if cpu else self.accelerator.device
        super().__init__(torch.device(device) if self.count == 1 else several)

    @property
    def count(self) -> int:
        """Number of processes."""
        return int(self.accelerator.num_processes)

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes and prints."""
        return bool(self.accelerator.is_main_process)

    @property
    def shards_base(self) -> bool:
        """Whether `accelerate launch` was asked for FSDP."""
        return str(getattr(self.accelerator.distributed_type, "value", "")) == "FSDP"

    def check(self, rows: int) -> None:
        """Raise UserError where a batch of this many rows cannot be shared equally."""
        if rows % self.count:
            raise UserError(f"a batch of {rows} rows cannot be shared by {self.count} processes: see --batch-size")

    def wait(self) -> None:
        """Wait until all processes are here."""
        self.accelerator.wait_for_everyone()

    def share(self, batch: Batch) -> Batch:
        """Return this process's rows of a batch: every count-th one."""
        return batch if self.count == 1 else batch.rows(slice(self.accelerator.process_index, None, self.count))

    def gradients(self, loss: Tensor, parameters: Sequence[nn.Parameter]) -> None:
        """Compute the gradients of the sum of all processes' losses and clip them to norm 1."""
        self.accelerator.backward(loss)
        if self.count > 1:
            for p in parameters:
                if p.requires_grad:  # one that this share does not reach may be reached by another's
                    p.grad = self.total(torch.zeros_like(p) if p.grad is None else p.grad)
        self.accelerator.clip_grad_norm_(parameters, 1.0)

    def total(self, value: Tensor) -> Tensor:
        """Return the sum of the value over all processes."""
        return value if self.count == 1 else self.accelerator.reduce(value, "sum")

    def alike(self, module: nn.Module) -> None:
        """Give every process the weights of the first one."""
        if self.count > 1:
            from accelerate.utils import broadcast

            with torch.no_grad():
                for p in module.parameters():
                    p.copy_(broadcast(p.detach().to(self.device)))

    def shard(self, target: Target, trainees: Sequence[Trainee]) -> None:
        """Under FSDP, split the frozen layers' parts among the processes; they are gathered when they are used.

        Embeddings and LM head stay whole, since losses read them directly. Raises UserError for a base in 4 bits, and
        for a trainee that learns inside the layers.
        """
        if not self.shards_base:
            return
        for trainee in trainees:
            if trainee.adapts_base:
                raise UserError(
                    f"{trainee.name} learns inside the layers that FSDP would share out: launch it without FSDP"
                )
        from torch.distributed.fsdp import fully_shard

        for layer in _layers(target):
            for part in layer.children():
                weights = list(part.parameters())
                if any(not p.is_floating_point() for p in weights):
                    raise UserError("--load-in-4bit cannot be shared out by FSDP: launch without it")
                if weights:  # each is gathered for its own pass alone, without a backward pass too
                    fully_shard(part, reshard_after_forward=True)


def _layers(target: Target) -> Sequence[nn.Module]:
    """Return the decoder layers."""
    if not target.taken_apart:
        return [block.layer for block in target.family.blocks]
    found = {id(block.attention) for block in target.family.blocks}
    return [m for m in target.model.modules() if any(id(child) in found for child in m.children())]


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
