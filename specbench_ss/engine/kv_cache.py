"""KV caches with a length for each layer, tree compaction and batch rows.

`update` is the call that Hugging Face attention modules make; the rest is what tree decoding needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from specbench_ss.engine.device_map import PerDevice, to_device, to_device_recursive
from specbench_ss.engine.tree import indices


class Cache:
    """Preallocated keys and values, [B, kv_heads, capacity, head_dim] a layer.

    lengths[layer] is the number of rows that exist in that layer; rows beyond it are scratch that the next
    write overwrites, so dropping rows costs nothing. The host owns the lengths: no device synchronisation.
    joined: take the memory of all layers as one, so that rows of all of them are moved by two operators; a layer whose
    keys are of another shape than the first one's, or on another device, has its own. For layers that are all used.
    grows: whether rows beyond the capacity make it larger, as where a method states no `max_tokens_per_step`, or
    are an error.
    spare, block: of a cache that grows, rows that there are room for besides, and what the capacity is a multiple of.
    """

    is_compileable = False
    grows = False
    allowed: int | None = None  # rows that the step at hand may fill, where its method says how many it needs
    spare, block = 0, 1

    def __init__(self, layers: int, capacity: int, joined: bool = False) -> None:
        self.capacity, self.joined = capacity, joined
        self.memory: Tensor | None = None  # [layers, 2, B, kv_heads, capacity, head_dim], where it is joined
        self.apart = set[int]()  # layers that have memory of their own all the same
        self.lengths = [0] * layers
        self.keys: list[Tensor | None] = [None] * layers
        self.values: list[Tensor | None] = [None] * layers

    def get_seq_length(self, layer: int = 0) -> int:
        """Rows in a layer."""
        return self.lengths[layer]

    def update(self, k: Tensor, v: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write k, v [B, kv_heads, q, head_dim] after the existing rows; returns all [.., length + q, ..].

        The length does not move: `advance` says how many of the new rows stay.
        """
        start = self.lengths[layer]
        end = start + k.shape[2]
        self.check(start, end, layer)
        keys, values = self.keys[layer], self.values[layer]
        if keys is None or values is None:
            keys, values = self.keys[layer], self.values[layer] = self._taken(k, v, layer)
        keys[:, :, start:end] = k
        values[:, :, start:end] = v
        return keys[:, :, :end], values[:, :, :end]

    def check(self, start: int, end: int, layer: int) -> None:
        """Make room for rows start to end of a layer. Raises RuntimeError where these are more than are allowed."""
        if end > (self.capacity if self.allowed is None else min(self.capacity, self.allowed)):
            self._grow(start, end, layer)

    def has(self, layer: int) -> bool:
        """Say whether the layer's memory exists: it is taken by the first rows."""
        return self.keys[layer] is not None

    def memory_of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values [B, kv_heads, capacity, head_dim]. Raises KeyError where it has none."""
        keys, values = self.keys[layer], self.values[layer]
        if keys is None or values is None:
            raise KeyError(f"layer {layer} has no rows yet")
        return keys, values

    def commit(self, rows: int, lo: int = 0, hi: int | None = None) -> None:
        """The first `rows` of the rows just written exist from now on, in layers lo..hi."""
        for layer in range(lo, len(self.lengths) if hi is None else hi):
            self.lengths[layer] += rows

    def set_limit(self, rows: int | None) -> None:
        """From now on a write beyond so many rows is an error, however large the cache is; None = no such limit."""
        self.allowed = rows

    def compact(self, start: int, rows: Sequence[int] | Tensor, lo: int = 0, hi: int | None = None) -> None:
        """Of the rows written at start.., only these (ascending offsets) remain, in order, in layers lo..hi.

        Offsets int64 [n] that are on the device stay there: nothing is waited for, and all rows are moved.
        """
        count, first, moved = len(rows), 0, None
        if isinstance(rows, torch.Tensor):
            moved = rows + start
        else:
            first = next((i for i, r in enumerate(rows) if r != i), count)  # rows already in place are not moved
        hi = len(self.lengths) if hi is None else hi
        for memory in self._buffers(lo, hi) if first < count else ():
            if moved is None:
                moved = indices([start + int(r) for r in rows[first:]], memory.device)
            moved = to_device(moved, memory.device)  # once for each device: layers lie in order
            memory[..., start + first : start + count, :] = memory.index_select(-2, moved)
        self.lengths[lo:hi] = [start + count] * (hi - lo)

    def select_sequences(self, sequences: Tensor) -> None:
        """Go on with these sequences [B'] of a batch alone."""
        self._renew(lambda rows: rows.index_select(-4, to_device(sequences, rows.device)))

    def clear(self) -> None:
        """Forget every row; the memory stays."""
        self.lengths = [0] * len(self.lengths)

    def zero_(self) -> None:
        """Fill the memory, beyond the rows that exist too, with zeros."""
        for memory in self._buffers(0, len(self.lengths)):
            memory.zero_()

    def free(self) -> None:
        """Forget every row and the memory: the next rows take new one."""
        self.clear()
        self.keys, self.values = [None] * len(self.keys), [None] * len(self.values)
        self.memory, self.apart = None, set()

    def reserve(self, capacity: int) -> None:
        """Make room for at least this many rows; contents are lost, so only between prompts."""
        if capacity > (before := self.capacity):
            self.capacity = 0  # what is lost is let go before other memory is taken
            self._renew(self._larger)
            self.capacity = max(capacity, 2 * before)
            self._renew(self._larger)
        self.clear()

    def _grow(self, start: int, end: int, layer: int) -> None:
        """Make room for rows up to `end`, and half as many again as there were; what is held stays.

        Raises RuntimeError where the cache does not grow.
        """
        if not self.grows:
            most = min(self.capacity, self.allowed or self.capacity)
            raise RuntimeError(
                f"a cache for {most} rows cannot take rows {start} to {end} in layer {layer}: "
                "a step put more rows through the model than the method's max_tokens_per_step() says"
            )
        room = max(end + self.spare, self.capacity * 3 // 2)
        self.capacity = -(-room // self.block) * self.block
        self._renew(self._moved)

    def _taken(self, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Memory for a layer's keys and values like these: its part of the joined one, or its own."""
        shapes = [(*rows.shape[:2], self.capacity, rows.shape[3]) for rows in (k, v)]
        # parts of one memory share a count of writes, by which autograd would refuse the gradients of earlier layers
        if self.joined and self.memory is None and shapes[0] == shapes[1] and not torch.is_grad_enabled():
            self.memory = k.new_zeros((len(self.lengths), 2, *shapes[0]))  # what is masked has to be finite
        whole = self.memory
        if whole is not None and _fits(k, shapes, whole):
            return whole[layer, 0], whole[layer, 1]
        self.apart.add(layer)
        return k.new_zeros(shapes[0]), v.new_zeros(shapes[1])

    def _buffers(self, lo: int, hi: int) -> list[Tensor]:
        """The memory of layers lo..hi-1, [.., capacity, head_dim]: all in one where it is joined."""
        if self.memory is not None and self.apart.isdisjoint(range(lo, hi)):
            return [self.memory[lo:hi]]
        pairs = zip(self.keys[lo:hi], self.values[lo:hi], strict=True)
        return [rows for pair in pairs for rows in pair if rows is not None]

    def _renew(self, other: Callable[[Tensor], Tensor]) -> None:
        """Take other memory for every layer that has any: what `other` makes of it."""
        whole = self.memory = None if self.memory is None else other(self.memory)

        def one(layer: int, which: int, rows: Tensor | None) -> Tensor | None:
            if rows is None:
                return None
            return other(rows) if whole is None or layer in self.apart else whole[layer, which]

        self.keys = [one(layer, 0, rows) for layer, rows in enumerate(self.keys)]
        self.values = [one(layer, 1, rows) for layer, rows in enumerate(self.values)]

    def _moved(self, rows: Tensor) -> Tensor:
        """A larger buffer with the same rows: with those of this pass, too, which no length counts yet."""
        larger = self._larger(rows)
        larger[..., : rows.shape[-2], :] = rows
        return larger

    def _larger(self, rows: Tensor) -> Tensor:
        """A fresh buffer, its pages touched now rather than in a timed step."""
        return rows.new_zeros((*rows.shape[:-2], self.capacity, rows.shape[-1]))


def _fits(rows: Tensor, shapes: Sequence[tuple[int, ...]], whole: Tensor) -> bool:
    """Say whether a layer's keys and values, of these shapes, have a place in the memory of all layers."""
    same = (rows.device, rows.dtype) == (whole.device, whole.dtype)
    return same and all(shape == whole.shape[2:] for shape in shapes)


class PrefixCache:
    """A cache for training streams: main keys and values are given, new rows are joined to them.

    Out of place, so that gradients flow through the new rows. mains: how many of the new rows are main rows; they and
    those given are then in `kept`. A layer without given rows has None.
    """

    is_compileable = False

    def __init__(self, given: Mapping[int, tuple[Tensor, Tensor] | None], mains: int = 0) -> None:
        self.given, self.mains = given, mains
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def get_seq_length(self, layer: int = 0) -> int:
        """Rows given in the layer."""
        given = self.given.get(layer)
        return 0 if given is None else given[0].shape[2]

    def update(self, k: Tensor, v: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """k, v [B, kv_heads, q, head_dim] behind the given rows of the layer."""
        given = self.given[layer]
        keys, values = (k, v) if given is None else (torch.cat((given[0], k), 2), torch.cat((given[1], v), 2))
        if self.mains:
            end = keys.shape[2] - k.shape[2] + self.mains
            self.kept[layer] = keys[:, :, :end], values[:, :, :end]
        return keys, values


Fold = Callable[[Tensor | None, int, int, Any, int], Tensor | None]


class RaggedTensor(PerDevice):
    """A tensor, or None, of each request. sizes: how long each one's rows are along dimension `dim`, 0 or 1, of states.

    dim 1: rows [1, q, h] one after the other. dim 0: a batch [B, q, h].
    """

    def __init__(self, of: Sequence[Any], sizes: Sequence[int], dim: int) -> None:
        self.of, self.sizes, self.dim = list(of), list(sizes), dim

    def on(self, device: torch.device) -> RaggedTensor:
        """Return the same on a device."""
        return RaggedTensor(to_device_recursive(self.of, device), self.sizes, self.dim)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Heads' rows [B, heads, q, d] of all requests -> those of each."""
        return cast("tuple[Tensor, ...]", x.split(self.sizes, 2 if self.dim else 0))

    def attended(
        self, attend: Callable[[Tensor, Tensor, Tensor, Any], Tensor], query: Tensor, value: RaggedTensor, mask: Any
    ) -> Tensor:
        """These being keys: what each one's rows [B, heads, q, d] see of its own, [B, q, heads, d] of all."""
        masks = mask.of if isinstance(mask, RaggedTensor) else [mask] * len(self.of)
        each = zip(self.split(query), self.of, value.of, masks, strict=True)
        return torch.cat([attend(*one) for one in each], self.dim)


class BatchedKVCache:
    """The caches of several requests as layers see them."""

    is_compileable = False

    def __init__(self, caches: Sequence[Any], sizes: Sequence[int], dim: int) -> None:
        self.caches, self.sizes, self.dim = list(caches), list(sizes), dim

    def get_seq_length(self, layer: int = 0) -> tuple[int, ...]:
        """Rows of each in a layer."""
        return tuple(cache.get_seq_length(layer) for cache in self.caches)

    def update(self, k: Tensor, v: Tensor, layer: int, *_: Any, **__: Any) -> tuple[RaggedTensor, RaggedTensor]:
        """Write each one's k, v [B, kv_heads, q, head_dim] into its own cache; return all keys and values of each."""
        own = RaggedTensor([], self.sizes, self.dim)
        each = zip(self.caches, own.split(k), own.split(v), strict=True)
        keys, values = zip(*(cache.update(a, b, layer) for cache, a, b in each), strict=True)
        return RaggedTensor(keys, self.sizes, self.dim), RaggedTensor(values, self.sizes, self.dim)

    def windowed(self, fold: Fold, mask: RaggedTensor, window: int, rows: int, layer: int) -> RaggedTensor:
        """The mask of each with a sliding window folded in. fold: `Target.windowed`."""
        lengths = self.sizes if self.dim else [rows] * len(self.sizes)
        each = zip(mask.of, lengths, self.caches, strict=True)
        folded = [fold(one, window, q, cache, layer) for one, q, cache in each]
        return RaggedTensor(folded, self.sizes, self.dim)
