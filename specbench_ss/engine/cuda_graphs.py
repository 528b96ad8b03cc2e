"""CUDA graphs of decoder passes over static buffers: capture, replay and proof.

A pass of few rows through a stretch of layers is given its rows, mask and places in buffers: rows padded to the next
width, keys to the next block. So the same pass is made again and again, and can be replayed by a CUDA graph. Padded
rows come last, write behind the rows that count, and are seen by none of them. What a drafter computes of tensors
alone, without a cache, is replayed as it is.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor

from specbench_ss.engine.kv_cache import Cache
from specbench_ss.errors import first_line
from specbench_ss.time_limit import alarm_held_back

Pass = Callable[[], "tuple[Tensor, ...]"]
Replay = Callable[[Pass], Pass]  # a pass over buffers -> the same, replayed

SOMETHING_ELSE = "passes that give something else when they are replayed"
PROOFS = 2  # tries at most: which of two equal numbers is the larger one may change from pass to pass


class GraphCaptureError(Exception):  # noqa: N818 - not the user's fault, and none of the method's
    """A pass cannot be recorded here, or gives something else when it is replayed. Its text says which."""


@contextmanager
def _reason_told() -> Iterator[None]:
    """Raise CannotReplay for what torch raises where a pass cannot be recorded or replayed."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise GraphCaptureError("passes for whose recording there is not enough memory") from None
    except (RuntimeError, NotImplementedError, TypeError) as error:  # of the device's own libraries
        raise GraphCaptureError(f"passes that cannot be recorded ({first_line(error)})") from None


