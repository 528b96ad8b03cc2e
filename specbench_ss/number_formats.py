"""The number formats that a model is computed with, as `--dtype` names them."""

from __future__ import annotations

from typing import Literal, get_args

Dtype = Literal["auto", "float32", "bfloat16", "float16", "float16-weights"]
DTYPES: tuple[str, ...] = get_args(Dtype)
HALF_WEIGHTS = "float16-weights"  # matrices are rounded to float16, everything is computed in float32


def arithmetic(name: str) -> str:
    """Return the format that is computed in, which has another name only where weights are stored in a smaller one."""
    return "float32" if name == HALF_WEIGHTS else name
