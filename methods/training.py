"""Training drafters on a frozen base: the base runs once a batch, any number of trainees learn from its states.

Same text, same batches, same budget for all: a comparison is only fair so. Knows no method by name.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from specbench_ss.target import Target


@dataclass(slots=True)
class Anchors:
    """Positions to draft from. at int64 [B, A]: input token x_t is there; labels int64 [B, A, 1 + ahead]: x_{t+1+j}.

    labels[..., 0] is the next token (the main stream's); where an answer ends before t+1+j the label is -100.
    """

    at: Tensor
    labels: Tensor


@dataclass(slots=True)
class BaseStates:
    """What the frozen base computed on a batch [B, T].

    final [B, T, h]: normed states that the LM head reads; taps {layer: [B, T, h]}: inputs of layers;
    kv {layer: (keys, values)}, each [B, kv_heads, T, head_dim].
    """

    final: Tensor
    taps: dict[int, Tensor]
    kv: dict[int, tuple[Tensor, Tensor]]

    def at(self, states: Tensor, anchors: Anchors) -> Tensor:
        """states [B, T, h] -> [B, A, h] at the anchors."""
        return states.gather(1, anchors.at[..., None].expand(-1, -1, states.shape[-1]))


class Trainee(ABC):
    """One drafter in training."""

    name: str
    module: nn.Module
    lr: float = 1e-3
    taps: tuple[int, ...] = ()  # layer inputs it wants of the base
    kv_from: int | None = None  # keys and values it wants, from this layer up

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Parameters with their peak learning rates, as torch.optim takes them."""
        return [{"params": list(self.module.parameters()), "lr": self.lr}]

    def prepare(self, states: BaseStates) -> None:  # noqa: B027 - optional hook
        """See the base's states on the first batch, before anything is learnt: to start at their scale."""

    @abstractmethod
    def loss(self, states: BaseStates, anchors: Anchors) -> tuple[Tensor, Tensor]:
        """(loss, number of right top-1 guesses per drafted position [ahead])."""


@torch.no_grad()
def base_states(target: Target, ids: Tensor, taps: Sequence[int], kv_from: int | None) -> BaseStates:
    """Run the frozen base over ids [B, T]."""
    t = ids.shape[1]
    positions = torch.arange(t, device=ids.device)[None]
    cache = target.new_cache(t)
    tapped: dict[int, Tensor] = {}
    x = target.run(
        target.embed(ids, positions), 0, target.n_layers, cache, None, target.rotary(positions, t), taps, tapped
    )
    kv: dict[int, tuple[Tensor, Tensor]] = {}
    for layer in range(target.n_layers if kv_from is None else kv_from, target.n_layers):
        keys, values = cache.keys[layer], cache.values[layer]
        assert keys is not None and values is not None
        kv[layer] = (keys, values)
    return BaseStates(target.family.norm(x), tapped, kv)


def pick_anchors(
    ids: NDArray[np.int64], answer: NDArray[np.bool_], end: int, count: int, ahead: int, rng: np.random.Generator
) -> Anchors:
    """Up to `count` random anchors a row: x_{t+1} and x_{t+2} belong to one answer. answer [B, T] marks answers."""
    b, t = ids.shape
    # reach[j]: x_{t+1..t+1+j} all lie in the answer, none but the last is its end
    going = np.zeros((ahead + 1, b, t), bool)
    alive = np.ones((b, t), bool)
    for j in range(ahead + 1):
        shift = 1 + j
        inside = np.zeros((b, t), bool)
        inside[:, : t - shift] = answer[:, shift:]
        alive &= inside
        going[j] = alive
        ended = np.zeros((b, t), bool)
        ended[:, : t - shift] = ids[:, shift:] == end
        alive = alive & ~ended
    keys = np.where(going[1], rng.random((b, t)), -1.0)
    at = np.argsort(-keys, axis=1)[:, :count]
    rows = np.arange(b)[:, None]
    labels = np.full((b, at.shape[1], ahead + 1), -100, np.int64)
    for j in range(ahead + 1):
        ok = going[j][rows, at] & going[1][rows, at]
        labels[..., j] = np.where(ok, ids[rows, np.minimum(at + 1 + j, t - 1)], -100)
    return Anchors(torch.from_numpy(at), torch.from_numpy(labels))


def head_loss(logits: Tensor, labels: Tensor, weights: Sequence[float]) -> tuple[Tensor, Tensor]:
    """logits [.., ahead, V], labels [.., ahead] -> (weighted sum of mean cross-entropies, share right [ahead])."""
    ahead, vocab = logits.shape[-2:]
    losses = F.cross_entropy(
        logits.reshape(-1, vocab).float(), labels.reshape(-1), ignore_index=-100, reduction="none"
    ).view(-1, ahead)
    known = (labels.reshape(-1, ahead) != -100).sum(0).clamp_min(1)
    total = (losses.sum(0) / known * torch.tensor(weights, device=logits.device)).sum()
    right = (logits.detach().argmax(-1) == labels).reshape(-1, ahead).sum(0) / known
    return total, right


@dataclass(frozen=True, slots=True)
class Budget:
    """How long to train: steps of rows_per_step rows, anchors_per_row positions of each drafting `ahead` tokens."""

    steps: int
    rows_per_step: int = 8
    anchors_per_row: int = 128
    ahead: int = 4
    warmup: int = 50


class TogetherTrainer:
    """Trains several drafters side by side on the same batches; resumable at any step."""

    def __init__(
        self,
        target: Target,
        trainees: Sequence[Trainee],
        rows: NDArray[np.int32],
        answer_mask: Callable[[NDArray[np.int32]], NDArray[np.bool_]],
        end: int,
        budget: Budget,
        folder: Path,
        seed: int = 0,
    ) -> None:
        self.target, self.trainees, self.rows, self.answer_mask = target, trainees, rows, answer_mask
        self.end, self.budget, self.folder, self.seed = end, budget, folder, seed
        for trainee in trainees:
            trainee.module.to(target.device).train()
        self.optimizers = [torch.optim.AdamW(t.parameter_groups(), weight_decay=0.0) for t in trainees]
        self.peaks = [[group["lr"] for group in o.param_groups] for o in self.optimizers]
        self.step = 0
        folder.mkdir(parents=True, exist_ok=True)
        if not self._resume():
            states = self.states(self.batch(0)[0])
            for trainee in trainees:
                trainee.prepare(states)

    def _factor(self) -> float:
        s, n, w = self.step, self.budget.steps, self.budget.warmup
        return min(1.0, (s + 1) / w) * (0.5 + 0.5 * math.cos(math.pi * s / n))

    def batch(self, step: int) -> tuple[Tensor, Anchors]:
        """The batch of a step: a function of the seed and the step alone, so that a resumed run sees the same."""
        rng = np.random.default_rng((self.seed, step))
        n = self.budget.rows_per_step
        epoch, first = divmod(step * n, max(1, len(self.rows) - n + 1))
        order = np.random.default_rng((self.seed, epoch, 1)).permutation(len(self.rows))
        rows = self.rows[np.sort(order[first : first + n])]
        ids = rows.astype(np.int64)
        answer = np.stack([self.answer_mask(r) for r in rows])
        anchors = pick_anchors(ids, answer, self.end, self.budget.anchors_per_row, self.budget.ahead, rng)
        device = self.target.device
        return torch.from_numpy(ids).to(device), Anchors(anchors.at.to(device), anchors.labels.to(device))

    def states(self, ids: Tensor) -> BaseStates:
        """The base's states that the trainees ask for."""
        taps = sorted({layer for t in self.trainees for layer in t.taps})
        lows = [t.kv_from for t in self.trainees if t.kv_from is not None]
        return base_states(self.target, ids, taps, min(lows) if lows else None)

    def _update(self) -> list[tuple[float, list[float]]]:
        ids, anchors = self.batch(self.step)
        results = []
        with torch.autocast(self.target.device.type, dtype=torch.bfloat16):
            states = self.states(ids)
        for trainee, optimizer, peaks in zip(self.trainees, self.optimizers, self.peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * self._factor()
            with torch.autocast(self.target.device.type, dtype=torch.bfloat16):
                loss, right = trainee.loss(states, anchors)
            loss.backward()
            nn.utils.clip_grad_norm_(trainee.module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            results.append((float(loss.detach()), right.tolist()))
        self.step += 1
        return results

    def train(self, log: Callable[[str], None], every: int = 20, save_every: int = 100) -> None:
        """Run to the end of the budget."""
        started, first = time.monotonic(), self.step
        while self.step < self.budget.steps:
            results = self._update()
            if self.step % every == 0 or self.step == self.budget.steps:
                rate = (self.step - first) / (time.monotonic() - started)
                said = "; ".join(
                    f"{t.name} loss {loss:.3f} right {' '.join(f'{r:.2f}' for r in right)}"
                    for t, (loss, right) in zip(self.trainees, results, strict=True)
                )
                log(f"drafters step {self.step}/{self.budget.steps} {rate:.2f} steps/s: {said}")
            if self.step % save_every == 0 or self.step == self.budget.steps:
                self._save()

    def _save(self) -> None:
        state = {"step": self.step}
        for i, (trainee, optimizer) in enumerate(zip(self.trainees, self.optimizers, strict=True)):
            state[f"module{i}"] = trainee.module.state_dict()  # type: ignore[assignment]
            state[f"optimizer{i}"] = optimizer.state_dict()  # type: ignore[assignment]
        temporary = self.folder / "checkpoint.pt.new"
        torch.save(state, temporary)
        temporary.replace(self.folder / "checkpoint.pt")

    def _resume(self) -> bool:
        path = self.folder / "checkpoint.pt"
        if not path.exists():
            return False
        state = torch.load(path, map_location=self.target.device, weights_only=True)
        for i, (trainee, optimizer) in enumerate(zip(self.trainees, self.optimizers, strict=True)):
            trainee.module.load_state_dict(state[f"module{i}"])
            optimizer.load_state_dict(state[f"optimizer{i}"])
        self.step = int(state["step"])
        return True
