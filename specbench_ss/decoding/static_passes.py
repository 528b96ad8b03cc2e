"""Passes over buffers that stay, which a device can make again without being told each operator.

A pass of few rows through a stretch of layers is given its rows, mask and places in buffers: rows padded to the next
width, keys to the next block. So the same pass is made again and again, and can be replayed by a CUDA graph. Padded
rows come last, write behind the rows that count, and are seen by none of them.
Knows layers and caches, no method.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from specbench_ss.decoding.cache import Cache

if TYPE_CHECKING:
    from torch import Tensor

    # rows [1, q, h], where keys and values go, additive mask, cos and sin -> tensors [1, q, ..]
    Layers = Callable[[Tensor, Any, Tensor, Any], tuple[Tensor, ...]]

Pass = Callable[[], "tuple[Tensor, ...]"]
Replay = Callable[[Pass], Pass]  # a pass over buffers -> the same, replayed

WIDTHS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)  # rows that passes are padded to
BLOCK = 256  # keys
MOST_KEPT = 256  # passes whose buffers and recordings are kept
NO_ROOM = "a cache without room for padded keys"


class StaticRows:
    """Keys and values of a cache as a replayed pass sees them: it writes rows `at` and sees the first `keys` ones."""

    is_compileable = False

    def __init__(self, cache: Cache, at: Tensor, keys: int) -> None:
        self.cache, self.at, self.keys = cache, at, keys

    def get_seq_length(self, layer: int = 0) -> int:
        """Keys before the pass's own rows, as far as shapes say."""
        return self.keys - len(self.at)

    def update(self, k: Tensor, v: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write k, v [1, kv_heads, q, head_dim]; return [1, kv_heads, keys, head_dim]."""
        keys, values = self.cache.memory_of(layer)
        keys.index_copy_(2, self.at, k)
        values.index_copy_(2, self.at, v)
        return keys[:, :, : self.keys], values[:, :, : self.keys]


@dataclass(slots=True)
class Buffers:
    """What a pass of `rows` rows over `keys` keys is given. turn: cos and sin [1, rows, head_dim], where there are."""

    x: Tensor  # [1, rows, h]
    mask: Tensor  # additive [1, 1, rows, keys]
    at: Tensor  # int64 [rows]
    turn: tuple[Tensor, Tensor] | None

    def fill(self, x: Tensor, mask: Tensor | None, rotary: Any, past: int) -> None:
        """Take q rows behind `past` keys: x [1, q, h], mask [1, 1, q, past + q] or None for one row, cos and sin."""
        q = x.shape[1]
        self.x[:, :q] = x
        self.mask.fill_(torch.finfo(self.mask.dtype).min)
        self.mask[:, :, :q, : past + q] = 0 if mask is None else mask
        torch.arange(past, past + len(self.at), out=self.at)
        if self.turn is not None:
            self.turn[0][:, :q], self.turn[1][:, :q] = rotary


@dataclass(slots=True)
class Kept:
    """A pass that is replayed. memory: the cache's, of every layer: while it is held here, none other has its place.

    A cache takes other memory for all layers at once, so that one layer's tells which it is.
    """

    buffers: Buffers
    replayed: Pass
    memory: list[Tensor | None]


class StaticPasses:
    """The replayed passes of one model. replay: how a pass is made again.

    made: how many passes were recorded so far: an answer during which one was, took longer than it takes.
    declined: how many passes of steps could not be replayed, by the reason in words; prompts are not counted.
    """

    def __init__(self, replay: Replay, widths: tuple[int, ...] = WIDTHS) -> None:
        self.replay, self.widths, self.made = replay, widths, 0
        self.declined: Counter[str] = Counter()
        self.kept: OrderedDict[Hashable, Kept] = OrderedDict()

    def of_another(self) -> StaticPasses:
        """Return passes of another model of the same form, replayed in the same way."""
        return StaticPasses(self.replay, self.widths)

    def forget(self) -> None:
        """Keep no recording: the memory that they were made over is not used any more."""
        self.kept.clear()

    def room(self, rows: int) -> int:
        """How many rows a cache needs for steps up to so many rows: padded ones besides, in whole blocks."""
        return -(-(rows + self.widths[-1]) // BLOCK) * BLOCK

    def run(
        self,
        name: Hashable,
        layers: Layers,
        x: Tensor,
        layer: int,
        cache: Any,
        mask: Tensor | None,
        rotary: Any,
        pad: bool = True,
    ) -> tuple[Tensor, ...] | None:
        """Rows x [1, q, h] through `layers`, the first of which is `layer`; None where this pass cannot be replayed.

        name: of these layers, unique among those of this model. pad: whether rows may be added behind those of x.
        """
        q = x.shape[1]
        if not _is_step(layer, cache):
            return None
        if why := self._why_not(x, layer, cache, mask, rotary):
            self.declined[why] += 1
            return None
        past = cache.get_seq_length(layer)
        cache.check(past, past + q, layer)
        rows = next(width for width in self.widths if width >= q) if pad else q
        keys = -(-(past + rows) // BLOCK) * BLOCK
        if keys > cache.capacity:
            self.declined[NO_ROOM] += 1
            return None
        key = (name, rows, keys, id(cache.memory_of(layer)[0]))  # which is held: none other can have its number
        if key not in self.kept:
            self._make(key, layers, x, cache, rotary, rows, keys, past)
        self.kept.move_to_end(key)
        kept = self.kept[key]
        kept.buffers.fill(x, mask, rotary, past)
        return tuple(out[:, :q].clone() for out in kept.replayed())

    def decline(self, why: str, layer: int, cache: Any) -> None:
        """Count a pass that a method makes by itself, since it cannot be replayed, from the layer it begins with."""
        if _is_step(layer, cache):
            self.declined[why] += 1

    def _why_not(self, x: Tensor, layer: int, cache: Any, mask: Tensor | None, rotary: Any) -> str:
        """Say what of a step's pass cannot lie in buffers that stay; '' where all of it can."""
        b, q, _ = x.shape
        if b != 1:
            return "rows of several requests"
        if q > self.widths[-1]:
            return f"more than {self.widths[-1]} rows"
        if mask is None and q > 1:
            return "several rows without a mask"
        if rotary is not None and not isinstance(rotary, tuple):
            return "positions of another form"
        return "" if isinstance(cache, Cache) and cache.has(layer) else "a cache of another form"

    def _make(
        self, key: Hashable, layers: Layers, x: Tensor, cache: Cache, rotary: Any, rows: int, keys: int, past: int
    ) -> None:
        turn = None if rotary is None else tuple(part.new_zeros(1, rows, part.shape[-1]) for part in rotary)
        buffers = Buffers(
            x.new_zeros(1, rows, x.shape[-1]),
            x.new_zeros(1, 1, rows, keys),
            torch.arange(past, past + rows, device=x.device),
            turn,
        )
        where = StaticRows(cache, buffers.at, keys)

        def one() -> tuple[Tensor, ...]:
            # layers know what they made of cos and sin by the pair that was given: a new one, for other values
            return layers(buffers.x, where, buffers.mask, None if turn is None else (turn[0], turn[1]))

        self.kept[key] = Kept(buffers, self.replay(one), [*cache.keys, *cache.values])
        self.made += 1
        while len(self.kept) > MOST_KEPT:
            self.kept.popitem(last=False)


def _is_step(layer: int, cache: Any) -> bool:
    """Say whether rows come behind others, in inference: neither a prompt nor a pass of a training."""
    return cache is not None and torch.is_inference_mode_enabled() and cache.get_seq_length(layer) > 0


def called(one: Pass) -> Pass:
    """Make the pass each time, operator by operator: over the same buffers as where it is replayed."""
    return one


def captured_on(device: torch.device) -> Replay:
    """Return what records a pass as a CUDA graph and replays it. Its results lie in memory that a later replay writes.

    All recordings share a pool of memory: they are replayed one after the other, and what they gave is copied before.
    """
    pool = torch.cuda.graph_pool_handle()

    def captured(one: Pass) -> Pass:
        with torch.cuda.device(device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):  # libraries choose their kernels and take workspaces before anything is recorded
                    one()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                outs = one()

        def replayed() -> tuple[Tensor, ...]:
            graph.replay()
            return outs

        return replayed

    return captured
