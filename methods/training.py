"""What a drafter in training is, and what it learns from: states of the frozen base, anchors, labels, losses.

Knows no method by name; `together.py` trains several side by side.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
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
