"""Several requests at a time: one pass of the layers and the LM head over the rows of all.

Each request goes through the loop of `engine/generate.py` on a stack of its own (a greenlet). Where it puts rows
through a stretch of the target's layers, or through its LM head, it waits; when every request waits, the largest
group that waits for the same is served: rows one after the other, or as a batch where a layer has to tell them apart,
and each request's attention over its own cache. Requests begin their steps together, so that they wait for the same
things at the same time; a new one first makes its prompt. A drafter's own layers take the rows of all requests as the
target's do; what heads draft, and what a method does besides, is done request by request.
"""

from __future__ import annotations

import time
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
from specbench_ss.errors import UserError

Job = Callable[[], Any]
STEP = "step"  # what requests wait for before a step: it is served when nothing else is waited for


@dataclass(slots=True)
class Waiting:
    """What a request waits for. serve: makes of what is given by all that wait for the same what each is given back."""

    what: Hashable
    given: Any
    serve: Callable[[Sequence[Any]], Sequence[Any]]


class _Request(greenlet.greenlet):
    """The stack of one request."""


def wait_for(what: Hashable, given: Any, serve: Callable[[Sequence[Any]], Sequence[Any]]) -> Any:
    """Wait within a request until it is served, and return what it is given; outside of one, serve it alone.

    Raises what `serve` raises, in every request that is served with this one.
    """
    here = greenlet.getcurrent()
    if not isinstance(here, _Request) or here.parent is None:
        return serve([given])[0]
    return here.parent.switch(Waiting(what, given, serve))


def next_step() -> None:
    """Wait within a request until all others are about to begin a step as well."""
    wait_for(STEP, None, list)


def run_concurrently(jobs: Iterable[Job], most: int) -> Iterator[tuple[int, Any]]:
    """Run jobs, `most` of them at a time, each with the next where one ends; yield (its number, what it returned).

    Raises what a job raises; others then end unfinished.
    """
    coming = enumerate(jobs)
    running: dict[_Request, int] = {}
    waiting: dict[_Request, Waiting] = {}

    def go_on(job: _Request, go: Callable[..., Any], *given: Any) -> Iterator[tuple[int, Any]]:
        found = go(*given)
        if job.dead:
            yield running.pop(job), found
        else:
            waiting[job] = found

    while True:
        while len(running) < most and (following := next(coming, None)) is not None:
            job = _Request(following[1])
            running[job] = following[0]
            yield from go_on(job, job.switch)
        if not running:
            return
        served = _largest(waiting)
        asked = [waiting.pop(job) for job in served]
        try:
            given = asked[0].serve([one.given for one in asked])
        except Exception as error:  # of a pass for all of them: each one's rows may be half-written
            for job in served:
                yield from go_on(job, job.throw, error)
            continue
        for job, found in zip(served, given, strict=True):
            yield from go_on(job, job.switch, found)


def _largest(waiting: dict[_Request, Waiting]) -> list[_Request]:
    """Return those that wait for what most wait for; for the next step only where all do."""
    groups: dict[Hashable, list[_Request]] = defaultdict(list)
    for job, one in waiting.items():
        groups[one.what].append(job)
    return max(groups.items(), key=lambda group: (group[0] != STEP, len(group[1])))[1]


class SharedPasses:
    """In place of a target's recorded passes: its layers are given the rows of all requests that wait for them."""

    n_captures = 0

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
        """Rows x [1, q, h] through `layers`, with those of others. pad: whether others may have more or fewer rows.

        name: all that `layers` depends on besides what it is given: one request's are called for all of that name.
        """
        what = (id(self), name) if pad else (id(self), name, x.shape[1])
        serve = partial(_served, dim=1 if pad else 0)  # in a row, or as a batch
        return cast("tuple[Tensor, ...]", wait_for(what, (layers, x, cache, mask, rotary), serve))

    def call(self, name: Hashable, function: Callable[..., tuple[Tensor, ...]], *given: Tensor) -> tuple[Tensor, ...]:
        """Return what the function gives, request by request: nothing is recorded here."""
        return function(*given)

    def reserve(self, cache: Cache, rows: int, zeroed: bool = False) -> None:
        """Empty a cache for a request of so many rows: none are padded, so that none have to be zeros."""
        cache.reserve(rows)

    def record_fallback(self, why: str, layer: int, cache: Any) -> None:
        """Do nothing: a pass that a method makes by itself is made request by request, and nothing is recorded here."""


def _served(asked: Sequence[Any], dim: int) -> Sequence[tuple[Tensor, ...]]:
    """Put the rows of requests through layers together, joined along `dim`, and return what each gets."""
    layers = asked[0][0]
    if len(asked) == 1:
        return [layers(*asked[0][1:])]
    xs, caches, masks, rotaries = (list(part) for part in zip(*(one[1:] for one in asked), strict=True))
    sizes = [x.shape[dim] for x in xs]
    rotary = None if rotaries[0] is None else tuple(torch.cat(both, dim) for both in zip(*rotaries, strict=True))
    made = layers(torch.cat(xs, dim), BatchedKVCache(caches, sizes, dim), RaggedTensor(masks, sizes, dim), rotary)
    return list(zip(*(tensor.split(sizes, dim) for tensor in made), strict=True))


