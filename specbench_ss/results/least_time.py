"""The least time that a method's answers can take, by the steps that it made: nobody is faster without a wrong clock.

docs/metrics.md has the formula.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specbench_ss.results.resampling import Floats
from specbench_ss.runs.rows import Row
from specbench_ss.runs.steps import Steps


def least_seconds(own: Sequence[Row], ref: Sequence[Row], steps: Steps) -> Floats:
    """Return the least seconds of each answer of `own`: [samples]. ref: the reference's answers to the same prompts.

    They are the reference's prefill and as many of its steps as the method made. A step in which a method verifies
    several rows may run other kernels than one of a single row: where the method's verifying takes a smaller share of
    the reference's, its steps may take that share too. A method that never drafts has no such excuse.
    """
    made, verify, _ = _steps_of(own, steps)
    made_ref, verify_ref, total_ref = _steps_of(ref, steps)
    prefill = np.array([row.prefill_s or 0.0 for row in ref])
    with np.errstate(all="ignore"):  # an answer without a step: prefill gave its one token
        share = np.minimum(1.0, np.nan_to_num((verify / made) / (verify_ref / made_ref), nan=1.0))
        step = np.nan_to_num(total_ref / made_ref, nan=0.0)
    drafts = any(row.drafted for row in own)
    return np.asarray(prefill + made * step * (share if drafts else 1.0))


def _steps_of(rows: Sequence[Row], steps: Steps) -> tuple[Floats, Floats, Floats]:
    """Return the number of steps of each sample, their seconds of verifying and their seconds: [samples] each."""
    places = np.array([steps.place.get(row.key, -1) for row in rows], dtype=np.int64)
    there = places >= 0
    counts, verify, total = (np.zeros(len(rows)) for _ in range(3))
    totals = steps.totals
    counts[there] = steps.counts[places[there]]
    verify[there], total[there] = totals.verify_s[places[there]], totals.total_s[places[there]]
    return counts, verify, total
