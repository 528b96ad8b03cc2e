"""CUDA graphs, by a stand-in for torch's: one recording that fails leaves the others as they are."""

from __future__ import annotations

import gc
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specbench_ss.engine import cuda_graphs
from specbench_ss.engine.cuda_graphs import SOMETHING_ELSE, CudaGraphRunner, Graphs, same
from specbench_ss.engine.engines import allclose_rows
from specbench_ss.time_limit import TimeIsOver, defer_alarm, time_limit
from tests.frozen import called


class FakeGraph:
    """Stands for torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.again: Callable[[], object] = lambda: None

    def replay(self) -> None:
        self.again()


class FakeCuda:
    """As much of torch.cuda and its allocator as recordings need, with the rule that torch 2.11 has.

    A capture that fails leaves its pool in `underway`, and while a pool is there no other capture of it begins.
    """

    CUDAGraph, OutOfMemoryError = FakeGraph, torch.OutOfMemoryError

    def __init__(self) -> None:
        self.pools, self.underway, self.users = 0, list[Any](), dict[Any, int]()

    def Stream(self, device: object) -> Any:  # noqa: N802 - as torch calls it
        return SimpleNamespace(wait_stream=lambda other: None)

    def current_stream(self) -> Any:
        return self.Stream(None)

    def set_stream(self, stream: object) -> None:
        pass

    def stream(self, stream: object) -> Any:
        return nullcontext()

    def device(self, device: object) -> Any:
        return nullcontext()

    def current_device(self) -> int:
        return 0

    def graph_pool_handle(self) -> tuple[int, int]:
        self.pools += 1
        return (0, self.pools)

    @contextmanager
    def graph(self, graph: FakeGraph, pool: Any, stream: object) -> Iterator[None]:
        if pool in self.underway:
            raise RuntimeError("already recording to mempool_id")
        self.underway.append(pool)
        self.users[pool] = self.users.get(pool, 0) + 1
        yield  # what fails within comes out of here, before the allocator receives of the end
        self.underway.remove(pool)

    def end(self, device: int, pool: Any) -> None:
        if pool not in self.underway:
            raise RuntimeError("not currently recording to mempool_id")
        self.underway.remove(pool)

    def release(self, device: int, pool: Any) -> None:
        self.users[pool] -= 1


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Torch with a CUDA that only recordings see."""
    made = FakeCuda()
    low = SimpleNamespace(_cuda_endAllocateToPool=made.end, _cuda_releasePool=made.release)
    fake = SimpleNamespace(cuda=made, _C=low, OutOfMemoryError=torch.OutOfMemoryError)
    monkeypatch.setattr(cuda_graphs, "torch", fake)
    return made