def same(given: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Return True if all tensors are equal; NaN equals NaN, +0 equals -0.

    The same operators on the same shapes give that on one device, in every number format. A bound on the difference
    would be of no use: in half precision the layers of a deep model amplify rounding to a third of the logits.
    """
    return all(bool(((a == b) | (a.isnan() & b.isnan())).all()) for a, b in zip(given, expected, strict=True))


def run_eagerly(one: Pass) -> Pass:
    """Run the pass eagerly each time: over the same buffers as where it is replayed."""
    return one


class Graphs:
    """Records passes of one device as CUDA graphs. Their results lie in memory that a later replay writes.

    All recordings share a pool of memory: they are replayed one after the other, and what they gave is copied before.
    The pool's memory is given back when the last of them is gone.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.pool: Any = None
        self.alive = WeakSet[Any]()  # graphs of the pool: one whose last graph is gone takes no other one
        self.broken: list[Any] = []  # graphs that were not ended: torch's allocator may ask them still

    def __call__(self, one: Pass) -> Pass:
        """Record the pass. Raises what torch raises where that fails; others can be recorded all the same."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device), alarm_held_back():
            before = torch.cuda.current_stream()
            self.stream.wait_stream(before)
            try:
                with torch.cuda.stream(self.stream):
                    for _ in range(2):  # libraries choose their kernels and take workspaces before it is recorded
                        one()
                    outs = self._captured(graph, one)
            finally:
                torch.cuda.set_stream(before)  # a capture that fails leaves its own in use
                before.wait_stream(self.stream)

        def replayed() -> tuple[Tensor, ...]:
            graph.replay()
            return outs

        return replayed

    def _captured(self, graph: Any, one: Pass) -> tuple[Tensor, ...]:
        if not self.alive:
            self.pool, self.alive = torch.cuda.graph_pool_handle(), WeakSet()
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                outs = one()
        except BaseException:
            self._leave(graph)
            raise
        self.alive.add(graph)
        return outs

    def _leave(self, graph: Any) -> None:
        """Have torch's allocator end a recording that failed, and take another pool for the next ones.

        torch up to 2.11 does not: it would take every block for one of the pool, and refuse all later recordings.
        """
        with suppress(RuntimeError, AttributeError):  # it was ended already, or torch calls this otherwise
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self.pool)
            torch._C._cuda_releasePool(torch.cuda.current_device(), self.pool)
        self.broken.append(graph)
        self.pool, self.alive = None, WeakSet()


Layers = Callable[[Tensor, Any, Tensor, Any], tuple[Tensor, ...]]
WIDTHS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)  # rows that passes are padded to
UNPADDED = 512  # rows of a pass at most that takes none besides, as that of streams
BLOCK = 256  # keys
MOST_KEPT = 512  # passes whose buffers and recordings are kept
NO_ROOM = "a cache without room for padded keys"
Memory = tuple[list["Tensor | None"], list["Tensor | None"]]  # keys and values of all layers of a cache


class StaticRows:
    """Keys and values of a cache as a replayed pass sees them: it writes rows `at` and sees the first `keys` ones."""

    is_compileable = False

    def __init__(self, cache: Cache, at: Tensor, keys: int) -> None:
        self.cache, self.at, self.keys = cache, at, keys
        self.layers = set[int]()  # that have written rows

    def get_seq_length(self, layer: int = 0) -> int:
        """Raise NotImplementedError: how many keys count is in the mask alone, and changes from replay to replay."""
        raise NotImplementedError("layers that ask how many keys there are")

    def update(self, k: Tensor, v: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write k, v [1, kv_heads, q, head_dim]; return [1, kv_heads, keys, head_dim]."""
        keys, values = self.cache.memory_of(layer)
        keys.index_copy_(2, self.at, k)
        values.index_copy_(2, self.at, v)
        self.layers.add(layer)
        return keys[:, :, : self.keys], values[:, :, : self.keys]

    def written(self, count: int) -> list[Tensor]:
        """Return a copy of the first rows that the pass writes; those behind them are padding."""
        return [part.index_select(2, self.at[:count]) for layer in self.layers for part in self.cache.memory_of(layer)]

    def spoil(self) -> None:
        """Overwrite the rows that the pass writes, so that a pass that does not write them shows."""
        for part in (part for layer in self.layers for part in self.cache.memory_of(layer)):
            part.index_fill_(2, self.at, 1)


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
        self.x[:, :q], self.x[:, q:] = x, 0  # what lay there may not have been finite
        self.mask.fill_(torch.finfo(self.mask.dtype).min)
        self.mask[..., 0] = 0  # a row that sees nothing is not finite in half precision
        self.mask[:, :, :q, : past + q] = 0 if mask is None else mask
        torch.arange(past, past + len(self.at), out=self.at)
        if self.turn is not None:
            self.turn[0][:, :q], self.turn[1][:, :q] = rotary


@dataclass(slots=True)
class TensorInputs:
    """What a function of tensors is given: a copy of each."""

    held: list[Tensor]

    def fill(self, *given: Tensor) -> None:
        """Take tensors of the same shapes and formats."""
        for buffer, tensor in zip(self.held, given, strict=True):
            buffer.copy_(tensor)


@dataclass(slots=True)
class GraphInputs:
    """A pass over buffers. where: the keys and values that it writes; None without a cache."""

    buffers: Buffers | TensorInputs
    one: Pass
    where: StaticRows | None = None


@dataclass(slots=True)
class CapturedGraph:
    """A recording. memory: the cache's, which it writes. past: rows behind which it was recorded.

    proven: whether it gives what the pass gives that is run again, behind another number of rows where it has a cache.
    """

    buffers: Buffers | TensorInputs
    replayed: Pass
    memory: Memory | None
    past: int | None
    proven: bool = False


class CudaGraphRunner:
    """The replayed passes of one model. replay: how a pass is made again.

    A recording is used once it has given, behind another number of rows than it was recorded behind, what the same pass
    gives eagerly, run again. So what is baked in of rows, masks, places or the host's numbers shows.
    made: how many passes were recorded so far.
    tried: how often one was to be recorded or proven: an answer during which that was, took longer than it takes.
    declined: how many passes of steps could not be replayed, by the reason in words; prompts are not counted.
    Passes of a draft model beside this one, and what a drafter makes by itself, are among all three.
    What is recorded of a drafter or a cache that is gone is forgotten with the next request.
    """

    def __init__(self, replay: Replay, widths: tuple[int, ...] = WIDTHS) -> None:
        self.replay, self.widths = replay, widths
        self.counts = Counter[str]()  # of what was made and tried
        self.fallbacks = Counter[str]()
        self.kept: OrderedDict[Hashable, CapturedGraph] = OrderedDict()
        self.memories: WeakKeyDictionary[Cache, Memory] = WeakKeyDictionary()  # of caches, when last seen
        self.failed_captures: dict[Hashable, str] = {}  # (name, rows or forms) of what cannot be replayed -> why

    @property
    def n_captures(self) -> int:
        """How many passes were recorded."""
        return self.counts["made"]

    @property
    def n_capture_attempts(self) -> int:
        """How often a pass was to be recorded or proven."""
        return self.counts["tried"]

    def of_another(self) -> CudaGraphRunner:
        """Return passes of another model of the same form, replayed in the same way."""
        return CudaGraphRunner(self.replay, self.widths)

    def of_draft(self) -> CudaGraphRunner:
        """Return passes of a model that drafts for this one, whose counts are this one's as well."""
        own = self.of_another()
        own.counts, own.fallbacks = self.counts, self.fallbacks
        return own

    def evict(self, cache: Cache | None = None) -> None:
        """Keep no recording over this cache's memory, or none at all: that memory is not used any more."""
        if cache is None:
            self.kept.clear()
            self.memories.clear()
        else:
            self.memories.pop(cache, None)
            self._forget_what_is_gone()

    def _forget_what_is_gone(self) -> None:
        """Keep no recording over memory that no cache has any more, and nothing of a drafter that is gone."""
        there = {id(keys) for keys, _ in self.memories.values()}
        for key, kept in list(self.kept.items()):
            if is_gone(key) or (kept.memory is not None and id(kept.memory[0]) not in there):
                self.kept.pop(key, None)
        for kind in [kind for kind in self.failed_captures if is_gone(kind)]:
            del self.failed_captures[kind]

    def room(self, rows: int) -> int:
        """How many rows a cache needs for steps up to so many rows: padded ones besides, in whole blocks."""
        return _keys(rows + self.widths[-1])

    def reserve(self, cache: Cache, rows: int, zeroed: bool = False) -> None:
        """Empty a cache for a request of so many rows, with room for padded ones. zeroed: and fill it with zeros."""
        if self.room(rows) > cache.capacity:
            self.evict(cache)  # before other memory is taken
        else:
            self._forget_what_is_gone()
        cache.spare, cache.block = self.widths[-1], BLOCK
        cache.reserve(self.room(rows))
        if zeroed:
            cache.zero_()

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
        if not _is_step(layer, cache):  # a prompt is made once, and its many rows keep a device busy
            return None
        if why := self._why_not(x, layer, cache, mask, rotary, self.widths[-1] if pad else UNPADDED):
            self.fallbacks[why] += 1
            return None
        past = cache.get_seq_length(layer)
        cache.check(past, past + q, layer)
        rows = _next(self.widths, q) if pad else q
        if _keys(past + rows) > cache.capacity:
            self.fallbacks[NO_ROOM] += 1
            return None
        if self.memories.get(cache, (None,))[0] is not cache.keys:
            self.memories[cache] = (cache.keys, cache.values)
        name = held_weakly(name)
        key = (name, rows, _keys(past + rows), id(cache.keys))  # which is held: no other has its number
        form = partial(_form, layers, x, cache, rotary, rows, past)
        outs = self._again(key, (name, rows), form, (x, mask, rotary, past), past)
        return None if outs is None else tuple(out[:, :q].clone() for out in outs)

    def call(self, name: Hashable, function: Callable[..., tuple[Tensor, ...]], *given: Tensor) -> tuple[Tensor, ...]:
        """Return what a function of these tensors alone gives: it looks at no number, and writes nowhere.

        name: of the function, unique among those of this model; what else it reads has to be held by the name.
        """
        key = (held_weakly(name), *((tuple(tensor.shape), tensor.dtype) for tensor in given))

        def form() -> GraphInputs:
            buffers = TensorInputs([torch.zeros_like(tensor) for tensor in given])
            return GraphInputs(buffers, lambda: function(*buffers.held))

        outs = self._again(key, key, form, given)
        return function(*given) if outs is None else tuple(out.clone() for out in outs)

    def _again(
        self,
        key: Hashable,
        kind: Hashable,
        form: Callable[[], GraphInputs],
        given: Sequence[Any],
        past: int | None = None,
    ) -> tuple[Tensor, ...] | None:
        """Return what the pass of this key gives, in memory that the next one writes; None where it is not replayed.

        form: makes the pass anew. kind: what cannot be replayed once is not tried again. past: rows behind which it is
        made; None of a pass without a cache.
        """
        try:
            if kind in self.failed_captures:
                raise GraphCaptureError(self.failed_captures[kind])
            if key not in self.kept or not self.kept[key].proven:
                with _reason_told():
                    made = self._first_times(key, form(), given, past)
                if made is not None:
                    return made
        except GraphCaptureError as error:
            self.failed_captures[kind] = str(error)
            self.fallbacks[str(error)] += 1
            self.kept.pop(key, None)
            return None
        self.kept.move_to_end(key)
        self.kept[key].buffers.fill(*given)
        return self.kept[key].replayed()

    def _first_times(
        self, key: Hashable, form: GraphInputs, given: Sequence[Any], past: int | None
    ) -> tuple[Tensor, ...] | None:
        """Record a pass, or prove its recording behind another number of rows; return what it gives until then.

        Raises CannotReplay, and what torch raises.
        """
        anew = key not in self.kept
        if anew:  # over other rows than are given: what is baked in of these shows
            self.counts["tried"] += 1
            memory = None if form.where is None else (form.where.cache.keys, form.where.cache.values)
            self.kept[key] = CapturedGraph(form.buffers, self.replay(form.one), memory, past)
            self.counts["made"] += 1
            while len(self.kept) > MOST_KEPT:
                self.kept.popitem(last=False)
        form.buffers.fill(*given)
        kept = self.kept[key]
        if past is not None and past == kept.past:
            return form.one()
        self.counts["tried"] += not anew
        kept.buffers.fill(*given)
        kept.proven = any(_gives_the_same(kept.replayed, form, given[0]) for _ in range(PROOFS))
        if not kept.proven:
            raise GraphCaptureError(SOMETHING_ELSE)
        return None

    def record_fallback(self, why: str, layer: int, cache: Any) -> None:
        """Count a pass that a method makes by itself, since it cannot be replayed, from the layer it begins with."""
        if _is_step(layer, cache):
            self.fallbacks[why] += 1

    def _why_not(self, x: Tensor, layer: int, cache: Any, mask: Tensor | None, rotary: Any, most: int) -> str:
        """Return why a pass cannot be captured; '' if it can. most: rows of the widest buffers."""
        b, q, _ = x.shape
        if b != 1:
            return "rows of several requests"
        if q > most:
            return f"more than {most} rows"
        if mask is None and q > 1:
            return "several rows without a mask"
        if rotary is not None and not isinstance(rotary, tuple):
            return "positions of another form"
        return "" if isinstance(cache, Cache) and cache.has(layer) else "a cache of another form"


def _form(layers: Layers, x: Tensor, cache: Cache, rotary: Any, rows: int, past: int) -> GraphInputs:
    """Return a pass of so many rows behind `past` keys, over buffers of zeros."""
    turn = None if rotary is None else tuple(part.new_zeros(1, rows, part.shape[-1]) for part in rotary)
    buffers = Buffers(
        x.new_zeros(1, rows, x.shape[-1]),
        x.new_zeros(1, 1, rows, _keys(past + rows)),
        torch.arange(past, past + rows, device=x.device),
        turn,
    )
    where = StaticRows(cache, buffers.at, _keys(past + rows))

    def one() -> tuple[Tensor, ...]:
        # layers know what they made of cos and sin by the pair that was given: a new one, for other values
        return layers(buffers.x, where, buffers.mask, None if turn is None else (turn[0], turn[1]))

    return GraphInputs(buffers, one, where)


def _gives_the_same(replayed: Pass, form: GraphInputs, x: Tensor) -> bool:
    """Say whether a replay gives, and writes of rows x, what the pass does eagerly."""
    expected = [out.clone() for out in form.one()]
    if form.where is None:
        return same(replayed(), expected)
    expected += form.where.written(x.shape[1])
    form.where.spoil()
    return same([*replayed(), *form.where.written(x.shape[1])], expected)


def _next(widths: Sequence[int], rows: int) -> int:
    return next(width for width in widths if width >= rows)


def _keys(rows: int) -> int:
    return -(-rows // BLOCK) * BLOCK


def held_weakly(name: Hashable) -> Hashable:
    """Return the same name without a hold on what is known by its identity alone in it, such as a module."""
    if isinstance(name, tuple):
        return tuple(map(held_weakly, name))
    return ref(name) if type(name).__hash__ is object.__hash__ else name


def is_gone(name: Hashable) -> bool:
    """Say whether a name has something in it that is gone."""
    if isinstance(name, tuple):
        return any(map(is_gone, name))
    return isinstance(name, ref) and name() is None


def _is_step(layer: int, cache: Any) -> bool:
    """Say whether rows come behind others, in inference: neither a prompt nor a pass of a training."""
    return cache is not None and torch.is_inference_mode_enabled() and cache.get_seq_length(layer) > 0
