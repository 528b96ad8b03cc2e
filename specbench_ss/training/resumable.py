"""Training that may be cut off at any moment: one checkpoint, replaced whole, and one loop with its progress lines.

This module knows modules and optimizers, but nothing of text, losses or methods.
"""

from __future__ import annotations

import hashlib
import json
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from specbench_ss.errors import UserError, os_reason
from specbench_ss.storage import replacing

CHECKPOINT = "checkpoint.pt"
KEPT = "checkpoint.pt.kept"


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Remember Ctrl-C instead of raising KeyboardInterrupt; give a function that says whether there was one.

    Another Ctrl-C more than a second later raises as usual. Within that second it is ignored, because launchers of
    several processes pass on what the terminal has told each of them, so one Ctrl-C may come twice.
    """
    at: list[float] = []

    def remember(*_: object) -> None:
        at.append(time.monotonic())
        if at[-1] > at[0] + 1:
            raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler or current_thread() is not main_thread():
        yield lambda: False  # ignored, another's, or not to be had
        return
    signal.signal(signal.SIGINT, remember)
    try:
        yield lambda: bool(at)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def digest(rows: NDArray[Any]) -> str:
    """Return a short sha256 of an array's contents, which tells texts apart."""
    return hashlib.sha256(np.ascontiguousarray(rows).data).hexdigest()[:16]


class Resumable(ABC):
    """A training of `total` steps that goes on from the checkpoint in its folder.

    about: JSON-ready facts that a checkpoint has to agree in. tokens_per_step: for the rate in progress lines.
    kept: a step up to which the training is the same for any `total`; its checkpoint is kept apart, and a longer
    training goes on from there. Raises UserError where the checkpoint belongs to another training or cannot be read.
    """

    def __init__(
        self,
        folder: Path,
        modules: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        total: int,
        tokens_per_step: int,
        about: Mapping[str, Any],
        kept: int | None = None,
    ) -> None:
        self.kept = kept
        self.folder, self.modules, self.optimizers = folder, modules, optimizers
        self.total, self.tokens_per_step, self.about = total, tokens_per_step, dict(about)
        self.step = 0
        folder.mkdir(parents=True, exist_ok=True)
        self.resumed = (folder / CHECKPOINT).exists()
        if self.resumed:
            self._resume(folder / CHECKPOINT)

    @abstractmethod
    def _update(self) -> str:
        """Learn from the batch of `self.step`, and return how it went, in words."""

    def advance(self) -> str:
        """Take one step, and return how it went, in words."""
        said = self._update()
        self.step += 1
        return said

    def train(self, log: Callable[[str], None], every: int = 20, save_every: int = 100) -> None:
        """Train to the end, with a progress line every `every` steps and a checkpoint every `save_every`.

        Ctrl-C stops after the present step, with a checkpoint: KeyboardInterrupt is raised and says where that is.
        """
        started, first = time.monotonic(), self.step
        with deferred_interrupt() as asked:
            while self.step < self.total:
                said = self.advance()
                stops, ended = self.agree(asked()), self.step == self.total
                if ended or self.step % every == 0:
                    rate = (self.step - first) * self.tokens_per_step / (time.monotonic() - started)
                    log(f"{self.folder.name} step {self.step}/{self.total}, {rate:.0f} tokens/s: {said}")
                if stops or ended or self.step == self.kept or self.step % save_every == 0:
                    self.save()
                if stops:
                    raise KeyboardInterrupt(f"step {self.step} of {self.total} is saved in {self.folder / CHECKPOINT}")

    def agree(self, stops: bool) -> bool:
        """Decide whether to stop after this step. Processes that train together decide alike."""
        return stops

    def save(self) -> None:
        """Write the checkpoint."""
        state = {
            "about": json.dumps(self.about),
            "step": self.step,
            "kept": self.kept,
            "total": self.total,
            "modules": [m.state_dict() for m in self.modules],
            "optimizers": [o.state_dict() for o in self.optimizers],
        }
        for name in (KEPT, CHECKPOINT) if self.step == self.kept else (CHECKPOINT,):
            with replacing(self.folder / name) as file:
                torch.save(state, file)

    def _resume(self, path: Path) -> None:
        state = self._load(path)
        before, total = state.get("kept"), state.get("total", self.total)
        if (before, total) != (self.kept, self.total) and state["step"] > min(before or 0, self.kept or 0):
            if not path.with_name(KEPT).exists():  # it is past where the two trainings are alike
                raise UserError(f"{self.folder} cannot be made longer: it has no {KEPT}. Give another --out")
            state = self._load(path.with_name(KEPT))
            if state["step"] > (self.kept or 0):
                raise UserError(
                    f"{self.folder} has been trained for {state['step']} steps at the peak learning rate: it can be "
                    "made longer, not shorter. Give more --steps, or another --out"
                )
        for module, tensors in zip(self.modules, state["modules"], strict=True):
            module.load_state_dict(tensors)
        for optimizer, tensors in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(tensors)  # puts what it reads on the parameters' device
        self.step = int(state["step"])

    def _load(self, path: Path) -> dict[str, Any]:
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            about = json.loads(state["about"])
        except OSError as error:
            raise UserError(f"cannot read {path}: {os_reason(error)}") from None
        except Exception:  # truncated, no checkpoint at all, or one of another version: torch raises anything
            raise UserError(
                f"cannot go on: {path} is damaged, or no checkpoint. Remove it to begin again, or give another --out"
            ) from None
        check_same(f"the checkpoint {path}", about, self.about)
        return state


def check_same(what: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise UserError that names the first field in which what was made before differs from what is asked for now.

    Later fields may follow from that one, so they are not named. If the field has fields itself, all that differ are.
    """
    for name in [*now, *before]:
        was, wanted = before.get(name), now.get(name)
        if was != wanted:
            if not (isinstance(was, dict) and isinstance(wanted, dict)):
                was, wanted = {name: was}, {name: wanted}
            raise UserError(f"{what} was made with {_differences(was, wanted)}: give another --out")


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the differing fields as text: 'steps 2, not 3 and lr none, not 0.1'."""
    names = dict.fromkeys((*now, *before))
    return " and ".join(f"{n} {before.get(n)}, not {now.get(n)}" for n in names if before.get(n) != now.get(n))
