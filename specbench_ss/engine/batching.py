"""Concurrent requests: one pass of the layers and the LM head over the query tokens of all.

Each request runs the loop of `engine/generate.py` on its own stack (a greenlet) and waits at each pass of layers or LM
head. When every request waits, the largest group that waits for the same pass is served: query tokens in sequence, or
as a batch where a layer must separate requests, with attention over each request's own cache. Requests start their
steps together, so that they wait for the same passes; a new request first runs its prefill. A drafter's own layers are
shared as the target's are; heads and other work of a method run per request.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import greenlet
import torch
from torch import Tensor

from specbench_ss.engine.decoder import Decoder, DecodeState, Generation, Step, models_of
from specbench_ss.engine.generate import DecodeSession, StopParams, check_prompt, kv_cache_size
from specbench_ss.engine.kv_cache import BatchedKVCache, Cache, RaggedTensor
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.engine.timing import now, unix_time
from specbench_ss.errors import UserError

Job = Callable[[], Any]
STEP = "step"  # key of the wait before a step: served when nothing else is waited for


@dataclass(slots=True)
class Waiting:
    """Pending call of a request. serve: maps the arguments of all pending calls with the same key to their results."""

    key: Hashable
    value: Any
    serve: Callable[[Sequence[Any]], Sequence[Any]]


class _RequestStack(greenlet.greenlet):
    """Stack of one request."""


def wait_for(key: Hashable, value: Any, serve: Callable[[Sequence[Any]], Sequence[Any]]) -> Any:
    """Wait within a request until it is served, and return its result; outside of one, serve it alone.

    Raises the errors of `serve` in every request that is served with this one.
    """
    request = greenlet.getcurrent()
    if not isinstance(request, _RequestStack) or request.parent is None:
        return serve([value])[0]
    return request.parent.switch(Waiting(key, value, serve))


def next_step() -> None:
    """Wait within a request until all others are about to start a step as well."""
    wait_for(STEP, None, list)


def run_concurrently(jobs: Iterable[Job], max_concurrency: int) -> Iterator[tuple[int, Any]]:
    """Run at most `max_concurrency` jobs at a time and start the next when one ends; yield (its index, its result).

    Raises the error of a job; the others then end unfinished.
    """
    pending = enumerate(jobs)
    running: dict[_RequestStack, int] = {}
    waiting: dict[_RequestStack, Waiting] = {}

    def resume(job: _RequestStack, switch: Callable[..., Any], *values: Any) -> Iterator[tuple[int, Any]]:
        result = switch(*values)
        if job.dead:
            yield running.pop(job), result
        else:
            waiting[job] = result

    while True:
        while len(running) < max_concurrency and (next_job := next(pending, None)) is not None:
            job = _RequestStack(next_job[1])
            running[job] = next_job[0]
            yield from resume(job, job.switch)
        if not running:
            return
        served = _largest_group(waiting)
        waits = [waiting.pop(job) for job in served]
        try:
            results = waits[0].serve([wait.value for wait in waits])
        except Exception as error:  # of the shared pass: each request's rows may be half-written
            for job in served:
                yield from resume(job, job.throw, error)
            continue
        for job, result in zip(served, results, strict=True):
            yield from resume(job, job.switch, result)


def _largest_group(waiting: dict[_RequestStack, Waiting]) -> list[_RequestStack]:
    """Return the requests of the most frequent key; of STEP only if all wait for it."""
    groups: dict[Hashable, list[_RequestStack]] = defaultdict(list)
    for job, wait in waiting.items():
        groups[wait.key].append(job)
    return max(groups.items(), key=lambda group: (group[0] != STEP, len(group[1])))[1]


class BatchRunner:
    """Runs a target's layers for all waiting requests at once."""

    def run(
        self,
        name: Hashable,
        layers: Callable[..., tuple[Tensor, ...]],
        x: Tensor,
        layer: int,
        cache: Any,
        mask: Tensor | None,
        rotary: Any,
        pad: bool = True,
    ) -> tuple[Tensor, ...]:
        """Run x [1, q, h] through `layers` with those of other requests. pad: allow other numbers of query tokens.

        name: everything else that `layers` depends on; the layers of one request serve all with this name.
        """
        key = (id(self), name) if pad else (id(self), name, x.shape[1])
        serve = partial(_serve, dim=1 if pad else 0)  # in sequence, or as a batch
        return cast("tuple[Tensor, ...]", wait_for(key, (layers, x, cache, mask, rotary), serve))

    def run_pass(self, *_: Any) -> None:
        """Return None: `run` serves the layers of all requests."""

    def call(self, name: Hashable, function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the function for one request, without a graph."""
        return function(*inputs)

    def reserve(self, cache: Cache, rows: int, most: int = 0, zeroed: bool = False) -> None:
        """Empty a cache for a request of `rows` rows, without padding."""
        cache.reserve(rows, most)

    def evict(self, cache: Cache | None = None) -> None:
        """Do nothing: there are no graphs."""

    def record_fallback(self, reason: str, layer: int, cache: Any) -> None:
        """Do nothing: without graphs there is no fallback."""


def _serve(passes: Sequence[Any], dim: int) -> Sequence[tuple[Tensor, ...]]:
    """Run layers on the query tokens of all requests, joined along `dim`; return each one's outputs."""
    layers = passes[0][0]
    if len(passes) == 1:
        return [layers(*passes[0][1:])]
    xs, caches, masks, rotaries = (list(part) for part in zip(*(arguments[1:] for arguments in passes), strict=True))
    sizes = [x.shape[dim] for x in xs]
    rotary = None if rotaries[0] is None else tuple(torch.cat(both, dim) for both in zip(*rotaries, strict=True))
    outputs = layers(torch.cat(xs, dim), BatchedKVCache(caches, sizes, dim), RaggedTensor(masks, sizes, dim), rotary)
    return list(zip(*(tensor.split(sizes, dim) for tensor in outputs), strict=True))


class SharedHead:
    """Stand-in for a target's LM head that serves the states [.., h] of all waiting requests at once."""

    def __init__(self, head: Callable[[Tensor], Tensor]) -> None:
        self.head = head

    def __call__(self, x: Tensor) -> Tensor:
        """Return the logits [.., V]."""
        return cast("Tensor", wait_for((id(self), "head"), x, self._serve))

    def _serve(self, states: Sequence[Tensor]) -> Sequence[Tensor]:
        if len(states) == 1:
            return [self.head(states[0])]
        rows = [x.reshape(-1, x.shape[-1]) for x in states]
        parts = self.head(torch.cat(rows)).split([len(x) for x in rows])
        return [part.view(*x.shape[:-1], -1) for part, x in zip(parts, states, strict=True)]


@contextmanager
def shared(targets: Iterable[Target]) -> Iterator[None]:
    """Share the passes of these targets between concurrent requests within the block, without CUDA graphs."""
    before = [(target, target.runner, target._head) for target in targets]
    for target, _, head in before:
        target.runner, target._head = BatchRunner(), SharedHead(head)
    try:
        yield
    finally:
        for target, runner, head in before:
            target.runner, target._head = runner, head


EAGER_NOTE = "but eagerly in this run, for concurrent requests"


@contextmanager
def graphs_disabled(target: Target) -> Iterator[None]:
    """Run the target, its changed copies and its draft models eagerly within the block.

    Graphs and KV caches are freed at both ends: eager steps may leave NaN in rows that graphs read as padding. Copies
    that are made within the block use graphs afterwards.
    """
    if target.graphs is None:
        yield
        return
    before = [(model, model.runner, model.kernel_summary) for model in (target, *target.derived)]
    for model, runner, summary in before:
        model.drop_cache()
        if runner is not None:
            model.runner, model.kernel_summary = None, f"{summary}, {EAGER_NOTE}"
    try:
        yield
    finally:
        for model, runner, summary in before:
            model.drop_cache()
            model.runner, model.kernel_summary = runner, summary
        for model in target.derived.difference(model for model, *_ in before):
            model.drop_cache()
            model.inherit_cuda_graphs(target)


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One request: token ids of the prompt, stop conditions and sampling."""

    prompt: Sequence[int]
    limits: StopParams
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """Result of a request, or the error that ended it; seconds from its start.

    started: Unix time of the start. first_s: time to first token. wall_s: time to the last token. Times of its steps
    include concurrent work for other requests, so steps of several requests overlap.
    """

    generation: Generation | None
    error: BaseException | None
    started: float
    first_s: float
    wall_s: float


class _BatchedSession(DecodeSession):
    """One of several concurrent requests."""

    first_at = 0.0

    def prefill(self) -> tuple[DecodeState, float]:
        result = super().prefill()
        self.first_at = now()
        return result

    def step(self, state: DecodeState) -> Step:
        next_step()
        return super().step(state)


class BatchEngine:
    """Runs requests of one method concurrently.

    Raises UserError for a method or a model that does not support it.
    """

    def __init__(self, decoder: Decoder, max_concurrency: int) -> None:
        check_together(decoder)
        self.target = decoder.target
        self.decoders = [decoder, *(decoder.clone() for _ in range(max_concurrency - 1))]
        if any(other.target is not decoder.target for other in self.decoders):
            raise UserError(f"{decoder.name}: clone() must share the target's model; override it")
        self.caches = [self.target.new_cache(0) for _ in self.decoders]
        self.free = list(range(max_concurrency))

    def answer(self, requests: Iterable[BatchRequest], on_output: Callable[[int, RequestOutput], None]) -> None:
        """Run requests; call `on_output` with a request's index and output when it ends, between passes."""
        with torch.inference_mode(), shared(models_of(self.decoders)):
            for index, output in run_concurrently(
                (partial(self._run_request, request) for request in requests), len(self.decoders)
            ):
                on_output(index, output)

    def _run_request(self, request: BatchRequest) -> RequestOutput:
        slot, started, began = self.free.pop(), unix_time(), now()
        try:
            session = self._session(slot, request)
            generation = session.run()
            generation.check()
        except (Exception, SystemExit) as error:  # reported as for a single sample
            return RequestOutput(None, error, started, 0.0, now() - began)
        finally:
            self.caches[slot].zero_()  # as `generate.decode` does
            self.free.append(slot)
        return RequestOutput(generation, None, started, session.first_at - began, now() - began)

    def _session(self, slot: int, request: BatchRequest) -> _BatchedSession:
        decoder, cache = self.decoders[slot], self.caches[slot]
        check_prompt(self.target, request.prompt)
        rows, most, cache.grows = kv_cache_size(decoder, len(request.prompt) + request.limits.max_new_tokens)
        cache.set_limit(None)
        cache.reserve(rows, most)
        return _BatchedSession(decoder, request.prompt, request.limits, request.sampling, cache)


def check_together(decoder: Decoder) -> None:
    """Raise UserError if requests of this method cannot run concurrently."""
    decoder.target.require_layer_access("--batch-size")
    if decoder.stateful:
        raise UserError("its state depends on the order of requests, and concurrent ones have none")
    if decoder.target.runner is not None:
        raise UserError("concurrent requests run eagerly; load the model with engine eager")
