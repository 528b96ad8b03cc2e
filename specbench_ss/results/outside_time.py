"""Work outside the clock: time that passes within an answer and is in none of its measured times.

docs/metrics.md has the formula and the reason for the bound.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specbench_ss.results.resampling import Floats
from specbench_ss.runs.rows import Row

LEAST = 0.1  # Lower bound, as a share of measured time; ratio_interval takes logarithms.
MOST = 1.25  # times its measured time that an answer may take; honest methods had 0.98 to 1.06


def passed_seconds(own: Sequence[Row], ref: Sequence[Row]) -> Floats | None:
    """Return the seconds from start to end of each answer of `own`, [samples]; None where that is not known.

    ref: the reference's answers to the same prompts. The time within these that is not measured is the harness's: it
    is taken off.
    """
    rows = (*own, *ref)
    if not own or any(row.counted or row.started is None or row.ended is None for row in rows):
        return None
    left = _passed(own) - np.maximum(0.0, _passed(ref) - _measured(ref))
    return np.maximum(LEAST * _measured(own), left)


def _passed(rows: Sequence[Row]) -> Floats:
    return np.array([(row.ended or 0.0) - (row.started or 0.0) for row in rows], dtype=np.float64)


def _measured(rows: Sequence[Row]) -> Floats:
    return np.array([row.wall_s or 0.0 for row in rows], dtype=np.float64)
