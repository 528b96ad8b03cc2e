"""Attention of a few rows gives what torch's own gives, whatever the format, the mask and the batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F

from specbench_ss.engine.layers import attention
from specbench_ss.engine.layers.attention import MAX_ROWS

MODULE = cast("Any", SimpleNamespace(training=False, is_causal=False, num_key_value_groups=3))
OFF = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kind", ["none", "additive", "bool", "of each"])
@pytest.mark.parametrize("rows", [1, 5, MAX_ROWS + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_few_rows_attend_as_torch_has_it(dtype: torch.dtype, rows: int, kind: str, batch: int) -> None:
    """Against float64. A mask of bool states what is seen; each sequence of a batch may have a mask of its own."""
    if kind == "none" and rows > 1:
        return
    rng, keys = torch.Generator().manual_seed(rows), rows + 20
    query, key, value = (torch.randn(batch, n, r, 16, generator=rng) for n, r in ((6, rows), (2, keys), (2, keys)))
    seen = torch.rand(batch if kind == "of each" else 1, 1, rows, keys, generator=rng) < 0.7
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_of_a_large_batch_are_not_kept_in_memory(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    used = list[str]()
    for name in ("by_kernel", "by_kernel_in_float32", "by_matmul"):
        monkeypatch.setattr(attention, name, lambda *_, name=name: used.append(name))
    query, key = torch.randn(3, 6, 4, 16, dtype=dtype), torch.randn(3, 2, 9, 16, dtype=dtype)
    mask = torch.zeros(3, 1, 4, 9, dtype=dtype)
    with torch.inference_mode():
        for limit in (3 * 6 * 4 * 9, 3 * 6 * 4 * 9 - 1):
            monkeypatch.setattr(attention, "MAX_SCORES", limit)
            attention.grouped_attention(MODULE, query, key, key, mask, scaling=0.25, dropout=0.0)
            attention.grouped_attention(MODULE, query[:1], key[:1], key[:1], mask[:1], scaling=0.25, dropout=0.0)
    if dtype == torch.float32:
        assert used == ["by_kernel"] * 4
    else:
        assert used == ["by_matmul", "by_kernel_in_float32", "by_kernel", "by_kernel_in_float32"]
