"""Attention of a few rows gives what torch's own gives, whatever the format, the mask, and the way it goes by."""

from __future__ import annotations

import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F

from specbench_ss.decoding import attention_ways, grouped_attention
from specbench_ss.decoding.attention_ways import IN_FLOAT32, JOINED, KERNEL, ONE, ONE_MASKED, PRODUCTS, SEVERAL, Heads
from specbench_ss.decoding.grouped_attention import MOST_ROWS

HEADS = Heads("cpu", torch.bfloat16, 4, 2, 16)
MODULE = cast("Any", SimpleNamespace(training=False, is_causal=False, num_key_value_groups=3))
OFF = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


@pytest.mark.parametrize("way", attention_ways.WAYS)
@pytest.mark.parametrize("kind", ["none", "additive", "bool", "of each"])
@pytest.mark.parametrize("rows", [1, 5, MOST_ROWS + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_few_rows_attend_as_torch_has_it(
    dtype: torch.dtype, rows: int, kind: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against float64. A mask of bool says what is seen; each sequence of a batch may have a mask of its own."""
    if kind == "none" and rows > 1:
        return
    monkeypatch.setattr(attention_ways, "way_of", lambda of, one_row, masked, keys, sequences: way)
    monkeypatch.setattr(Heads, "ways", property(lambda of: (way,)))  # as where something is measured
    rng, keys = torch.Generator().manual_seed(rows), rows + 20
    query, key, value = (torch.randn(2, n, r, 16, generator=rng) for n, r in ((6, rows), (2, keys), (2, keys)))
    seen = torch.rand(2 if kind == "of each" else 1, 1, rows, keys, generator=rng) < 0.7
    seen[..., 0] = True
    mask = torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    given = {"none": None, "bool": seen}.get(kind, mask)
    with torch.inference_mode():
        out, _ = grouped_attention.grouped_attention(
            MODULE, query.to(dtype), key.to(dtype), value.to(dtype), given, scaling=0.25, dropout=0.0
        )
        wide = [x.to(dtype).double() for x in (query, key, value)]
        shown = None if kind == "none" else seen
        exact = F.scaled_dot_product_attention(*wide, shown, scale=0.25, enable_gqa=True).transpose(1, 2)
    assert (out.double() - exact).abs().max() < OFF[dtype]


@pytest.mark.parametrize("count", [256, 1024])
@pytest.mark.parametrize("case", [ONE, SEVERAL])
@pytest.mark.parametrize("fast", HEADS.ways)
def test_a_probe_takes_the_fastest_way(fast: str, case: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in HEADS.ways:
        seconds = 0 if name == fast else 0.02
        monkeypatch.setitem(attention_ways.WAYS, name, lambda *given, seconds=seconds: time.sleep(seconds))
    assert attention_ways.fastest.__wrapped__(HEADS, case, count, 1) == fast


def test_what_is_measured_depends_on_the_device() -> None:
    """On CUDA joined heads are to be beaten; in float32 on a CPU torch's kernel is kept, and nothing is said."""
    assert HEADS._replace(device="cuda").ways == (JOINED, KERNEL, PRODUCTS)
    assert attention_ways.in_words(HEADS._replace(dtype=torch.float32)) == ""
    assert HEADS._replace(device="meta").ways == ()


def test_a_batch_is_not_copied_to_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_ways, "fastest", lambda of, case, count, threads: IN_FLOAT32)
    assert [attention_ways.way_of(HEADS, True, False, 9, sequences) for sequences in (1, 8)] == [IN_FLOAT32, PRODUCTS]


def test_what_is_faster_over_many_keys_is_taken_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_ways, "fastest", lambda of, case, count, threads: PRODUCTS if count > 256 else KERNEL)
    assert [attention_ways.way_of(HEADS, False, True, keys) for keys in (511, 512)] == [KERNEL, PRODUCTS]
    assert attention_ways.in_words(HEADS).endswith(f"of few by {KERNEL} ({PRODUCTS} from 512 keys)")


def test_on_cuda_a_masked_row_is_a_case_of_its_own_and_contexts_are_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replayed row of plain decoding always has a mask."""
    asked = list[tuple[str, int]]()

    def fastest(of: Heads, case: str, count: int, threads: int) -> str:
        asked.append((case, count))
        return {256: JOINED, 1024: KERNEL, 4096: PRODUCTS}[count] if case == ONE_MASKED else JOINED

    monkeypatch.setattr(attention_ways, "fastest", fastest)
    on_gpu = HEADS._replace(device="cuda:0")
    told = f"of one masked row by {JOINED} ({KERNEL} from 512 keys, {PRODUCTS} from 2048 keys)"
    assert attention_ways.in_words(on_gpu) == f"attention of one row by {JOINED}, {told}, of few by {JOINED}"
    assert set(asked) == {(case, count) for case in (ONE, ONE_MASKED, SEVERAL) for count in (256, 1024, 4096)}
    assert attention_ways.way_of(on_gpu, True, True, 3000) == PRODUCTS
    attention_ways.way_of(HEADS, True, True, 3000)
    assert asked[-1] == (SEVERAL, 1024), "on a CPU a masked row is one of few, and nothing longer is measured"


def test_what_cannot_be_recorded_is_timed_as_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: torch.device) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(attention_ways, "captured_on", broken)
    calls = attention_ways._calls(lambda: torch.ones(1), torch.device("cuda", 0))
    assert len(cast("Any", calls())) == attention_ways.CALLS["cuda"]
    monkeypatch.setattr(attention_ways, "captured_on", lambda device: lambda one: "the replay")
    assert attention_ways._calls(lambda: torch.ones(1), torch.device("cuda", 0)) == "the replay"


class Event:
    """Stands for torch.cuda.Event, with a clock of its own, in milliseconds."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = Event.now

    def synchronize(self) -> None:
        """Nothing is waited for."""

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


def test_on_cuda_calls_are_timed_by_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host takes to tell a device of them is no time of theirs."""

    def calls() -> None:
        time.sleep(0.02)
        Event.now += 0.5

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert attention_ways._seconds(calls, torch.device("cuda", 0)) == 0.0005


@pytest.mark.parametrize(("room", "told"), [(4096, PRODUCTS), (2048, KERNEL), (0, JOINED)])
def test_without_memory_for_many_keys_fewer_of_them_tell(room: int, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default joined heads attend, as on a device with no memory at all."""
    quick = {256: PRODUCTS, 1024: KERNEL, 4096: PRODUCTS}

    def taken(of: Heads, case: str, count: int) -> dict[str, float]:
        if count > room:
            raise torch.OutOfMemoryError("tried to allocate")
        return {name: 1.0 if name == quick[count] else 2.0 for name in of.ways}

    monkeypatch.setattr(attention_ways, "_taken", taken)
    monkeypatch.setattr(attention_ways, "fastest", attention_ways.fastest.__wrapped__)
    assert attention_ways.fastest(HEADS._replace(device="cuda:0"), SEVERAL, 4096, 1) == told
