"""Replays of passes over buffers, by calls or CUDA graphs, and the proof that a replay gives what a call gives.

The module depends on tensors alone, neither on layers nor on caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from specbench_ss.errors import first_line
from specbench_ss.time_limit import alarm_held_back

Pass = Callable[[], "tuple[Tensor, ...]"]
Replay = Callable[[Pass], Pass]  # a pass over buffers -> the same, replayed

SOMETHING_ELSE = "passes that give something else when they are replayed"
PROOFS = 2  # tries at most: which of two equal numbers is the larger one may change from pass to pass


class CannotReplay(Exception):  # noqa: N818 - not the user's fault, and none of the method's
    """A pass cannot be recorded here, or gives something else when it is replayed. Its text says which."""


def recorded(replay: Replay, one: Pass, fill: Callable[[], None]) -> Pass:
    """Return a pass as it is replayed, once it has given what it gives operator by operator.

    fill: puts real rows into its buffers, after it was recorded over others: what is baked in of these shows. Raises
    CannotReplay, also where its recording takes more memory than there is.
    """
    try:
        replayed = replay(one)
        fill()
        proven = any(same(replayed(), [out.clone() for out in one()]) for _ in range(PROOFS))
    except torch.OutOfMemoryError:
        raise CannotReplay("passes for whose recording there is not enough memory") from None
    except (RuntimeError, NotImplementedError, TypeError) as error:  # of the device's own libraries
        raise CannotReplay(f"passes that cannot be recorded ({first_line(error)})") from None
    if not proven:
        raise CannotReplay(SOMETHING_ELSE)
    return replayed


def same(given: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Return True if all tensors are equal; NaN equals NaN, +0 equals -0.

    The same operators on the same shapes give that on one device, in every number format. A bound on the difference
    would be of no use: in half precision the layers of a deep model amplify rounding to a third of the logits.
    """
    return all(bool(((a == b) | (a.isnan() & b.isnan())).all()) for a, b in zip(given, expected, strict=True))


def called(one: Pass) -> Pass:
    """Make the pass each time, operator by operator: over the same buffers as where it is replayed."""
    return one


def captured_on(device: torch.device) -> Replay:
    """Return what records a pass as a CUDA graph and replays it. Its results lie in memory that a later replay writes.

    All recordings share a pool of memory: they are replayed one after the other, and what they gave is copied before.
    """
    return Graphs(device)


class Graphs:
    """Records passes of one device as CUDA graphs. The pool's memory is given back when the last of them is gone."""

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
