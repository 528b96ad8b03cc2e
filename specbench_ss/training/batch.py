"""Training batches: anchors, labels and the frozen base's states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from specbench_ss.engine.kv_cache import Cache
from specbench_ss.engine.target import AnyCache, Target
from specbench_ss.training.masks import Documents


@dataclass(slots=True)
class Anchors:
    """Positions to draft from, with the tokens after them.

    at: int64 [B, A], positions of the input tokens x_t. labels: int64 [B, A, 1 + ahead], the tokens x_{t+1+j};
    labels[..., 0] is the next token, which the main stream predicts. -100 after the end of an answer.
    """

    at: Tensor
    labels: Tensor


@dataclass(slots=True)
class Batch:
    """One batch: ids int64 [B, T]; labels int64 [B, T, 1 + ahead] as in `Anchors`, at every position; some anchors.

    labels[..., 0] != -100 marks the positions whose next token belongs to an answer, which have streams. documents:
    None for one text per row under a plain causal mask. share_of: the batch of which these rows are a part.
    """

    ids: Tensor
    labels: Tensor
    anchors: Anchors
    documents: Documents | None = None
    share_of: Batch | None = None

    @property
    def global_batch(self) -> Batch:
        """Return the batch over which losses are means, so that the losses of its shares add up."""
        return self.share_of or self

    @property
    def positions(self) -> Tensor:
        """Return each token's position in its text, int64 [B, T]."""
        if self.documents is not None:
            return self.documents.position_ids
        return torch.arange(self.ids.shape[1], device=self.ids.device).expand(len(self.ids), -1)

    def to(self, device: torch.device) -> Batch:
        """Return a copy of the batch on the device."""
        anchors = Anchors(self.anchors.at.to(device), self.anchors.labels.to(device))
        documents = None if self.documents is None else self.documents.to(device)
        share_of = None if self.share_of is None else self.share_of.to(device)
        return Batch(self.ids.to(device), self.labels.to(device), anchors, documents, share_of)

    def rows(self, chosen: slice) -> Batch:
        """Return some of the rows, as a share of the whole batch."""
        d = self.documents
        anchors = Anchors(self.anchors.at[chosen], self.anchors.labels[chosen])
        documents = None if d is None else Documents(d.document_ids[chosen], d.position_ids[chosen])
        return Batch(self.ids[chosen], self.labels[chosen], anchors, documents, self.global_batch)


def future_labels(ids: NDArray[np.int64], answer: NDArray[np.bool_], ahead: int) -> NDArray[np.int64]:
    """Return labels [B, T, 1 + ahead]: x_{t+1+j} while x_{t+1..t+1+j} are in one answer, else -100.

    answer: bool [B, T], True inside answers, of which no two touch.
    """
    t = ids.shape[1]
    labels = np.full((*ids.shape, ahead + 1), -100, np.int64)
    alive = np.ones(ids.shape, bool)
    for j in range(min(ahead + 1, t - 1)):
        shift = 1 + j
        alive[:, t - shift :] = False
        alive[:, : t - shift] &= answer[:, shift:]
        labels[:, : t - shift, j] = np.where(alive[:, : t - shift], ids[:, shift:], -100)
    return labels


def pick_anchors(labels: NDArray[np.int64], count: int, rng: np.random.Generator) -> Anchors:
    """Choose up to `count` random positions per row with at least two labels. labels: from `future_labels`."""
    good = labels[..., 1] != -100  # [B, T]
    at = np.argsort(-np.where(good, rng.random(good.shape), -1.0), axis=1)[:, :count]
    chosen = np.where(good[..., None], labels, -100)[np.arange(len(at))[:, None], at]
    return Anchors(torch.from_numpy(at), torch.from_numpy(chosen))


@dataclass(slots=True)
class BaseStates:
    """States of the frozen base on a batch [B, T]. Fields that are not needed are empty.

    final: [B, T, h], normed states (the input of the LM head). hidden_states: {layer: [B, T, h]}, inputs of layers.
    kv: {layer: (keys, values)}, each [B, kv_heads, T, head_dim]. documents: those of the batch.
    """

    final: Tensor
    hidden_states: dict[int, Tensor]
    kv: dict[int, tuple[Tensor, Tensor]]
    documents: Documents | None = None

    def at(self, states: Tensor, anchors: Anchors) -> Tensor:
        """Return states [B, T, h] at the anchors, [B, A, h]."""
        return states.gather(1, anchors.at[..., None].expand(-1, -1, states.shape[-1]))

    def ahead(self, at: Tensor, n: int) -> Tensor:
        """Return the final states [B, A, n, h] that predict the n tokens after the next one of positions `at` [B, A].

        Beyond the row's end, where there is no label, it is the last state.
        """
        places = at[..., None] + torch.arange(1, n + 1, device=at.device)  # predicts x_{t+2+i}
        places = places.clamp_max(self.final.shape[1] - 1).flatten(1)  # [B, A*n]
        gathered = self.final.gather(1, places[..., None].expand(-1, -1, self.final.shape[-1]))
        states: Tensor = gathered.unflatten(1, (-1, n))
        return states


@torch.no_grad()
def base_states(
    target: Target,
    ids: Tensor,
    aux_layers: Sequence[int],
    kv_from: int | None,
    documents: Documents | None = None,
) -> BaseStates:
    """Run the frozen base over ids [B, T] and return the requested states."""
    cache = KeysFrom(target.n_layers, target.n_layers if kv_from is None else kv_from)
    x, aux_states = run_rows(target, ids, target.n_layers, cache, documents, aux_layers)
    return BaseStates(target.family.norm(x), aux_states, cache.kept, documents)


class KeysFrom(Cache):
    """Cache of one training pass that keeps the keys and values of the layers from `lowest` up."""

    def __init__(self, layers: int, lowest: int) -> None:
        super().__init__(layers, 0)
        self.lowest, self.kept = lowest, dict[int, tuple[Tensor, Tensor]]()

    def update(self, k: Tensor, v: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store and return k and v [B, kv_heads, T, head_dim]."""
        if layer >= self.lowest:
            self.kept[layer] = (k, v)
        return k, v


def run_rows(
    target: Target,
    ids: Tensor,
    hi: int,
    cache: AnyCache,
    documents: Documents | None,
    aux_layers: Sequence[int],
    recompute: bool = False,
) -> tuple[Tensor, dict[int, Tensor]]:
    """Run whole rows ids [B, T] through layers 0..hi-1; return states [B, T, h] and the inputs of `aux_layers`.

    recompute: activation checkpointing per layer (cache must be None).
    """
    t = ids.shape[1]
    positions = torch.arange(t, device=ids.device)[None] if documents is None else documents.position_ids
    x, rotary = target.embed(ids, positions), target.rotary(positions, t)
    if documents is None and not recompute:
        wanted = target.inputs_of(aux_layers, hi)
        x, *states = target.run(x, 0, hi, cache, None, rotary, wanted)
        return x, dict(zip(wanted, states, strict=True))
    blocks, aux_states = target.family.blocks[:hi], dict[int, Tensor]()
    masks: dict[int | None, Tensor] = {}
    if documents is not None:
        masks = documents.masks((b.window for b in blocks), target.dtype)
    for i, block in enumerate(blocks):
        if i in aux_layers:
            aux_states[i] = x
        mask = masks[block.window] if masks else target.windowed(None, block.window, t, cache, i)
        x = (
            checkpoint(block, x, cache, mask, rotary, use_reentrant=False)
            if recompute
            else block(x, cache, mask, rotary)
        )
    return x, aux_states
