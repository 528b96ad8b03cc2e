"""Number formats of a model and bounds of numerical ties within their rounding."""

from __future__ import annotations

import math
from typing import Literal, get_args

Dtype = Literal["auto", "float32", "bfloat16", "float16", "float16-weights"]
DTYPES: tuple[str, ...] = get_args(Dtype)
HALF_WEIGHTS = "float16-weights"  # matrices are rounded to float16, everything is computed in float32


def arithmetic(name: str) -> str:
    """Return the format that is computed in, which has another name only where weights are stored in a smaller one."""
    return "float32" if name == HALF_WEIGHTS else name


# How far below the target's best logit a chosen token may lie and still be called a tie.
# Parallel verification sums in another order than one token at a time. float32: 70 times the 1.4e-6 that was measured.
NEAR_TIE_DROP = {"float64": 1e-10, "float32": 1e-4}
# Half precision: so many units in the last place of the best logit, taken as SMALLEST at least.
NEAR_TIE_ULPS, SMALLEST = 4, 16.0
FRACTION_BITS = {"float16": 10, "bfloat16": 7}


def near_tie_drop(dtype: str, best: float) -> float:
    """Return the largest `drop` that still counts as a numerical tie. best: the best logit there, a finite number.

    dtype is written `float32` or `torch.float32`. Raises ValueError for a dtype without a bound.
    """
    name = dtype.removeprefix("torch.")
    if name in FRACTION_BITS:
        exponent = math.frexp(max(abs(best), SMALLEST))[1] - 1
        return NEAR_TIE_ULPS * 2.0 ** (exponent - FRACTION_BITS[name])
    if name not in NEAR_TIE_DROP:
        raise ValueError(f"no numerical tie bound for dtype {name}")
    return NEAR_TIE_DROP[name]
