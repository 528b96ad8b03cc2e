"""What a drafter in training is, and what it learns from: states of the frozen base, anchors, labels, losses.

This module knows no method by name; `side_by_side.py` trains several trainees together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from specbench_ss.engine.kv_cache import Cache
from specbench_ss.engine.target import AnyCache, Target
from specbench_ss.training.batches import Anchors, Batch, Documents


@dataclass(slots=True)
class BaseStates:
    """What the frozen base computed on a batch [B, T]. Fields that nobody asked for are empty.

    final: [B, T, h], normed states that the LM head reads. taps: {layer: [B, T, h]}, inputs of layers.
    kv: {layer: (keys, values)}, each [B, kv_heads, T, head_dim]. documents: those of the batch.
    """

    final: Tensor
    taps: dict[int, Tensor]
    kv: dict[int, tuple[Tensor, Tensor]]
    documents: Documents | None = None

    def at(self, states: Tensor, anchors: Anchors) -> Tensor:
        """Pick states [B, T, h] at the anchors, [B, A, h]."""
        return states.gather(1, anchors.at[..., None].expand(-1, -1, states.shape[-1]))

    def ahead(self, at: Tensor, n: int) -> Tensor:
        """Final states [B, A, n, h] that decide the n tokens behind the next one of positions `at` [B, A].

        Beyond the row's end it is the last state, where there is no label.
        """
        places = at[..., None] + torch.arange(1, n + 1, device=at.device)  # what decides x_{t+2+i}
        places = places.clamp_max(self.final.shape[1] - 1).flatten(1)  # [B, A*n]
        found = self.final.gather(1, places[..., None].expand(-1, -1, self.final.shape[-1]))
        shaped: Tensor = found.unflatten(1, (-1, n))
        return shaped


class Trainee(ABC):
    """One drafter in training."""

    name: str
    module: nn.Module
    lr: float = 1e-3
    taps: tuple[int, ...] = ()  # layer inputs it wants of the base
    kv_from: int | None = None  # keys and values it wants, from this layer up
    needs_base: bool = True  # whether it wants the base's states at all
    adapts_base: bool = False  # whether it trains weights inside the base's own layers

    def about(self) -> dict[str, Any]:
        """Return what decides what is learnt, besides text, budget and learning rates.

        A checkpoint has to agree in it.
        """
        return {}

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the parameters with their peak learning rates, as torch.optim takes them."""
        return [{"params": list(self.module.parameters()), "lr": self.lr}]

    def scan(self, batches: Iterable[Batch]) -> None:  # noqa: B027 - optional hook
        """See batches of the text, on the CPU, before anything is learnt: for example to count its words."""

    def prepare(self, states: BaseStates, batch: Batch) -> None:  # noqa: B027 - optional hook
        """See the base's states on the first row before anything is learnt: for example to start at their scale."""

    @abstractmethod
    def loss(self, states: BaseStates, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return (loss, share of right top-1 guesses per drafted position [ahead]), both over `batch.whole`."""


@torch.no_grad()
def base_states(
    target: Target, ids: Tensor, taps: Sequence[int], kv_from: int | None, documents: Documents | None = None
) -> BaseStates:
    """Run the frozen base over ids [B, T] and return the states that are asked for."""
    seen = KeysFrom(target.n_layers, target.n_layers if kv_from is None else kv_from)
    tapped: dict[int, Tensor] = {}
    x = run_rows(target, ids, target.n_layers, seen, documents, taps, tapped)
    return BaseStates(target.family.norm(x), tapped, seen.kept, documents)


class KeysFrom(Cache):
    """A cache for one pass over whole rows that keeps the keys and values of the layers from `lowest` up."""

    def __init__(self, layers: int, lowest: int) -> None:
        super().__init__(layers, 0)
        self.lowest, self.kept = lowest, dict[int, tuple[Tensor, Tensor]]()

    def update(self, k: Tensor, v: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store and return k and v [B, kv_heads, T, head_dim], which are all there is to attend to."""
        if layer >= self.lowest:
            self.kept[layer] = (k, v)
        return k, v


def run_rows(
    target: Target,
    ids: Tensor,
    hi: int,
    cache: AnyCache,
    documents: Documents | None,
    taps: Sequence[int],
    tapped: dict[int, Tensor],
    recompute: bool = False,
) -> Tensor:
    """Run whole rows ids [B, T] through layers 0..hi-1 and return [B, T, h].

    Layers in `taps` put their input in `tapped`.

    recompute: keep only the input of every layer for the backward pass, and compute the rest again (cache must be
    None).
    """
    t = ids.shape[1]
    positions = torch.arange(t, device=ids.device)[None] if documents is None else documents.places
    x, rotary = target.embed(ids, positions), target.rotary(positions, t)
    if documents is None and not recompute:
        return target.run(x, 0, hi, cache, None, rotary, taps, tapped)
    blocks = target.family.blocks[:hi]
    whole: dict[int | None, Tensor] = {}
    if documents is not None:
        whole = documents.masks((b.window for b in blocks), target.dtype)
    for i, block in enumerate(blocks):
        if i in taps:
            tapped[i] = x
        mask = whole[block.window] if whole else target.windowed(None, block.window, t, cache, i)
        x = (
            checkpoint(block, x, cache, mask, rotary, use_reentrant=False)
            if recompute
            else block(x, cache, mask, rotary)
        )
    return x
