"""Bytes and floating-point operations of a method's steps, counted from shapes, and what limits make of them.

A floor: weights are read once a step, keys and values of the context once, and activations are not counted. Of rows of
a method's own, and of those that it drops before the last layer, the products with matrices are counted
(`Decoder.own_work`), their attention is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from specbench_ss.runs.rows import Row


@final
@dataclass(frozen=True, slots=True)
class Cost:
    """What some steps cost in all.

    drafter_bytes, drafter_flops: of `bytes` and `flops`, the drafter's; bytes are None where they are not known.
    fixed_flops: of `flops`, those of rows that each step has whatever it verifies.
    """

    steps: int
    flops: float
    bytes: float
    drafter_bytes: float | None
    drafter_flops: float = 0.0
    fixed_flops: float = 0.0

    @property
    def intensity(self) -> float | None:
        """Return floating-point operations for each byte."""
        return self.flops / self.bytes if self.bytes else None

    def fastest_s(self, limits: Mapping[str, Any], dtype: str) -> float | None:
        """Return the seconds of a step that reaches the nearer limit, bandwidth or products; None without limits."""
        rate, peak = limits.get("read_bytes_per_s"), (limits.get("flops_per_s") or {}).get(dtype)
        return max(self.bytes / rate, self.flops / peak) / self.steps if rate and peak and self.steps else None


def counted(rows: Sequence[Row], shape: Mapping[str, Any]) -> Cost | None:
    """Return the cost of all steps of these samples; None where there are none, or where shapes do not tell it.

    shape: as `decoding.model_shape` gives it, with that of the drafter under `drafter` and the rows of the method's own
    under `own`. The context of a step is taken as the mean of its lengths at the beginning and the end of the answer.
    """
    good = [row for row in rows if row.ok and row.steps]
    if not good or shape["weight_bytes"] is None:
        return None
    steps = sum(row.steps or 0 for row in good)
    own = shape.get("own") or {}
    dropped = sum(max(0, (row.drafted or 0) - (row.verified or 0)) for row in good)
    fixed = 2.0 * steps * own.get("step", 0.0)
    flops, moved = fixed + 2.0 * dropped * own.get("dropped", 0.0), 0.0
    for row in good:
        made, passed = _rows_of(row), _context_of(row)
        seen = sum(passed if window is None else min(passed, window) for window in shape["windows"])
        flops += made * (2 * (shape["matrix_parameters"] + own.get("node", 0.0)) + shape["attention_flops"] * seen)
        moved += (row.steps or 0) * (shape["weight_bytes"] + shape["kv_bytes"] * seen)
    drafter = shape.get("drafter")
    if drafter is None or (not drafter["weight_bytes"] and any(row.draft_calls for row in good)):
        # what is called has weights: they are where nobody looked
        return Cost(steps, flops, moved, None, fixed_flops=fixed)
    calls = sum(row.draft_calls or row.steps or 0 for row in good)
    read = float(calls * drafter["weight_bytes"])
    drafting = calls * 2.0 * drafter["matrix_parameters"]
    return Cost(steps, flops + drafting, moved + read, read, drafting, fixed)


def _rows_of(row: Row) -> int:
    """Return the rows that reached the last layer: of each step the root, and the drafted nodes that were verified."""
    return (row.verified or 0) + (row.steps or 0)


def _context_of(row: Row) -> float:
    return (row.prompt_tokens or 0) + (row.tokens or 0) / 2
