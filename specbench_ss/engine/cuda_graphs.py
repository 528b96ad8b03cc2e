"""CUDA graphs of decoder passes over static buffers: capture, replay and check.

A pass of few query tokens gets its inputs in static buffers: query tokens padded to the next width, keys to the next
block. So the same pass recurs and can be replayed as a CUDA graph. Padding comes last, is written behind the real rows
and is masked from them. A function of tensors alone, without a cache, is captured without padding.
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

from specbench_ss.engine.kv_cache import Cache, row_numbers
from specbench_ss.engine.layers import triton
from specbench_ss.errors import first_line
from specbench_ss.time_limit import defer_alarm

Pass = Callable[[], "tuple[Tensor, ...]"]
Replay = Callable[[Pass], Pass]  # captures a pass over buffers and returns its replay

SOMETHING_ELSE = "passes that give something else when they are replayed"
CHECK_TRIES = 2  # the larger of two equal numbers may differ from pass to pass


class GraphCaptureError(Exception):  # noqa: N818 - not the user's fault, and none of the method's
    """A pass cannot be captured here, or its replay gives other results; the text has the reason."""


@contextmanager
def _capture_errors() -> Iterator[None]:
    """Raise GraphCaptureError for errors of torch during a capture or replay."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise GraphCaptureError("not enough memory to capture a pass") from None
    except (RuntimeError, TypeError, ValueError, LookupError, AssertionError) as error:  # as of the device's libraries
        raise GraphCaptureError(f"passes that cannot be captured ({first_line(error)})") from None


