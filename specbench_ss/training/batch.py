"""Training batches: anchors, labels and documents, and the states of the frozen base on them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from specbench_ss.engine.kv_cache import Cache
from specbench_ss.engine.target import AnyCache, Target


@dataclass(slots=True)
class Anchors:
    """Positions to draft from, with the tokens that follow them.

    at: int64 [B, A], the positions of the input tokens x_t. labels: int64 [B, A, 1 + ahead], the tokens x_{t+1+j};
    labels[..., 0] is the next token, which the main stream predicts. Where an answer ends before t+1+j, the label is
    -100.
    """

    at: Tensor
    labels: Tensor


@dataclass(slots=True)
class Documents:
    """Several texts in one row, each of which stands alone, as prompts do in decoding.

    numbers: int64 [B, T], the text that each token belongs to, ascending; -1 in padding. places: int64 [B, T], the
    token's position in its text.
    """

    numbers: Tensor
    places: Tensor

    def to(self, device: torch.device) -> Documents:
        """Return a copy of the documents on the device."""
        return Documents(self.numbers.to(device), self.places.to(device))

    def same(self, at: Tensor, until: int) -> Tensor:
        """Say for rows `at` [B, q] and keys 0..until-1 whether both belong to one text, as bool [B, q, until]."""
        return self.numbers.gather(1, at)[..., None] == self.numbers[:, None, :until]

    def masks(self, widths: Iterable[int | None], dtype: torch.dtype) -> dict[int | None, Tensor]:
        """Return {width: additive mask [B, 1, T, T]}, causal within each text. width: a sliding window's, or None."""
        at = torch.arange(self.numbers.shape[1], device=self.numbers.device)
        ahead = at[:, None] - at  # [T, T], how far a key lies back
        see = self.same(at.expand(len(self.numbers), -1), len(at)) & (ahead >= 0)
        return {w: additive(see if w is None else see & (ahead < w), dtype) for w in dict.fromkeys(widths)}


@dataclass(slots=True)
class Batch:
    """One batch: ids int64 [B, T]; labels int64 [B, T, 1 + ahead] as in `Anchors`, but at every position; some anchors.

    labels[..., 0] != -100 marks the positions whose next token belongs to an answer: those are the ones that carry
    streams. documents: None where a row is one text under a plain causal mask. share_of: the batch that these rows are
    a part of.
    """

    ids: Tensor
    labels: Tensor
    anchors: Anchors
    documents: Documents | None = None
    share_of: Batch | None = None

    @property
    def whole(self) -> Batch:
        """Return the batch that losses are means over, so that the losses of a batch's shares add up to its own."""
        return self.share_of or self

    @property
    def positions(self) -> Tensor:
        """Return where in its text each token stands, int64 [B, T]."""
        if self.documents is not None:
            return self.documents.places
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
        documents = None if d is None else Documents(d.numbers[chosen], d.places[chosen])
        return Batch(self.ids[chosen], self.labels[chosen], anchors, documents, self.whole)


def additive(see: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn a bool mask [B, q, k] into an additive mask [B, 1, q, k]."""
    return torch.zeros(see.shape, device=see.device, dtype=dtype).masked_fill_(~see, torch.finfo(dtype).min)[:, None]


def future_labels(ids: NDArray[np.int64], answer: NDArray[np.bool_], end: int, ahead: int) -> NDArray[np.int64]:
    """Return labels [B, T, 1 + ahead]: x_{t+1+j} while x_{t+1..t+1+j} lie in one answer, else -100.

    answer: bool [B, T], True inside answers.
    """
    t = ids.shape[1]
    labels = np.full((*ids.shape, ahead + 1), -100, np.int64)
    alive = np.ones(ids.shape, bool)
    for j in range(min(ahead + 1, t - 1)):
        shift = 1 + j
        alive[:, t - shift :] = False
        alive[:, : t - shift] &= answer[:, shift:]
        labels[:, : t - shift, j] = np.where(alive[:, : t - shift], ids[:, shift:], -100)
        alive[:, : t - shift] &= ids[:, shift:] != end
    return labels


def pick_anchors(labels: NDArray[np.int64], count: int, rng: np.random.Generator) -> Anchors:
    """Choose up to `count` random positions a row that two tokens follow. labels: as `future_labels` gives them."""
    good = labels[..., 1] != -100  # [B, T]
    at = np.argsort(-np.where(good, rng.random(good.shape), -1.0), axis=1)[:, :count]
    chosen = np.where(good[..., None], labels, -100)[np.arange(len(at))[:, None], at]
    return Anchors(torch.from_numpy(at), torch.from_numpy(chosen))


@dataclass(slots=True)
class BaseStates:
    """What the frozen base computed on a batch [B, T]. Fields that nobody asked for are empty.

    final: [B, T, h], normed states that the LM head reads. taps: {layer: [B, T, h]}, inputs of layers.
    kv: {layer: (keys, values)}, each [B, kv_heads, T, head_dim]. documents: those of the batch.
    """

    final: Tensor
    hidden_states: dict[int, Tensor]
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


@torch.no_grad()
def base_states(
    target: Target,
    ids: Tensor,
    aux_layers: Sequence[int],
    kv_from: int | None,
    documents: Documents | None = None,
) -> BaseStates:
    """Run the frozen base over ids [B, T] and return the states that are asked for."""
    seen = KeysFrom(target.n_layers, target.n_layers if kv_from is None else kv_from)
    aux_states: dict[int, Tensor] = {}
    x = run_rows(target, ids, target.n_layers, seen, documents, aux_layers, aux_states)
    return BaseStates(target.family.norm(x), aux_states, seen.kept, documents)


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
    aux_layers: Sequence[int],
    aux_states: dict[int, Tensor],
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
        return target.run(x, 0, hi, cache, None, rotary, aux_layers, aux_states)
    blocks = target.family.blocks[:hi]
    whole: dict[int | None, Tensor] = {}
    if documents is not None:
        whole = documents.masks((b.window for b in blocks), target.dtype)
    for i, block in enumerate(blocks):
        if i in aux_layers:
            aux_states[i] = x
        mask = whole[block.window] if whole else target.windowed(None, block.window, t, cache, i)
        x = (
            checkpoint(block, x, cache, mask, rotary, use_reentrant=False)
            if recompute
            else block(x, cache, mask, rotary)
        )
    return x
