"""KV caches with a length per layer, tree compaction and batched requests.

`update` is the interface of Hugging Face attention modules; tree decoding needs the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from specbench_ss.engine.device_map import PerDevice, to_device, to_device_recursive
from specbench_ss.engine.tree import indices


class Cache:
    """Preallocated keys and values, [B, kv_heads, capacity, head_dim] per layer.

    lengths[layer] is the number of rows of the layer. Rows beyond it are scratch that the next write overwrites, so
    that dropping rows is free. The lengths are on the host: no synchronisation.

    joined: allocate all layers as one tensor, so that `compact` takes two operators; a layer with other shapes or on
    another device has its own. Only for caches whose layers are all used.
    grows: more rows than the capacity enlarge the cache (for a method without `max_tokens_per_step`); else an error.
    spare, block: a cache that grows has this many rows more than needed, rounded up to a multiple of `block`.
    """

    is_compileable = False
    grows = False
    limit: int | None = None  # rows that the current step may fill, if its method states `max_tokens_per_step`
    spare, block = 0, 1

    def __init__(self, layers: int, capacity: int, joined: bool = False) -> None:
        self.capacity, self.joined = capacity, joined
        self.memory: Tensor | None = None  # [layers, 2, B, kv_heads, capacity, head_dim], if joined
        self.separate = set[int]()  # layers with memory of their own although the cache is joined
        self.lengths = [0] * layers
        self.keys: list[Tensor | None] = [None] * layers
        self.values: list[Tensor | None] = [None] * layers

    def get_seq_length(self, layer: int = 0) -> int:
        """Return the number of rows in a layer."""
        return self.lengths[layer]

    def update(self, k: Tensor, v: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write k, v [B, kv_heads, q, head_dim] after the existing rows; return all [.., length + q, ..].

        The length is unchanged until `commit`.
        """
        start = self.lengths[layer]
        end = start + k.shape[2]
        self.check(start, end, layer)
        if not self.has(layer):
            self.allocate(k, v, layer)
        keys, values = self.memory_of(layer)
        keys[:, :, start:end] = k
        values[:, :, start:end] = v
        return keys[:, :, :end], values[:, :, :end]

    def write_slots(self, like: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor, int]:
        """Return where a kernel writes q rows like these [B, kv_heads, q, head_dim], instead of `update`.

        Keys and values of the layer [B, kv_heads, capacity, head_dim], int64 rows [q], and the number of rows then.
        """
        start, q = self.lengths[layer], like.shape[2]
        keys, values = self.writable(layer, q, (like.shape[1], like.shape[3]), like)
        return keys, values, row_numbers(like.device, start, start + q), start + q

    def writable(self, layer: int, q: int, heads: tuple[int, int], like: Tensor) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values [B, kv_heads, capacity, head_dim] with room for q more rows.

        heads: kv_heads and head_dim. like: a tensor [B, ..] of the dtype and device of the rows.
        """
        start = self.lengths[layer]
        self.check(start, start + q, layer)
        if self.keys[layer] is None:
            rows = like.new_empty(len(like), heads[0], q, heads[1])
            self.allocate(rows, rows, layer)
        return cast("Tensor", self.keys[layer]), cast("Tensor", self.values[layer])

    def check(self, start: int, end: int, layer: int) -> None:
        """Make room for rows start to end of a layer. Raises RuntimeError if they exceed the limit."""
        if end > (self.capacity if self.limit is None else min(self.capacity, self.limit)):
            self._grow(start, end, layer)

    def has(self, layer: int) -> bool:
        """Return True if the layer's memory is allocated, which the first `update` does."""
        return self.keys[layer] is not None

    def memory_of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values [B, kv_heads, capacity, head_dim]. Raises KeyError if not allocated."""
        keys, values = self.keys[layer], self.values[layer]
        if keys is None or values is None:
            raise KeyError(f"layer {layer} has no rows yet")
        return keys, values

    def commit(self, rows: int, lo: int = 0, hi: int | None = None) -> None:
        """Extend the length of layers lo..hi-1 by `rows` of the rows just written."""
        for layer in range(lo, len(self.lengths) if hi is None else hi):
            self.lengths[layer] += rows

    def set_limit(self, rows: int | None) -> None:
        """Make writes beyond this many rows an error, regardless of the capacity; None = no limit."""
        self.limit = rows

    def compact(self, start: int, rows: Sequence[int] | Tensor, lo: int = 0, hi: int | None = None) -> None:
        """Keep only these of the rows written at start.. (ascending offsets), in layers lo..hi-1.

        Offsets int64 [n] on a device are used without a synchronisation; then all rows are moved.
        """
        count, first, sources = len(rows), 0, None
        if isinstance(rows, torch.Tensor):
            sources = rows + start
        else:
            first = next((i for i, r in enumerate(rows) if r != i), count)  # the first row that is not in place
        hi = len(self.lengths) if hi is None else hi
        for memory in self._buffers(lo, hi) if first < count else ():
            if sources is None:
                sources = indices([start + int(r) for r in rows[first:]], memory.device)
            sources = to_device(sources, memory.device)  # one transfer per device: layers are in order
            memory[..., start + first : start + count, :] = memory.index_select(-2, sources)
        self.lengths[lo:hi] = [start + count] * (hi - lo)

    def select_sequences(self, sequences: Tensor) -> None:
        """Keep only these sequences [B'] of a batch."""
        self._replace_memory(lambda rows: rows.index_select(-4, to_device(sequences, rows.device)))

    def clear(self) -> None:
        """Set all lengths to zero; keep the memory."""
        self.lengths = [0] * len(self.lengths)

    def zero_(self) -> None:
        """Fill the whole memory with zeros, beyond the lengths as well."""
        for memory in self._buffers(0, len(self.lengths)):
            memory.zero_()

    def free(self) -> None:
        """Set all lengths to zero and free the memory."""
        self.clear()
        self.keys, self.values = [None] * len(self.keys), [None] * len(self.values)
        self.memory, self.separate = None, set()

    def reserve(self, capacity: int, most: int = 0) -> None:
        """Make room for at least this many rows; the contents are lost. most: up to it a larger cache doubles."""
        if capacity > (before := self.capacity):
            self.capacity = 0  # free the old memory before allocating the new
            self._replace_memory(self._new_buffer)
            self.capacity = max(capacity, min(2 * before, most))
            self._replace_memory(self._new_buffer)
        self.clear()

    def _grow(self, start: int, end: int, layer: int) -> None:
        """Make room for rows up to `end`, at least 1.5 times the capacity; keep the contents.

        Raises RuntimeError if the cache does not grow.
        """
        if not self.grows:
            limit = min(self.capacity, self.limit or self.capacity)
            raise RuntimeError(
                f"a cache for {limit} rows cannot take rows {start} to {end} in layer {layer}: "
                "raise the method's max_tokens_per_step()"
            )
        capacity = max(end + self.spare, self.capacity * 3 // 2)
        self.capacity = -(-capacity // self.block) * self.block
        self._replace_memory(self._grown_copy)

    def allocate(self, k: Tensor, v: Tensor, layer: int) -> None:
        """Allocate a layer's keys and values like these [B, kv_heads, q, head_dim]."""
        self.keys[layer], self.values[layer] = self._memory_like(k, v, layer)

    def _memory_like(self, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Return memory for a layer's keys and values like these: its part of the joined one, or its own."""
        shapes = [(*rows.shape[:2], self.capacity, rows.shape[3]) for rows in (k, v)]
        # views share a version counter, so autograd would reject the gradients of earlier layers
        if self.joined and self.memory is None and shapes[0] == shapes[1] and not torch.is_grad_enabled():
            self.memory = k.new_zeros((len(self.lengths), 2, *shapes[0]))  # masked keys must be finite
        joined = self.memory
        if joined is not None and _fits(k, shapes, joined):
            return joined[layer, 0], joined[layer, 1]
        self.separate.add(layer)
        return k.new_zeros(shapes[0]), v.new_zeros(shapes[1])

    def _buffers(self, lo: int, hi: int) -> list[Tensor]:
        """Return the memory of layers lo..hi-1, [.., capacity, head_dim]; one tensor if joined."""
        if self.memory is not None and self.separate.isdisjoint(range(lo, hi)):
            return [self.memory[lo:hi]]
        pairs = zip(self.keys[lo:hi], self.values[lo:hi], strict=True)
        return [rows for pair in pairs for rows in pair if rows is not None]

    def _replace_memory(self, make: Callable[[Tensor], Tensor]) -> None:
        """Replace the memory of every allocated layer by the result of `make`."""
        joined = self.memory = None if self.memory is None else make(self.memory)

        def one(layer: int, which: int, rows: Tensor | None) -> Tensor | None:
            if rows is None:
                return None
            return make(rows) if joined is None or layer in self.separate else joined[layer, which]

        self.keys = [one(layer, 0, rows) for layer, rows in enumerate(self.keys)]
        self.values = [one(layer, 1, rows) for layer, rows in enumerate(self.values)]

    def _grown_copy(self, rows: Tensor) -> Tensor:
        """Return a larger buffer with the same rows, those of the current pass included."""
        larger = self._new_buffer(rows)
        larger[..., : rows.shape[-2], :] = rows
        return larger

    def _new_buffer(self, rows: Tensor) -> Tensor:
        """Return a zeroed buffer, so that its pages are touched now and not in a timed step."""
        return rows.new_zeros((*rows.shape[:-2], self.capacity, rows.shape[-1]))


@cache  # kept, since graphs read it; few sizes
def _table(device: torch.device, size: int) -> Tensor:
    return torch.arange(size, device=device)


def row_numbers(device: torch.device, start: int, end: int) -> Tensor:
    """Return int64 start..end-1, a view of a table."""
    return _table(device, 1 << max(12, end.bit_length()))[start:end]


def _fits(rows: Tensor, shapes: Sequence[tuple[int, ...]], joined: Tensor) -> bool:
    """Return True if a layer's keys and values, of these shapes, fit the joined memory."""
    same_format = (rows.device, rows.dtype) == (joined.device, joined.dtype)
    return same_format and all(shape == joined.shape[2:] for shape in shapes)


class PrefixCache:
    """Cache of training streams: appends new rows to main keys and values, the prefix.

    Out of place, so that gradients flow through the new rows. mains: number of new rows that are main rows; they and
    the prefix are stored in `kept`. A layer without a prefix has None.
    """

    is_compileable = False

    def __init__(self, prefix: Mapping[int, tuple[Tensor, Tensor] | None], mains: int = 0) -> None:
        self.prefix, self.mains = prefix, mains
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def get_seq_length(self, layer: int = 0) -> int:
        """Return the number of prefix rows of the layer."""
        prefix = self.prefix.get(layer)
        return 0 if prefix is None else prefix[0].shape[2]

    def update(self, k: Tensor, v: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append k, v [B, kv_heads, q, head_dim] to the prefix rows of the layer."""
        prefix = self.prefix[layer]
        keys, values = (k, v) if prefix is None else (torch.cat((prefix[0], k), 2), torch.cat((prefix[1], v), 2))
        if self.mains:
            end = keys.shape[2] - k.shape[2] + self.mains
            self.kept[layer] = keys[:, :, :end], values[:, :, :end]
        return keys, values


FoldWindow = Callable[[Tensor | None, int, int, Any, int], Tensor | None]


class RaggedTensor(PerDevice):
    """A tensor, or None, of each request. sizes: length of each request's states along dim 0 or 1.

    dim 1: rows [1, q, h] in sequence. dim 0: a batch [B, q, h].
    """

    def __init__(self, of: Sequence[Any], sizes: Sequence[int], dim: int) -> None:
        self.of, self.sizes, self.dim = list(of), list(sizes), dim

    def on(self, device: torch.device) -> RaggedTensor:
        """Return the same on a device."""
        return RaggedTensor(to_device_recursive(self.of, device), self.sizes, self.dim)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Split head states [B, heads, q, d] of all requests into those of each."""
        return cast("tuple[Tensor, ...]", x.split(self.sizes, 2 if self.dim else 0))

    def attend(
        self, attend: Callable[[Tensor, Tensor, Tensor, Any], Tensor], query: Tensor, value: RaggedTensor, mask: Any
    ) -> Tensor:
        """Attend with these keys: rows [B, heads, q, d] over each request's own keys -> [B, q, heads, d] of all."""
        masks = mask.of if isinstance(mask, RaggedTensor) else [mask] * len(self.of)
        requests = zip(self.split(query), self.of, value.of, masks, strict=True)
        return torch.cat([attend(*one) for one in requests], self.dim)


class BatchedKVCache:
    """KV caches of several requests, as one cache for the layers."""

    is_compileable = False

    def __init__(self, caches: Sequence[Any], sizes: Sequence[int], dim: int) -> None:
        self.caches, self.sizes, self.dim = list(caches), list(sizes), dim

    def get_seq_length(self, layer: int = 0) -> tuple[int, ...]:
        """Return the number of rows of each request in a layer."""
        return tuple(cache.get_seq_length(layer) for cache in self.caches)

    def update(self, k: Tensor, v: Tensor, layer: int, *_: Any, **__: Any) -> tuple[RaggedTensor, RaggedTensor]:
        """Write each request's k, v [B, kv_heads, q, head_dim] into its cache; return all keys and values of each."""
        splitter = RaggedTensor([], self.sizes, self.dim)
        requests = zip(self.caches, splitter.split(k), splitter.split(v), strict=True)
        keys, values = zip(*(cache.update(a, b, layer) for cache, a, b in requests), strict=True)
        return RaggedTensor(keys, self.sizes, self.dim), RaggedTensor(values, self.sizes, self.dim)

    def windowed(self, fold: FoldWindow, mask: RaggedTensor, window: int, rows: int, layer: int) -> RaggedTensor:
        """Return each request's mask with a sliding window folded in. fold: `Target.windowed`."""
        lengths = self.sizes if self.dim else [rows] * len(self.sizes)
        requests = zip(mask.of, lengths, self.caches, strict=True)
        folded = [fold(one, window, q, cache, layer) for one, q, cache in requests]
        return RaggedTensor(folded, self.sizes, self.dim)
