"""Number formats of a model, and bounds of numerical ties."""

from __future__ import annotations

import math
from typing import Literal, get_args

Dtype = Literal["auto", "float32", "bfloat16", "float16", "float16-weights"]
DTYPES: tuple[str, ...] = get_args(Dtype)
HALF_WEIGHTS = "float16-weights"  # fp16 weights, fp32 compute


def arithmetic(name: str) -> str:
    """Return the compute dtype, which differs from the name only for fp16 weights."""
    return "float32" if name == HALF_WEIGHTS else name


# Largest distance below the target's best logit at which a chosen token counts as tied: parallel verification sums in
# another order than one token at a time. float32: 70 times the largest measured difference, 1.4e-6.
NEAR_TIE_DROP = {"float64": 1e-10, "float32": 1e-4}
# Half precision: units in the last place of the best logit, or of MIN_BEST_LOGIT if that is larger.
NEAR_TIE_ULPS, MIN_BEST_LOGIT = 4, 16.0
FRACTION_BITS = {"float16": 10, "bfloat16": 7}


def near_tie_drop(dtype: str, best: float) -> float:
    """Return the largest `drop` that counts as a numerical tie.

    dtype: `float32` or `torch.float32`; ValueError if it has no bound. best: the best logit, finite.
    """
    name = dtype.removeprefix("torch.")
    if name in FRACTION_BITS:
        exponent = math.frexp(max(abs(best), MIN_BEST_LOGIT))[1] - 1
        return NEAR_TIE_ULPS * 2.0 ** (exponent - FRACTION_BITS[name])
    if name not in NEAR_TIE_DROP:
        raise ValueError(f"no numerical tie bound for dtype {name}")
    return NEAR_TIE_DROP[name]
