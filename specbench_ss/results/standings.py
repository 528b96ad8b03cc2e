"""Which places of a ranking are sure: every two methods compared with each other, not only with the reference.

Two methods may both be faster than the reference, with intervals that overlap, and one of them still be ahead on
nearly every question; or the other way about. So each pair has an interval of its own, on the prompts that all methods
answered, over the same resamples of the questions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specbench_ss.results.intervals import FEWEST, pairwise
from specbench_ss.results.paired_times import PairedTimes, paired
from specbench_ss.results.resampling import Floats
from specbench_ss.results.summary import OVERALL, SummaryRow, failing
from specbench_ss.runs.rows import Row, Run

RANKED = ("faster", "slower", "not distinguishable")


@dataclass(frozen=True, slots=True)
class Standing:
    """The places that a method may have: behind those that are surely faster, ahead of those that are surely slower.

    best, worst: places from 1. level: the methods that cannot be told from it, the fastest first.
    """

    best: int
    worst: int
    level: tuple[str, ...]


def ranked(summaries: Sequence[SummaryRow]) -> list[SummaryRow]:
    """Return the methods that have an interval over all tasks, without controls and without those that fail."""
    rows = [row for row in summaries if row.category == OVERALL and row.comparison in RANKED and not row.reference_of]
    return [row for row in rows if row.method not in failing(summaries)]


def standings(run: Run, summaries: Sequence[SummaryRow]) -> Mapping[str, Standing]:
    """Return the standing of every method that `ranked` gives; nothing below FEWEST questions."""
    rows = ranked(summaries)
    labels = [row.method for row in sorted(rows, key=lambda row: -(row.speedup or 0.0))]
    seconds, tokens = by_question([[row for row in run.rows if row.method == label] for label in labels])
    if seconds.shape[1] < FEWEST:
        return {}
    found = {}
    for label, ratios in zip(labels, pairwise(seconds, tokens), strict=True):  # how many times as fast as each other
        faster, slower = sum(high < 1 for _, high in ratios), sum(low > 1 for low, _ in ratios)
        level = [other for other, (low, high) in zip(labels, ratios, strict=True) if low <= 1 <= high]
        found[label] = Standing(1 + faster, len(labels) - slower, tuple(other for other in level if other != label))
    return found


def by_question(samples: Sequence[Sequence[Row]]) -> tuple[Floats, Floats]:
    """Return seconds and tokens of every method [methods, questions], on the prompts that all of them answered.

    samples: of each method.
    """
    shared: Sequence[Row] = next(iter(samples), [])
    for own in samples:
        shared = paired(shared, own)[0]
    sums = [PairedTimes(paired(shared, own)[1], shared).by_question() for own in samples]
    empty = np.empty((0, 0))
    return (np.stack([s for _, _, s, _ in sums]), np.stack([n for _, _, _, n in sums])) if sums else (empty, empty)
