"""Triton kernels of a decoder layer for few query tokens on CUDA; `triton` launches them.

Every sum is computed in one order whatever the number of query tokens is, so that a token has the same bits in
autoregressive decoding and in the verification of a chain. Sums are in float32, and results are rounded once.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]


@triton.jit(do_not_specialize=["n"])
def linear(
    x,  # [n, INPUTS]
    weight,  # [OUTPUTS, INPUTS]; gated: [2 OUTPUTS, INPUTS], gate before up
    bias,  # [OUTPUTS] or [2 OUTPUTS]
    residual,  # [n, OUTPUTS]
    out,  # [n, OUTPUTS]
    n,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = residual + x weight^T + bias, or silu(x gate^T) (x up^T); one program per COLUMNS."""
    rows = tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row_there, column_there = rows < n, columns < OUTPUTS
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    up_sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    weight_columns = weight + columns[None, :].to(tl.int64) * INPUTS
    for start in range(0, INPUTS, BLOCK):
        i = start + tl.arange(0, BLOCK)
        i_there = i < INPUTS
        part = tl.load(x + rows[:, None] * INPUTS + i[None, :], row_there[:, None] & i_there[None, :], 0.0)
        there = column_there[None, :] if INPUTS % BLOCK == 0 else column_there[None, :] & i_there[:, None]
        block = tl.load(weight_columns + i[:, None], there, 0.0, eviction_policy="evict_first")
        sums = tl.dot(part, block, sums)
        if GATED:
            up_block = tl.load(
                weight_columns + OUTPUTS * INPUTS + i[:, None], there, 0.0, eviction_policy="evict_first"
            )
            up_sums = tl.dot(part, up_block, up_sums)
    if BIASED:
        sums += tl.load(bias + columns, column_there, 0.0).to(tl.float32)[None, :]
        if GATED:
            up_sums += tl.load(bias + OUTPUTS + columns, column_there, 0.0).to(tl.float32)[None, :]
    if GATED:
        sums = sums * tl.sigmoid(sums) * up_sums
    both = row_there[:, None] & column_there[None, :]
    place = rows[:, None] * OUTPUTS + columns[None, :]
    if RESIDUAL:
        sums += tl.load(residual + place, both, 0.0).to(tl.float32)
    tl.store(out + place, sums.to(out.dtype.element_ty), both)


