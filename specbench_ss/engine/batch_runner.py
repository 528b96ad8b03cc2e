"""Passes of concurrent requests: each request has its own stack and waits until its pass is served with others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import greenlet
import torch
from torch import Tensor

from specbench_ss.engine.kv_cache import BatchedKVCache, RaggedTensor

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


def run_together(
    name: Hashable,
    layers: Callable[..., tuple[Tensor, ...]],
    x: Tensor,
    cache: Any,
    mask: Tensor | None,
    rotary: Any,
    pad: bool = True,
) -> tuple[Tensor, ...]:
    """Run layers(x, cache, mask, rotary) on x [1, q, h] with the query tokens of other requests: tensors [1, q, ..].

    name: everything else that `layers` depends on; the layers of one request serve all with this name. pad: allow
    other numbers of query tokens, in sequence; else requests are a batch.
    """
    key, dim = ((name, 0), 1) if pad else ((name, x.shape[1]), 0)
    return cast("tuple[Tensor, ...]", wait_for(key, (layers, x, cache, mask, rotary), partial(_serve, dim=dim)))


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