def doubled(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (x * 2,)


def failing_in_the_capture(cuda: FakeCuda) -> Callable[[], tuple[torch.Tensor, ...]]:
    def one() -> tuple[torch.Tensor, ...]:
        if cuda.underway:
            raise RuntimeError("operation not permitted when stream is capturing")
        return (torch.zeros(1),)

    return one


def test_after_a_recording_that_fails_others_are_made(cuda: FakeCuda) -> None:
    graphs, x = Graphs(torch.device("cuda", 0)), torch.ones(2)
    first = graphs(lambda: doubled(x))
    with pytest.raises(RuntimeError, match="not permitted"):
        graphs(failing_in_the_capture(cuda))
    assert not cuda.underway, "the allocator would take all further blocks for the pool's"
    second = graphs(lambda: doubled(x + 1))
    assert (first()[0].tolist(), second()[0].tolist()) == ([2.0, 2.0], [4.0, 4.0])
    assert cuda.users == {(0, 1): 1, (0, 2): 1}, "the pool of the failed one is not used on, nor held by it"


def test_recordings_share_a_pool_until_the_last_is_gone(cuda: FakeCuda) -> None:
    graphs, x = Graphs(torch.device("cuda", 0)), torch.ones(2)
    kept = [graphs(lambda: doubled(x)) for _ in range(2)]
    assert cuda.pools == 1
    kept.clear()
    gc.collect()
    graphs(lambda: doubled(x))
    assert cuda.pools == 2, "torch takes no graph into a pool whose last graph is gone"


def test_a_recording_is_not_broken_off_and_time_is_over_soon_after() -> None:
    seen = list[str]()
    with pytest.raises(TimeIsOver), time_limit(60.0):
        every_s = signal.getitimer(signal.ITIMER_REAL)[1]
        with defer_alarm():
            signal.raise_signal(signal.SIGALRM)
            seen.append("deferred")
        signal.raise_signal(signal.SIGALRM)  # as the timer does after `every_s`
        seen.append("never ended")
    assert seen == ["deferred"] and 0 < every_s <= 1
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def no_memory(one: object) -> Any:
    raise torch.OutOfMemoryError("tried to allocate")


def fails_later(one: Any) -> Any:
    def replayed() -> Any:
        raise RuntimeError("an illegal memory access was encountered")

    return replayed


@pytest.mark.parametrize(
    ("replay", "why"),
    [(no_memory, "not enough memory"), (fails_later, "cannot be captured .*an illegal memory access")],
)
@torch.inference_mode()
def test_whatever_keeps_a_pass_from_being_replayed_is_reported(replay: Any, why: str) -> None:
    passes = CudaGraphRunner(replay)
    called(passes, "doubled", doubled, torch.ones(1))
    assert re.search(why, next(iter(passes.fallbacks)))


@torch.inference_mode()
def test_a_pass_without_memory_for_a_recording_is_run_eagerly() -> None:
    passes = CudaGraphRunner(no_memory)
    for _ in range(2):
        assert called(passes, "doubled", doubled, torch.ones(1)).item() == 2
    assert (passes.n_captures, passes.n_capture_attempts) == (0, 1), (
        "it is not tried again, and the first answer took longer for it"
    )
    assert passes.fallbacks == {"not enough memory to capture a pass": 2}


def test_rows_that_are_off_are_not_hidden_by_a_large_number() -> None:
    states = torch.ones(3, 400)
    states[:, 7] = 500
    assert allclose_rows(states * (1 + 1e-5), states)
    assert not allclose_rows(torch.where(states == 1, 1.2, states), states), "as a share of the largest it is a 2,500th"
    one_row = states.clone()
    one_row[2] = -states[2]
    assert not allclose_rows(one_row, states)


def test_logits_agree_by_every_number_in_float32_and_by_near_ties_in_half_precision() -> None:
    logits = torch.tensor([[30.0, 29.5, 10.0, -5.0]])
    noisy, other = logits + torch.tensor([[-0.5, 0.25, 2.0, -2.0]]), logits + torch.tensor([[-8.0, 0.0, 0.0, 0.0]])
    assert allclose_rows(logits * (1 + 1e-5), logits) and not allclose_rows(noisy, logits)
    for half in (torch.bfloat16, torch.float16):
        assert not allclose_rows(other.to(half), (logits - torch.tensor([[0.0, 8.0, 0.0, 0.0]])).to(half))
    assert allclose_rows(noisy.bfloat16(), logits.bfloat16()) and not allclose_rows(noisy.half(), logits.half())
    lost = torch.tensor([[1.0, -torch.inf]])
    assert (
        allclose_rows(lost, lost)
        and not allclose_rows(lost, torch.ones(1, 2))
        and not allclose_rows(torch.full((1, 2), torch.nan), lost)
    )


def test_replays_are_the_same_where_every_bit_is() -> None:
    one = torch.tensor([1.0, torch.nan, torch.inf]).bfloat16()
    assert same([one, torch.tensor([3, 4])], [one.clone(), torch.tensor([3, 4])])
    assert not same([torch.tensor([3, 5])], [torch.tensor([3, 4])])
    assert not same([one * (1 + 2**-7)], [one]), "one unit in the last place"
    assert not same([one.nan_to_num()], [one]) and not same([-one], [one])


@torch.inference_mode()
def test_a_tie_that_falls_the_other_way_once_is_no_reason_to_refuse() -> None:
    for turns, fallbacks in ((iter([1, 0, 0, 0, 0, 0]), {}), (iter(range(9)), {SOMETHING_ELSE: 1})):
        passes = CudaGraphRunner(lambda one: one)
        called(passes, "tie", lambda x, turns=turns: (x + next(turns),), torch.zeros(1))
        assert passes.fallbacks == fallbacks
