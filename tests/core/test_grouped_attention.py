"""Attention of a few rows gives what torch's own gives, whatever the format, the mask, and the way it goes by."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F

from specbench_ss.engine import attention, timing
from specbench_ss.engine.attention import IN_FLOAT32, KERNEL, MAX_ROWS, ONE, PRODUCTS, SEVERAL, Heads
from tests.served.fake_server import Clock

HEADS = Heads("cpu", torch.bfloat16, 4, 2, 16)
MODULE = cast("Any", SimpleNamespace(training=False, is_causal=False, num_key_value_groups=3))
OFF = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


@pytest.mark.parametrize("way", attention.BACKENDS)
@pytest.mark.parametrize("kind", ["none", "additive", "bool", "of each"])
@pytest.mark.parametrize("rows", [1, 5, MAX_ROWS + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_few_rows_attend_as_torch_has_it(
    dtype: torch.dtype, rows: int, kind: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against float64. A mask of bool states what is seen; each sequence of a batch may have a mask of its own."""
    if kind == "none" and rows > 1:
        return
    monkeypatch.setattr(attention, "backend_of", lambda of, one_row, masked, keys, sequences: way)
    monkeypatch.setattr(Heads, "backends", property(lambda of: (way,)))  # as where something is measured
    rng, keys = torch.Generator().manual_seed(rows), rows + 20
    query, key, value = (torch.randn(2, n, r, 16, generator=rng) for n, r in ((6, rows), (2, keys), (2, keys)))
    seen = torch.rand(2 if kind == "of each" else 1, 1, rows, keys, generator=rng) < 0.7
    seen[..., 0] = True
    mask = torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    given = {"none": None, "bool": seen}.get(kind, mask)
    with torch.inference_mode():
        out, _ = attention.grouped_attention(
            MODULE, query.to(dtype), key.to(dtype), value.to(dtype), given, scaling=0.25, dropout=0.0
        )
        wide = [x.to(dtype).double() for x in (query, key, value)]
        shown = None if kind == "none" else seen
        exact = F.scaled_dot_product_attention(*wide, shown, scale=0.25, enable_gqa=True).transpose(1, 2)
    assert (out.double() - exact).abs().max() < OFF[dtype]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Measure on a clock that the planted backends alone move on."""
    made = Clock()
    monkeypatch.setattr(timing, "now", made)
    return made


@pytest.mark.parametrize("count", [256, 1024])
@pytest.mark.parametrize("case", [ONE, SEVERAL])
@pytest.mark.parametrize("fast", HEADS.backends)
def test_a_probe_takes_the_fastest_way(
    fast: str, case: str, count: int, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in HEADS.backends:
        seconds = 0 if name == fast else 0.02
        monkeypatch.setitem(attention.BACKENDS, name, lambda *given, seconds=seconds: clock.pass_by(seconds))
    assert attention.fastest.__wrapped__(HEADS, case, count, 1, 1) == fast


def test_on_cuda_and_in_float32_nothing_is_measured() -> None:
    for heads in (HEADS._replace(device="cuda:0"), HEADS._replace(dtype=torch.float32), HEADS._replace(device="meta")):
        assert heads.backends == () and attention.describe(heads) == ""


def test_a_batch_is_measured_as_a_batch_and_not_copied_to_float32(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's kernel took 15 times as long as two matmuls for 96 sequences, though not for one."""

    def slow_for_several(query: torch.Tensor, *rest: object) -> None:
        clock.pass_by(0.01 if len(query) == 1 else 0.05)

    monkeypatch.setitem(attention.BACKENDS, IN_FLOAT32, lambda *given: None)
    monkeypatch.setitem(attention.BACKENDS, KERNEL, slow_for_several)
    monkeypatch.setitem(attention.BACKENDS, PRODUCTS, lambda *given: clock.pass_by(0.02))
    attention.fastest.cache_clear()
    assert [attention.backend_of(HEADS, False, True, 9, sequences) for sequences in (1, 8)] == [IN_FLOAT32, PRODUCTS]
    attention.fastest.cache_clear()


def test_scores_of_a_large_batch_are_not_kept_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(attention, "backend_of", lambda *given: asked.append(given) or KERNEL)
    query, key = torch.randn(3, 6, 4, 16).bfloat16(), torch.randn(3, 2, 9, 16).bfloat16()
    mask = torch.zeros(3, 1, 4, 9).bfloat16()
    with torch.inference_mode():
        for limit in (3 * 6 * 4 * 9, 3 * 6 * 4 * 9 - 1):
            monkeypatch.setattr(attention, "MAX_SCORES", limit)
            attention.grouped_attention(MODULE, query, key, key, mask, scaling=0.25, dropout=0.0)
            attention.grouped_attention(MODULE, query[:1], key[:1], key[:1], mask[:1], scaling=0.25, dropout=0.0)
    assert len(asked) == 3, "all but the batch over the limit"


def test_what_is_faster_over_many_keys_is_taken_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        attention, "fastest", lambda of, case, count, threads, sequences: PRODUCTS if count > 256 else KERNEL
    )
    assert [attention.backend_of(HEADS, False, True, keys) for keys in (511, 512)] == [KERNEL, PRODUCTS]
    assert attention.describe(HEADS).endswith(f"of few {KERNEL} from 0 keys, of few {PRODUCTS} from 512 keys")
