"""How a pass over buffers is made again: called, or replayed by a CUDA graph; and the proof that this gives the same.

Knows tensors alone, neither layers nor caches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from specbench_ss.errors import first_line

if TYPE_CHECKING:
    from torch import Tensor

Pass = Callable[[], "tuple[Tensor, ...]"]
Replay = Callable[[Pass], Pass]  # a pass over buffers -> the same, replayed

OFF = {torch.float32: 1e-3}  # share of the largest value by which a replayed pass may differ
OFF_HALF = 5e-2


class CannotReplay(Exception):  # noqa: N818 - not the user's fault, and none of the method's
    """A pass cannot be recorded here, or gives something else when it is replayed. Its text says which."""


def recorded(replay: Replay, one: Pass, fill: Callable[[], None]) -> Pass:
    """Return a pass as it is replayed, once it has given what it gives operator by operator.

    fill: puts real rows into its buffers, after it was recorded over others: what is baked in shows. Raises
    CannotReplay, and OutOfMemoryError where memory runs out.
    """
    try:
        replayed = replay(one)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError, TypeError) as error:  # of the device's own libraries
        raise CannotReplay(f"passes that cannot be recorded ({first_line(error)})") from None
    fill()
    expected = [out.clone() for out in one()]
    if not agree(replayed(), expected):
        raise CannotReplay("passes that give something else when they are replayed")
    return replayed


def agree(given: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Say whether tensors are the same, but for rounding; where one is not finite, the other is not either."""
    return all(off(a, b) <= OFF.get(b.dtype, OFF_HALF) for a, b in zip(given, expected, strict=True))


def off(given: Tensor, expected: Tensor) -> float:
    """Return the largest difference as a share of the largest value; infinity where whole numbers are others."""
    if not expected.is_floating_point():
        return 0.0 if torch.equal(given, expected) else math.inf
    finite = expected.isfinite()
    if not torch.equal(given.isfinite(), finite):
        return math.inf
    a, b = given[finite].float(), expected[finite].float()
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-6)) if len(b) else 0.0


def called(one: Pass) -> Pass:
    """Make the pass each time, operator by operator: over the same buffers as where it is replayed."""
    return one


def captured_on(device: torch.device) -> Replay:
    """Return what records a pass as a CUDA graph and replays it. Its results lie in memory that a later replay writes.

    All recordings share a pool of memory: they are replayed one after the other, and what they gave is copied before.
    """
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
    first: list[torch.cuda.CUDAGraph] = []  # stays: a pool whose last graph is gone takes no other one

    def captured(one: Pass) -> Pass:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device):
            before = torch.cuda.current_stream()
            stream.wait_stream(before)
            try:
                with torch.cuda.stream(stream):
                    for _ in range(2):  # libraries choose their kernels and take workspaces before it is recorded
                        one()
                    with torch.cuda.graph(graph, pool=pool, stream=stream):
                        outs = one()
            finally:
                torch.cuda.set_stream(before)  # a capture that fails leaves its own in use
                before.wait_stream(stream)
        first.extend([] if first else [graph])

        def replayed() -> tuple[Tensor, ...]:
            graph.replay()
            return outs

        return replayed

    return captured
