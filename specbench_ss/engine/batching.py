"""Concurrent requests: one pass of the layers and the LM head over the query tokens of all.

Each request runs the loop of `engine/generate.py` on its own stack (a greenlet) and waits at each pass of layers or LM
head. When every request waits, the largest group that waits for the same pass is served: query tokens in sequence, or
as a batch where a layer must separate requests, with attention over each request's own cache. Requests start their
steps together, so that they wait for the same passes; a new request first runs its prefill. A drafter's own layers are
shared as the target's are; heads and other work of a method run per request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from specbench_ss.engine.batch_runner import SharedHead, next_step, run_concurrently
from specbench_ss.engine.decoder import Decoder, DecodeState, Generation, Step, models_of
from specbench_ss.engine.forward import BatchPass
from specbench_ss.engine.generate import DecodeSession, StopParams, check_prompt, kv_cache_size
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.engine.timing import now, unix_time
from specbench_ss.errors import UserError


@contextmanager
def shared(targets: Iterable[Target]) -> Iterator[None]:
    """Share the passes of these targets between concurrent requests within the block, without CUDA graphs."""
    before = [(target, target.pass_type, target._head) for target in targets]
    for target, _, head in before:
        target.pass_type, target._head = BatchPass, SharedHead(head)
    try:
        yield
    finally:
        for target, pass_type, head in before:
            target.pass_type, target._head = pass_type, head


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
    before = [(model, model.graphs, model.kernel_summary) for model in (target, *target.derived)]
    for model, graphs, summary in before:
        model.drop_cache()
        if graphs is not None:
            model.graphs, model.kernel_summary = None, f"{summary}, {EAGER_NOTE}"
    try:
        yield
    finally:
        for model, graphs, summary in before:
            model.drop_cache()
            model.graphs, model.kernel_summary = graphs, summary
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
    if decoder.target.graphs is not None:
        raise UserError("concurrent requests run eagerly; load the model with engine eager")
