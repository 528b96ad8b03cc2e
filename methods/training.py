"""What a drafter in training is, and what it learns from: states of the frozen base, anchors, labels, losses.

Knows no method by name; `together.py` trains several side by side.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from specbench_ss.cache import Cache
from specbench_ss.target import AnyCache, Target


@dataclass(slots=True)
class Anchors:
    """Positions to draft from. at int64 [B, A]: input token x_t is there; labels int64 [B, A, 1 + ahead]: x_{t+1+j}.

    labels[..., 0] is the next token (the main stream's); where an answer ends before t+1+j the label is -100.
    """

    at: Tensor
    labels: Tensor


@dataclass(slots=True)
class Documents:
    """Several texts in one row, each of which stands alone, as prompts do in decoding.

    numbers int64 [B, T]: which text a token is of, ascending, -1 in padding; places int64 [B, T]: its position there.
    """

    numbers: Tensor
    places: Tensor

    def to(self, device: torch.device) -> Documents:
        """All of it on the device."""
        return Documents(self.numbers.to(device), self.places.to(device))

    def same(self, at: Tensor, until: int) -> Tensor:
        """Rows at [B, q], keys 0..until-1 -> bool [B, q, until]: both of one text."""
        return self.numbers.gather(1, at)[..., None] == self.numbers[:, None, :until]

    def masks(self, widths: Iterable[int | None], dtype: torch.dtype) -> dict[int | None, Tensor]:
        """{width of a sliding window, None = none: additive mask [B, 1, T, T], causal within each text}."""
        at = torch.arange(self.numbers.shape[1], device=self.numbers.device)
        ahead = at[:, None] - at  # [T, T], how far a key lies back
        see = self.same(at.expand(len(self.numbers), -1), len(at)) & (ahead >= 0)
        return {w: additive(see if w is None else see & (ahead < w), dtype) for w in dict.fromkeys(widths)}


@dataclass(slots=True)
class Batch:
    """ids int64 [B, T]; labels int64 [B, T, 1 + ahead] as in `Anchors`, but at every position; some anchors.

    labels[..., 0] != -100 marks the positions whose next token belongs to an answer: those that carry streams.
    documents: None where a row is one text under a plain causal mask. share_of: the batch of which these are some rows.
    """

    ids: Tensor
    labels: Tensor
    anchors: Anchors
    documents: Documents | None = None
    share_of: Batch | None = None

    @property
    def whole(self) -> Batch:
        """What losses are means over: of a share they are its part of the whole batch's, so that shares add up."""
        return self.share_of or self

    def to(self, device: torch.device) -> Batch:
        """All of it on the device."""
        anchors = Anchors(self.anchors.at.to(device), self.anchors.labels.to(device))
        documents = None if self.documents is None else self.documents.to(device)
        share_of = None if self.share_of is None else self.share_of.to(device)
        return Batch(self.ids.to(device), self.labels.to(device), anchors, documents, share_of)

    def rows(self, chosen: slice) -> Batch:
        """Some of its rows, as a share of the whole."""
        d = self.documents
        anchors = Anchors(self.anchors.at[chosen], self.anchors.labels[chosen])
        documents = None if d is None else Documents(d.numbers[chosen], d.places[chosen])
        return Batch(self.ids[chosen], self.labels[chosen], anchors, documents, self.whole)


@dataclass(slots=True)
class BaseStates:
    """What the frozen base computed on a batch [B, T].

    final [B, T, h]: normed states that the LM head reads; taps {layer: [B, T, h]}: inputs of layers;
    kv {layer: (keys, values)}, each [B, kv_heads, T, head_dim]. Empty where nobody asked. documents: the batch's.
    """

    final: Tensor
    taps: dict[int, Tensor]
    kv: dict[int, tuple[Tensor, Tensor]]
    documents: Documents | None = None

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
    needs_base: bool = True  # whether it wants the base's states at all
    adapts_base: bool = False  # whether it trains weights inside the base's own layers

    def about(self) -> dict[str, Any]:
        """What decides what is learnt, besides text, budget and learning rates; JSON-ready. A checkpoint is of one."""
        return {}

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Parameters with their peak learning rates, as torch.optim takes them."""
        return [{"params": list(self.module.parameters()), "lr": self.lr}]

    def scan(self, batches: Iterable[Batch]) -> None:  # noqa: B027 - optional hook
        """See batches of the text to come, before anything is learnt: to count its words. They are on the CPU."""

    def prepare(self, states: BaseStates, batch: Batch) -> None:  # noqa: B027 - optional hook
        """See the base's states on the first row, before anything is learnt: to start at their scale."""

    @abstractmethod
    def loss(self, states: BaseStates, batch: Batch) -> tuple[Tensor, Tensor]:
        """(loss, share of right top-1 guesses per drafted position [ahead]), both over `batch.whole`."""


@torch.no_grad()
def base_states(
    target: Target, ids: Tensor, taps: Sequence[int], kv_from: int | None, documents: Documents | None = None
) -> BaseStates:
    """Run the frozen base over ids [B, T]."""
    seen = KeysFrom(target.n_layers, target.n_layers if kv_from is None else kv_from)
    tapped: dict[int, Tensor] = {}
    x = run_rows(target, ids, target.n_layers, seen, documents, taps, tapped)
    return BaseStates(target.family.norm(x), tapped, seen.kept, documents)


class KeysFrom(Cache):
    """Of one pass over whole rows: keys and values as they come, of the layers from `lowest` up alone."""

    def __init__(self, layers: int, lowest: int) -> None:
        super().__init__(layers, 0)
        self.lowest, self.kept = lowest, dict[int, tuple[Tensor, Tensor]]()

    def update(self, k: Tensor, v: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """k, v [B, kv_heads, T, head_dim] are all there is to attend to."""
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
    """Whole rows ids [B, T] through layers 0..hi-1: [B, T, h]; inputs of the layers in `taps` go into `tapped`.

    recompute: keep only the input of every layer for the backward pass, and compute the rest again (cache: None).
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


def additive(see: Tensor, dtype: torch.dtype) -> Tensor:
    """Bool [B, q, k] -> additive mask [B, 1, q, k]."""
    return torch.zeros(see.shape, device=see.device, dtype=dtype).masked_fill_(~see, torch.finfo(dtype).min)[:, None]


def future_labels(ids: NDArray[np.int64], answer: NDArray[np.bool_], end: int, ahead: int) -> NDArray[np.int64]:
    """[B, T, 1 + ahead]: x_{t+1+j} while x_{t+1..t+1+j} lie in one answer, else -100. answer [B, T] marks answers."""
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
    """Up to `count` random positions a row that have two tokens to come. labels: `future_labels`."""
    good = labels[..., 1] != -100  # [B, T]
    at = np.argsort(-np.where(good, rng.random(good.shape), -1.0), axis=1)[:, :count]
    chosen = np.where(good[..., None], labels, -100)[np.arange(len(at))[:, None], at]
    return Anchors(torch.from_numpy(at), torch.from_numpy(chosen))


def head_sums(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """logits [.., ahead, V], labels [.., ahead] -> sums of cross-entropy [ahead] and of right top-1 guesses [ahead]."""
    ahead, vocab = logits.shape[-2:]
    flat = labels.reshape(-1, ahead)
    losses = F.cross_entropy(logits.reshape(-1, vocab).float(), flat.flatten(), ignore_index=-100, reduction="none")
    right = logits.detach().argmax(-1).reshape(-1, ahead) == flat
    return losses.view(-1, ahead).sum(0), right.sum(0)


def mean_loss(sums: tuple[Tensor, Tensor], labels: Tensor, weights: Sequence[float]) -> tuple[Tensor, Tensor]:
    """(weighted sum of mean cross-entropies, share right [ahead]) from sums; means over labels [.., ahead].

    labels: those that were summed over, or where that was a share of a batch, all of the batch's.
    """
    known = (labels.reshape(-1, labels.shape[-1]) != -100).sum(0).clamp_min(1)
    total = (sums[0] / known * torch.tensor(weights, device=known.device)).sum()
    return total, sums[1] / known


def head_loss(
    logits: Tensor, labels: Tensor, weights: Sequence[float], whole: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """logits [.., ahead, V], labels [.., ahead] -> (weighted sum of mean cross-entropies, share right [ahead]).

    whole: labels of the batch that these are a share of.
    """
    return mean_loss(head_sums(logits, labels), labels if whole is None else whole, weights)