class SharedHead:
    """In place of a target's LM head: of the rows [.., h] of all requests that wait for it at once, [.., V]."""

    def __init__(self, head: Callable[[Tensor], Tensor]) -> None:
        self.head = head

    def __call__(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return cast("Tensor", wait_for((id(self), "head"), x, self._served))

    def _served(self, asked: Sequence[Tensor]) -> Sequence[Tensor]:
        if len(asked) == 1:
            return [self.head(asked[0])]
        rows = [x.reshape(-1, x.shape[-1]) for x in asked]
        parts = self.head(torch.cat(rows)).split([len(x) for x in rows])
        return [part.view(*x.shape[:-1], -1) for part, x in zip(parts, asked, strict=True)]


@contextmanager
def shared(targets: Iterable[Target]) -> Iterator[None]:
    """Within: passes of these targets are made for all requests that wait for them. They replay nothing meanwhile."""
    before = [(target, target.graphs, target._head) for target in targets]
    for target, _, head in before:
        target.graphs, target._head = cast("Any", SharedPasses()), SharedHead(head)
    try:
        yield
    finally:
        for target, passes, head in before:
            target.graphs, target._head = passes, head


NOT_NOW = "but not in this run: it has several requests side by side"


@contextmanager
def graphs_disabled(target: Target) -> Iterator[None]:
    """Within: steps of the target, of models in its place and of what drafts for it are run eagerly.

    Also where a request is alone. Recordings are let go, and so are the models' caches at both ends: eager steps may
    leave NaN in rows that replayed ones read as padding. A model that is put in its place meanwhile is replayed after.
    """
    if target.graphs is None:
        yield
        return
    before = [(model, model.graphs, model.computed) for model in (target, *target.derived)]
    for model, passes, computed in before:
        model.drop_cache()
        if passes is not None:
            model.graphs, model.computed = None, f"{computed}, {NOT_NOW}"
    try:
        yield
    finally:
        for model, passes, computed in before:
            model.drop_cache()
            model.graphs, model.computed = passes, computed
        for model in target.derived.difference(model for model, *_ in before):
            model.drop_cache()
            model.inherit_cuda_graphs(target)


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A request: its prompt's tokens, where its answer ends, and how it is sampled."""

    prompt: Sequence[int]
    limits: StopParams
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request's answer, or the error that it ended with. Times in seconds from when the request was begun.

    started: Unix time of that. first_s: until its first token. wall_s: until its last. The times of the answer's own
    steps hold what was computed for others meanwhile, so that steps of several requests overlap.
    """

    generation: Generation | None
    error: BaseException | None
    started: float
    first_s: float
    wall_s: float


class _BatchedSession(DecodeSession):
    """A request among others."""

    first_at = 0.0

    def prefill(self) -> tuple[DecodeState, float]:
        made = super().prefill()
        self.first_at = time.perf_counter()
        return made

    def step(self, state: DecodeState) -> Step:
        next_step()
        return super().step(state)


class BatchEngine:
    """Answers requests of one method, `most` of them at a time.

    Raises UserError for a method or a model with which it cannot be done.
    """

    def __init__(self, decoder: Decoder, most: int) -> None:
        check_together(decoder)
        self.target = decoder.target
        self.decoders = [decoder, *(decoder.clone() for _ in range(most - 1))]
        if any(one.target is not decoder.target for one in self.decoders):
            raise UserError(f"{decoder.name}: beside() has a model of its own, so that no pass is shared: override it")
        self.caches = [self.target.new_cache(0) for _ in self.decoders]
        self.free = list(range(most))

    def answer(self, asked: Iterable[BatchRequest], ended: Callable[[int, RequestOutput], None]) -> None:
        """Answer requests; `ended` is called with a request's place and its answer when it ends, between passes."""
        with torch.inference_mode(), shared(models_of(self.decoders)):
            for place, found in run_concurrently((partial(self._answered, one) for one in asked), len(self.decoders)):
                ended(place, found)

    def _answered(self, one: BatchRequest) -> RequestOutput:
        place, started, began = self.free.pop(), time.time(), time.perf_counter()
        try:
            session = self._session(place, one)
            made = session.run()
            made.check()
        except (Exception, SystemExit) as error:  # as a sample that is made alone fails
            return RequestOutput(None, error, started, 0.0, time.perf_counter() - began)
        finally:
            self.free.append(place)
        return RequestOutput(made, None, started, session.first_at - began, time.perf_counter() - began)

    def _session(self, place: int, one: BatchRequest) -> _BatchedSession:
        decoder, cache = self.decoders[place], self.caches[place]
        check_prompt(self.target, one.prompt)
        rows, cache.grows = kv_cache_size(decoder, one.prompt, one.limits)
        cache.set_limit(None)
        cache.reserve(rows)
        return _BatchedSession(decoder, one.prompt, one.limits, one.sampling, cache)


def check_together(decoder: Decoder) -> None:
    """Raise UserError where requests of this method cannot be answered at the same time."""
    decoder.target.require_layer_access("several requests at a time")
    if decoder.stateful:
        raise UserError("it remembers earlier prompts, and requests at the same time have no order")
    if decoder.target.graphs is not None:
        raise UserError("several requests at a time are passes run eagerly: load the model with engine eager")