@triton.jit(do_not_specialize=["n"])
def rope_and_write(
    qkv,  # [n, heads + 2 kv_heads, D]
    cos,  # [n, D]
    sin,  # [n, D]
    norm,  # [heads + kv_heads, D], weights of the RMSNorm of queries and keys
    positions,  # int64 [n], rows of the KV cache
    query,  # [heads, n, D]
    keys,  # [kv_heads, capacity, D]
    values,
    head_stride,  # of keys and values
    n,
    heads,
    kv_heads,
    eps,
    NORMED: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,  # at least D / 2, a power of two
):
    """Apply RoPE to queries and keys; write keys and values into the cache. One program per token and head."""
    row, head = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, HALF)
    there = i < D // 2
    source = qkv + (row * (heads + 2 * kv_heads) + head) * D
    first = tl.load(source + i, there, 0.0).to(tl.float32)
    second = tl.load(source + D // 2 + i, there, 0.0).to(tl.float32)
    if head < heads + kv_heads:
        if NORMED:
            scale = tl.rsqrt((tl.sum(first * first, 0) + tl.sum(second * second, 0)) / D + eps)
            first *= scale * tl.load(norm + head * D + i, there, 0.0).to(tl.float32)
            second *= scale * tl.load(norm + head * D + D // 2 + i, there, 0.0).to(tl.float32)
        angle = row * D + i
        turned = first * tl.load(cos + angle, there, 0.0).to(tl.float32)
        turned -= second * tl.load(sin + angle, there, 0.0).to(tl.float32)
        second *= tl.load(cos + D // 2 + angle, there, 0.0).to(tl.float32)
        second += first * tl.load(sin + D // 2 + angle, there, 0.0).to(tl.float32)
        first = turned
    at = tl.load(positions + row) * D
    if head < heads:
        place = query + (head * n + row) * D
    elif head < heads + kv_heads:
        place = keys + (head - heads) * head_stride.to(tl.int64) + at
    else:
        place = values + (head - heads - kv_heads) * head_stride.to(tl.int64) + at
    tl.store(place + i, first.to(query.dtype.element_ty), there)
    tl.store(place + D // 2 + i, second.to(query.dtype.element_ty), there)


@triton.jit(do_not_specialize=["n", "rows_of_group", "count"])
def attend(
    query,  # [heads, n, D]: the heads of a group are further rows over the same keys
    keys,  # [kv_heads, capacity, D]
    values,
    mask,  # additive [n, count]
    partial,  # float32 [splits, heads n, D]
    largest,  # float32 [splits, heads n]
    total,  # float32 [splits, heads n]
    head_stride,  # of keys and values
    mask_stride,
    n,
    rows_of_group,
    count,
    scale,
    MASKED: tl.constexpr,
    SPLIT: tl.constexpr,  # keys of a program
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,  # keys of an iteration, a divisor of SPLIT
    D: tl.constexpr,
    WIDTH: tl.constexpr,  # at least D, a power of two
):
    """Attend to SPLIT keys; one program per KV head, split and ROWS query rows. `combine` merges the splits."""
    kv_head, split, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    d = tl.arange(0, WIDTH)
    d_there = d < D
    row = block * ROWS + tl.arange(0, ROWS)
    row_there = row < rows_of_group
    all_rows = (tl.num_programs(0) * rows_of_group).to(tl.int64)
    in_query = kv_head * rows_of_group + row
    q = tl.load(query + in_query[:, None] * D + d[None, :], row_there[:, None] & d_there[None, :], 0.0)
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    sums = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, WIDTH), tl.float32)
    offset = kv_head * head_stride.to(tl.int64)
    first = split * SPLIT
    for start in range(0, SPLIT, KEYS):
        j = first + start + tl.arange(0, KEYS)
        j_there = j < count
        k = tl.load(keys + offset + j[None, :] * D + d[:, None], j_there[None, :] & d_there[:, None], 0.0)
        scores = tl.dot(q, k) * scale
        if MASKED:
            place = (row % n)[:, None] * mask_stride + j[None, :]
            scores += tl.load(mask + place, row_there[:, None] & j_there[None, :], 0.0).to(tl.float32)
        scores = tl.where(j_there[None, :], scores, float("-inf"))
        now = tl.maximum(best, tl.max(scores, 1))
        base = tl.where(now == float("-inf"), 0.0, now)  # none of these keys is there
        weights = tl.exp(scores - base[:, None])
        kept = tl.exp(best - base)
        v = tl.load(values + offset + j[:, None] * D + d[None, :], j_there[:, None] & d_there[None, :], 0.0)
        out = tl.dot(weights.to(v.dtype), v, out * kept[:, None])
        sums = sums * kept + tl.sum(weights, 1)
        best = now
    place = split * all_rows + in_query
    tl.store(largest + place, best, row_there)
    tl.store(total + place, sums, row_there)
    tl.store(partial + place[:, None] * D + d[None, :], out, row_there[:, None] & d_there[None, :])


@triton.jit(do_not_specialize=["n", "splits"])
def combine(
    partial,  # as of `attend`
    largest,
    total,
    out,  # [n, heads, D]
    n,
    heads,
    splits,
    SPLITS: tl.constexpr,  # at least splits, a power of two
    PART: tl.constexpr,  # splits of an iteration, a divisor of SPLITS
    D: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Merge the splits of `attend`; one program per head and token."""
    row, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, WIDTH)
    best = tl.full((1,), float("-inf"), tl.float32)
    sums = tl.zeros((1,), tl.float32)
    result = tl.zeros((WIDTH,), tl.float32)
    for start in range(0, SPLITS, PART):
        split = start + tl.arange(0, PART)
        at, there = split.to(tl.int64) * heads * n + head * n + row, split < splits
        part = tl.load(partial + at[:, None] * D + d[None, :], there[:, None] & (d < D)[None, :], 0.0)
        top = tl.load(largest + at, there, float("-inf"))
        now = tl.maximum(best, tl.max(top, 0))
        before, here = tl.exp(best - now), tl.exp(top - now)
        result = result * before + tl.sum(part * here[:, None], 0)
        sums = sums * before + tl.sum(tl.load(total + at, there, 0.0) * here, 0)
        best = now
    tl.store(out + (row * heads + head) * D + d, (result / sums).to(out.dtype.element_ty), d < D)


@triton.jit
def rms_norm(x, weight, out, size, eps, WIDTH: tl.constexpr):
    """Normalise x [n, size]; one program per row."""
    i = tl.arange(0, WIDTH)
    place = tl.program_id(0) * size + i
    value = tl.load(x + place, i < size, 0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 0) / size + eps)
    value *= tl.load(weight + i, i < size, 0.0).to(tl.float32)
    tl.store(out + place, value.to(out.dtype.element_ty), i < size)


@triton.jit(do_not_specialize=["m"])
def tree_mask(mask, visible, past, m, keys, least, WIDTH: tl.constexpr):
    """Write the additive mask [q, keys] of visible [q, m] behind `past` [1] rows, which are visible to all."""
    row = tl.program_id(0)
    j = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    offset = j - tl.load(past)
    of_tree = (offset >= 0) & (offset < m)
    seen = (offset < 0) | (tl.load(visible + row * m + offset, of_tree, 0) != 0)
    tl.store(mask + row * keys + j, tl.where(seen, 0.0, least).to(mask.dtype.element_ty), j < keys)