def same(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Return True if all tensors are equal; NaN equals NaN, +0 equals -0.

    Exact, since the same operators on the same shapes give equal results on one device in every number format. A bound
    would be useless: in half precision the layers of a deep model amplify rounding to a third of the logits.
    """
    return all(bool(((a == b) | (a.isnan() & b.isnan())).all()) for a, b in zip(actual, expected, strict=True))


def run_eagerly(run_pass: Pass) -> Pass:
    """Run the pass eagerly over the same buffers; a `Replay` without CUDA graphs."""
    return run_pass


class Graphs:
    """Captures passes on one device as CUDA graphs. A later replay overwrites their outputs.

    All graphs share a memory pool, since they are replayed one after the other and their outputs are copied. The pool
    is freed with its last graph.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.pool: Any = None
        self.graphs = WeakSet[Any]()  # graphs of the pool; a pool without a graph cannot be reused
        self.failed_graphs: list[Any] = []  # graphs without an end: torch's allocator may still refer to them

    def __call__(self, run_pass: Pass) -> Pass:
        """Capture the pass. Raises torch's errors; later captures remain possible."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device), defer_alarm():
            before = torch.cuda.current_stream()
            self.stream.wait_stream(before)
            try:
                with torch.cuda.stream(self.stream):
                    for _ in range(2):  # libraries choose kernels and allocate workspaces before the capture
                        run_pass()
                    outputs = self._capture(graph, run_pass)
            finally:
                torch.cuda.set_stream(before)  # a failed capture leaves its stream current
                before.wait_stream(self.stream)

        def replayed() -> tuple[Tensor, ...]:
            graph.replay()
            return outputs

        return replayed

    def _capture(self, graph: Any, run_pass: Pass) -> tuple[Tensor, ...]:
        if not self.graphs:
            self.pool, self.graphs = torch.cuda.graph_pool_handle(), WeakSet()
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                outputs = run_pass()
        except BaseException:
            self._end_failed_capture(graph)
            raise
        self.graphs.add(graph)
        return outputs

    def _end_failed_capture(self, graph: Any) -> None:
        """End a failed capture in torch's allocator, and use another pool for the next ones.

        torch up to 2.11 does not: it would assign every block to the pool and refuse all later captures.
        """
        with suppress(RuntimeError, AttributeError):  # already ended, or renamed in this torch
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self.pool)
            torch._C._cuda_releasePool(torch.cuda.current_device(), self.pool)
        self.failed_graphs.append(graph)
        self.pool, self.graphs = None, WeakSet()


PassFunction = Callable[..., tuple[Tensor, ...]]  # of a StaticPass and tensors
Context = Callable[[Any, Tensor], Tensor]  # (number of cached rows, key positions [keys]) -> bool [q, keys]
WIDTHS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)  # padded numbers of query tokens
MAX_UNPADDED = 512  # query tokens of a pass without padding, as of streams
BLOCK = 256  # keys
MAX_GRAPHS = 512  # graphs that are kept with their buffers
NO_ROOM = "a cache without room for padded keys"
Memory = tuple[list["Tensor | None"], list["Tensor | None"]]  # keys and values of all layers of a cache


class StaticRows:
    """KV cache inside a captured pass: writes rows `positions` and returns the first `keys` rows."""

    is_compileable = False

    def __init__(self, cache: Cache, positions: Tensor, keys: int, written: Callable[[int], None]) -> None:
        self.cache, self.positions, self.keys, self.written = cache, positions, keys, written

    def get_seq_length(self, layer: int = 0) -> int:
        """Raise NotImplementedError: only the mask determines the number of keys, which changes between replays."""
        raise NotImplementedError("layers that ask for the number of keys")

    def update(self, k: Tensor, v: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write k, v [1, kv_heads, q, head_dim]; return [1, kv_heads, keys, head_dim]."""
        keys, values, positions, count = self.write_slots(k, layer)
        keys.index_copy_(2, positions, k)
        values.index_copy_(2, positions, v)
        return keys[:, :, :count], values[:, :, :count]

    def write_slots(self, like: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor, int]:
        """Return where a kernel writes rows like these, as `Cache.write_slots`."""
        self.written(layer)
        return *self.cache.memory_of(layer), self.positions, self.keys


@dataclass(slots=True)
class PassBuffers:
    """Static inputs of a pass: tensors padded with zeros along their dimensions of rows, and the cached rows before."""

    past: Tensor  # int64 [1]
    tensors: list[Tensor]
    n: int = 0  # rows without padding

    def fill(self, past: int, n: int, *tensors: Tensor) -> None:
        """Copy tensors of n rows."""
        self.past.fill_(past)
        for buffer, tensor in zip(self.tensors, tensors, strict=True):
            if n != self.n:
                buffer.zero_()
            buffer[tuple(map(slice, tensor.shape))] = tensor
        self.n = n


class StaticPass:
    """A pass inside a graph behind the rows of a cache, whose number `past` [1] is on the device and changes.

    cache: None = the pass has none. keys: padded number of keys. start: number of cached rows now, for the check alone.
    """

    def __init__(self, cache: Any, past: Tensor, keys: int, start: int) -> None:
        self.cache, self.past, self.keys, self.start = cache, past, keys, start
        self.written: dict[int, int] = {}  # layer -> rows behind the cached ones

    def rows(self, n: int, first: int = 0) -> StaticRows:
        """Return the cache for layers that write n rows, of which the first is `first` rows behind the cached ones."""
        steps = row_numbers(self.past.device, first, first + n)
        return StaticRows(self.cache, self.past + steps, self.keys, partial(self._note, first + n))

    def _note(self, end: int, layer: int) -> None:
        self.written[layer] = max(end, self.written.get(layer, 0))

    def mask(self, visible: Tensor, dtype: torch.dtype, context: Context | None = None) -> Tensor:
        """Return the additive mask [1, 1, q, keys] of visible [q, m], m rows behind the cached ones.

        context: the cached rows that are visible; None = all of them.
        """
        if context is None and (mask := triton.tree_mask(visible, self.past, self.keys, dtype)) is not None:
            return mask
        m, keys = visible.shape[1], torch.arange(self.keys, device=visible.device)
        offsets = keys - self.past  # [keys]
        shown, cached = visible[:, offsets.clamp(0, m - 1)] & (offsets < m), offsets < 0
        shown = shown | cached if context is None else torch.where(cached, context(self.past[0], keys), shown)
        mask = torch.zeros(shown.shape, dtype=dtype, device=visible.device)
        return mask.masked_fill_(~shown, torch.finfo(dtype).min)[None, None]

    def copy_rows(self, n: int) -> list[Tensor]:
        """Return a copy of the first n written rows of each layer; 0 = all."""
        return [part[:, :, self.start : self.start + (n or end)].clone() for end, part in self._parts()]

    def overwrite(self) -> None:
        """Overwrite the written rows."""
        for end, part in self._parts():
            part[:, :, self.start : self.start + end] = 1

    def _parts(self) -> Iterator[tuple[int, Tensor]]:
        for layer, end in self.written.items():
            for part in self.cache.memory_of(layer):
                yield end, part


@dataclass(slots=True)
class GraphInputs:
    """A pass over buffers. cache_rows: what it writes to the KV cache, or None."""

    buffers: PassBuffers
    run_pass: Pass
    cache_rows: StaticPass | None = None


@dataclass(slots=True)
class CapturedGraph:
    """A captured pass.

    memory: KV memory that it writes. past: number of cached rows at capture.
    checked: its outputs equal the eager pass, with another number of cached rows if it has a cache.
    """

    buffers: PassBuffers
    replayed: Pass
    memory: Memory | None
    past: int | None
    checked: bool = False


class CudaGraphRunner:
    """CUDA-graph capture and replay of one model's decode passes. replay: the capture mechanism.

    A graph is used once its outputs equal the eager pass behind another number of cached rows than at capture, which
    detects baked-in rows, masks, positions and host numbers. The counts include the draft model's passes.

    n_captures: graphs captured so far.
    n_capture_attempts: attempts to capture or check; samples during which one ran must be re-measured.
    fallbacks: decode passes that could not be replayed, by reason; without prompts.
    Graphs of a deleted drafter or cache are evicted with the next request.
    """

    def __init__(self, replay: Replay, widths: tuple[int, ...] = WIDTHS) -> None:
        self.replay, self.widths = replay, widths
        self.counts = Counter[str]()  # captures made and tried
        self.fallbacks = Counter[str]()
        self.graphs: OrderedDict[Hashable, CapturedGraph] = OrderedDict()
        self.memories: WeakKeyDictionary[Cache, Memory] = WeakKeyDictionary()  # of each cache at its last pass
        self.failed_captures: dict[Hashable, str] = {}  # (name, rows or shapes) -> reason
        self.outputs: dict[Hashable, tuple[Tensor, ...]] = {}  # of `run_pass`, by name and rows

    @property
    def n_captures(self) -> int:
        """Return the number of captured graphs."""
        return self.counts["made"]

    @property
    def n_capture_attempts(self) -> int:
        """Return the number of attempts to capture or check a graph."""
        return self.counts["tried"]

    def new_runner(self) -> CudaGraphRunner:
        """Return a runner for another model of the same form."""
        return CudaGraphRunner(self.replay, self.widths)

    def draft_runner(self) -> CudaGraphRunner:
        """Return a runner for a draft model of this one; both share their counts."""
        runner = self.new_runner()
        runner.counts, runner.fallbacks = self.counts, self.fallbacks
        return runner

    def evict(self, cache: Cache | None = None) -> None:
        """Evict the graphs over this cache's memory, or all graphs."""
        if cache is None:
            self.graphs.clear()
            self.memories.clear()
            self.outputs.clear()
        else:
            self.memories.pop(cache, None)
            self._evict_dead()

    def _evict_dead(self) -> None:
        """Evict graphs over memory of no live cache, and those of deleted drafters."""
        live = {id(keys) for keys, _ in self.memories.values()}
        for key, graph in list(self.graphs.items()):
            if is_gone(key) or (graph.memory is not None and id(graph.memory[0]) not in live):
                self.graphs.pop(key, None)
        kept: tuple[dict[Hashable, Any], ...] = (self.failed_captures, self.outputs)
        for by_kind in kept:
            for kind in [kind for kind in by_kind if is_gone(kind)]:
                del by_kind[kind]

    def room(self, rows: int) -> int:
        """Return the cache rows needed for steps up to `rows` rows with padding, in whole blocks."""
        return _padded_keys(rows + self.widths[-1])

    def reserve(self, cache: Cache, rows: int, most: int = 0, zeroed: bool = False) -> None:
        """Empty a cache for a request of `rows` rows, with room for padding. zeroed: fill it with zeros.

        most: up to so many rows a larger cache doubles.
        """
        if self.room(rows) > cache.capacity:
            self.evict(cache)  # before the new memory is allocated
        else:
            self._evict_dead()
        cache.spare, cache.block = self.widths[-1], BLOCK
        cache.reserve(self.room(rows), self.room(most))
        if zeroed:
            cache.zero_()

    def run_pass(
        self,
        name: Hashable,
        function: PassFunction,
        cache: Cache | None,
        inputs: Sequence[Tensor],
        dims: Sequence[Sequence[int]],
        n: int,
        rows: int = 0,
    ) -> tuple[Tensor, ...] | None:
        """Run function(pass, *inputs) behind the cached rows; None if it cannot be replayed, so that it runs eagerly.

        The outputs are overwritten by the next pass of this name, so they cannot be its inputs. A reason is counted,
        but not for prompts, which have many tokens that keep a device busy and do not recur, nor in training.

        Args:
            name: everything but these tensors that the function depends on, unique within the model.
            function: writes only to this cache; a function of tensors otherwise, without host reads of their values.
            cache: KV cache; None = the function has none.
            inputs: tensors.
            dims: dims[i] are the dimensions of inputs[i] of size n; they are padded.
            n: number of rows. Rows are padded, and outputs [1, n, ..], unless `rows` is given.
            rows: most rows that the function writes to a layer, without padding.
        """
        if not torch.is_inference_mode_enabled():
            return None
        if cache is None:
            form = (weak_key(name), *((tuple(tensor.shape), tensor.dtype) for tensor in inputs))
            make_inputs = partial(self._pass_inputs, form, function, None, inputs, dims, n, 0, 0)
            return self._replay_or_run(form, form, make_inputs, (0, n, *inputs), 0)
        past = cache.get_seq_length()
        if not past:
            return None
        most = MAX_UNPADDED if rows else self.widths[-1]
        if max(n, rows) > most:
            self.fallbacks[f"more than {most} rows"] += 1
            return None
        padded = n if rows else _padded_width(self.widths, n)
        cache.check(past, past + max(n, rows), 0)
        if (keys := _padded_keys(past + (rows or padded))) > cache.capacity:
            self.fallbacks[NO_ROOM] += 1
            return None
        key, kind = self._keys(name, cache, padded, keys)
        make_inputs = partial(self._pass_inputs, kind, function, cache, inputs, dims, padded, keys, past)
        outputs = self._replay_or_run(key, kind, make_inputs, (past, n, *inputs), 0 if rows else n, past)
        return outputs if outputs is None or rows else tuple(out[:, :n] for out in outputs)

    def _keys(self, name: Hashable, cache: Cache, rows: int, keys: int) -> tuple[Hashable, Hashable]:
        """Return the key of a graph and that of its kind. Graphs over other memory of this cache are dropped later."""
        if self.memories.get(cache, (None,))[0] is not cache.keys:
            self.memories[cache] = (cache.keys, cache.values)
        kind = (weak_key(name), rows)
        return (*kind, keys, id(cache.keys)), kind  # unique: `memories` keeps the list alive

    def _pass_inputs(
        self,
        kind: Hashable,
        function: PassFunction,
        cache: Cache | None,
        inputs: Sequence[Tensor],
        dims: Sequence[Sequence[int]],
        rows: int,
        keys: int,
        past: int,
    ) -> GraphInputs:
        """Return the static inputs of `run_pass`, zeroed. All passes of a kind share their outputs' memory."""
        tensors = [
            x.new_zeros([rows if dim in row_dims else size for dim, size in enumerate(x.shape)])
            for x, row_dims in zip(inputs, dims or [()] * len(inputs), strict=True)
        ]
        buffers = PassBuffers(torch.full((1,), past, device=inputs[0].device), tensors)
        static_pass = StaticPass(cache, buffers.past, keys, past)

        def run_pass() -> tuple[Tensor, ...]:
            outputs = function(static_pass, *buffers.tensors)
            if kind not in self.outputs:  # in the warm-up before a capture, so not in the memory of graphs
                self.outputs[kind] = tuple(map(torch.empty_like, outputs))
            for kept, out in zip(self.outputs[kind], outputs, strict=True):
                kept.copy_(out)
            return self.outputs[kind]

        return GraphInputs(buffers, run_pass, None if cache is None else static_pass)

    def _replay_or_run(
        self,
        key: Hashable,
        kind: Hashable,
        make_inputs: Callable[[], GraphInputs],
        values: Sequence[Any],
        n: int,
        past: int | None = None,
    ) -> tuple[Tensor, ...] | None:
        """Return the outputs of the pass, in memory that the next one overwrites; None if it cannot be replayed.

        key: of the graph. kind: a kind of pass that failed once is not tried again. make_inputs: builds the static
        inputs. n: rows of the outputs without padding, 0 = all. past: number of cached rows; None without a cache.
        """
        try:
            if kind in self.failed_captures:
                raise GraphCaptureError(self.failed_captures[kind])
            if key not in self.graphs or not self.graphs[key].checked:
                with _capture_errors():
                    self._check_aliasing(kind, values)
                    outputs = self._capture_or_check(key, make_inputs(), values, n, past)
                if outputs is not None:
                    return outputs
        except GraphCaptureError as error:
            self.failed_captures[kind] = str(error)
            self.fallbacks[str(error)] += 1
            self.graphs.pop(key, None)
            return None
        self.graphs.move_to_end(key)
        self.graphs[key].buffers.fill(*values)
        return self.graphs[key].replayed()

    def _check_aliasing(self, kind: Hashable, values: Sequence[Any]) -> None:
        """Raise ValueError for inputs in the memory of this kind's outputs, which a capture or a check overwrites."""
        kept = {out.untyped_storage().data_ptr() for out in self.outputs.get(kind, ())} - {0}  # 0: without memory
        if any(isinstance(x, Tensor) and x.untyped_storage().data_ptr() in kept for x in values):
            raise ValueError("inputs that are outputs of this pass")

    def _capture_or_check(
        self, key: Hashable, inputs: GraphInputs, values: Sequence[Any], n: int, past: int | None
    ) -> tuple[Tensor, ...] | None:
        """Capture a pass, or check its graph behind another number of rows; return eager outputs until then.

        Raises GraphCaptureError and torch's errors.
        """
        new = key not in self.graphs
        if new:  # buffers still hold other values, which detects baked-in inputs
            self.counts["tried"] += 1
            rows = inputs.cache_rows
            memory = None if rows is None else (rows.cache.keys, rows.cache.values)
            self.graphs[key] = CapturedGraph(inputs.buffers, self.replay(inputs.run_pass), memory, past)
            self.counts["made"] += 1
            while len(self.graphs) > MAX_GRAPHS:
                self.graphs.popitem(last=False)
        inputs.buffers.fill(*values)
        graph = self.graphs[key]
        if past is not None and past == graph.past:
            return inputs.run_pass()
        self.counts["tried"] += not new
        graph.buffers.fill(*values)
        graph.checked = any(_check_replay(graph.replayed, inputs, n) for _ in range(CHECK_TRIES))
        if not graph.checked:
            raise GraphCaptureError(SOMETHING_ELSE)
        return None

    def record_fallback(self, reason: str, cache: Cache) -> None:
        """Count a decode pass that a method runs eagerly."""
        if cache.get_seq_length() and torch.is_inference_mode_enabled():
            self.fallbacks[reason] += 1


def _check_replay(replayed: Pass, inputs: GraphInputs, n: int) -> bool:
    """Return True if a replay's outputs and cache rows equal those of the eager pass. n: rows without padding, or 0."""

    def real(outputs: Sequence[Tensor]) -> list[Tensor]:
        return [out[:, :n].clone() if n else out.clone() for out in outputs]

    expected = real(inputs.run_pass())
    if inputs.cache_rows is None:
        return same(replayed(), expected)
    expected += inputs.cache_rows.copy_rows(n)
    inputs.cache_rows.overwrite()
    return same([*real(replayed()), *inputs.cache_rows.copy_rows(n)], expected)


def _padded_width(widths: Sequence[int], rows: int) -> int:
    return next(width for width in widths if width >= rows)


def _padded_keys(rows: int) -> int:
    return -(-rows // BLOCK) * BLOCK


def weak_key(name: Hashable) -> Hashable:
    """Return the key with weak references to objects that hash by identity, such as modules."""
    if isinstance(name, tuple):
        return tuple(map(weak_key, name))
    return ref(name) if type(name).__hash__ is object.__hash__ else name


def is_gone(name: Hashable) -> bool:
    """Return True if a weak reference in the key is dead."""
    if isinstance(name, tuple):
        return any(map(is_gone, name))
    return isinstance(name, ref) and name() is None
