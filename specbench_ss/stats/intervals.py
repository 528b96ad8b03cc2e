"""Confidence intervals of paired comparisons: Student's t on the influences of questions, within tasks.

To first order the logarithm of a ratio of sums changes with each question by its *influence*: its share of the sum
above minus its share of the sum below. The variance of the ratio is that of the sum of all influences in a stratified
sample (Cochran 1977, sections 5.3 and 6.4): a suite takes questions from each of its tasks, so questions vary within
tasks, and tasks do not vary. The degrees of freedom are those of Bell and McCaffrey (2002): long questions count more.

Whole questions are the units, since their turns and repeats are not independent of each other. docs/metrics.md states
the estimand and the coverage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, stdtrit

Floats = NDArray[np.float64]
Strata = NDArray[np.int64]  # [questions], the stratum of each, counted from 0
Interval = tuple[float, float]
Comparison = Literal["baseline", "faster", "slower", "not significant", "insufficient data", "invalid"]

LEVEL = 0.95
FEWEST = 4  # questions: of two or three, an interval is too wide to be of use
TIMING_FLOOR = 0.01  # effects that one process cannot measure on itself: clocks, memory layout, heat
LARGEST = 700.0  # logarithm whose exponential, and that of its negative, are normal floats


def strata_of(tasks: Sequence[str]) -> Strata:
    """Return the stratum of each question. tasks: of each question.

    A task with two questions or more is a stratum. Tasks with one question are one stratum together: their
    differences then count as noise. A single such task joins the smallest other one.
    """
    _, first, task, sizes = np.unique(
        np.asarray(tasks, dtype=str), return_index=True, return_inverse=True, return_counts=True
    )
    single, stratum = np.flatnonzero(sizes == 1), np.arange(len(sizes))
    if len(single) == 1 and len(sizes) > 1:
        others = np.where(sizes == 1, len(task) + 1, sizes)
        stratum[single] = np.lexsort((first, others))[0]
    elif len(single):
        stratum[single] = single[0]
    return np.unique(stratum[task], return_inverse=True)[1].astype(np.int64)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a variance, with its degrees of freedom.

    questions: what falls as the number of questions rises. processes: what the differences between processes add.
    """

    questions: float
    processes: float
    degrees: float

    @property
    def variance(self) -> float:
        """Return the sum of both."""
        return self.questions + self.processes


@dataclass(frozen=True, slots=True)
class Estimate:
    """An estimate with the parts of its variance: that over questions, then those between processes."""

    value: float
    parts: tuple[Part, ...]

    @property
    def error(self) -> float:
        """Return the standard error."""
        return math.sqrt(sum(part.variance for part in self.parts))

    @property
    def freedom(self) -> float:
        """Return the degrees of freedom of the variance; of a sum, those of Satterthwaite (1946)."""
        squares = sum(part.variance**2 / part.degrees for part in self.parts)
        if len(self.parts) == 1 or not squares:
            return self.parts[0].degrees
        return sum(part.variance for part in self.parts) ** 2 / squares

    def around(self, tail: float = 1 - LEVEL, more: float = 0.0) -> Interval:
        """Return the interval that misses the truth with probability `tail`. more: to add on both sides."""
        half = self.error * float(stdtrit(self.freedom, 1 - tail / 2)) + more
        return self.value - half, self.value + half

    def ratio(self, tail: float = 1 - LEVEL, more: float = 0.0) -> Interval:
        """Return the interval of the ratio whose logarithm this is, with the arguments of `around`.

        With one degree of freedom it may exceed the range of floats: it ends at exp(±LARGEST).
        """
        low, high = self.around(tail, more)
        return math.exp(max(low, -LARGEST)), math.exp(min(high, LARGEST))


def estimate(
    value: float,
    influences: Floats,
    shares: Floats,
    strata: Strata | None = None,
    sessions: Sequence[Floats] = (),
    blocks: Sequence[Strata] = (),
) -> Estimate:
    """Return a statistic with its standard error from the influences of the questions within strata.

    influences: [n], derivative of the statistic by the weight of each question. shares: [n], to which the standard
    deviation of an influence is taken to be proportional, for the degrees of freedom alone. sessions: of each
    run with several processes [processes], by how much the times of each move the statistic, with sum 0. blocks: of
    each run whose processes measured different questions [n], the process of each question.

    The variances over questions and over sessions contain the noise of single times, so their sum is too large if
    processes do not differ.
    """
    at = np.zeros(len(influences), np.int64) if strata is None else strata
    size = np.bincount(at)
    centered = influences - (np.bincount(at, influences) / size)[at]
    # k / (k - 1) in each stratum: deviations from a mean of k questions are too small by that
    variance = float((np.bincount(at, centered**2) * (size / (size - 1))).sum())
    found = [one for column in blocks if (one := _between_blocks(centered, at, column)) is not None]
    between, within = [part for part, _ in found], min((share for _, share in found), default=1.0)
    of_sessions = [
        Part(0.0, float((one**2).sum()) * len(one) / (len(one) - 1), len(one) - 1.0) for one in sessions if len(one) > 1
    ]
    over_questions = Part(variance * within - sum(part.questions for part in between), 0.0, freedom(shares, at))
    return Estimate(value, (over_questions, *of_sessions, *between))


def _between_blocks(centered: Floats, strata: Strata, blocks: Strata) -> tuple[Part, float] | None:
    """Return the part of the variance that means of blocks estimate, and the share of that over questions within them.

    An analysis of variance (Henderson 1953, method 3) gives the mean squares B between and W within blocks, and the
    variance a (B - W) of the sum of influences by what is common to a block's questions. The variance V over questions,
    less the share that is due to blocks, and a W rest on the same residuals and nearly cancel: V + a (B - W) is taken
    as (V - a W) + a B, two parts with the degrees of freedom of V and the rank of B. If W > B, it is (V - a B) + a B.
    centered: [n], influences less the mean of their stratum. Return None for one block.
    """
    size = np.bincount(strata)
    member = np.eye(int(blocks.max()) + 1)[blocks]  # [n, blocks]
    by_stratum = np.stack([np.bincount(strata, column) for column in member.T], axis=1) / size[:, None]
    design = member - by_stratum[strata]
    block_effects, _, rank, _ = np.linalg.lstsq(design, centered, rcond=None)
    residual_df = len(centered) - len(size) - int(rank)
    if not rank or residual_df < 1:  # one block, or blocks of one question, whose differences are those of questions
        return None
    total, explained = float((centered**2).sum()), float(((design @ block_effects) ** 2).sum())
    between, within = explained / int(rank), max(0.0, total - explained) / residual_df
    scale = float(int(rank) * (member.sum(0) ** 2).sum() / (design**2).sum())  # a
    share = within / (total / (len(centered) - len(size))) if between > within else 1.0
    of_questions = scale * min(between, within)
    return Part(of_questions, scale * between - of_questions, float(rank)), share


def freedom(shares: Floats, strata: Strata) -> float:
    """Return the degrees of freedom of the variance of n questions with these standard deviations [n].

    They are 2 E(v)² / Var(v) of the estimated variance v for normal influences: n - 1 in one stratum of equal shares.
    """
    size, squares = np.bincount(strata), (shares / shares.sum()) ** 2
    second, fourth = np.bincount(strata, squares), np.bincount(strata, squares**2)
    return float(squares.sum() ** 2 / (fourth + (second**2 - fourth) / (size - 1) ** 2).sum())


def speedup_interval(
    ref_s: Floats,
    ref_tokens: Floats,
    own_s: Floats,
    own_tokens: Floats,
    strata: Strata | None = None,
    processes: int = 1,
    sessions: Sequence[Floats] = (),
    blocks: Sequence[Strata] = (),
) -> Interval | None:
    """Return the 95% interval of (ref_s / ref_tokens) / (own_s / own_tokens) over questions [n]; None below FEWEST."""
    return ratio_interval((ref_s, own_tokens), (ref_tokens, own_s), processes, strata, sessions, blocks)


def ratio_interval(
    above: Sequence[Floats],
    below: Sequence[Floats],
    processes: int = 0,
    strata: Strata | None = None,
    sessions: Sequence[Floats] = (),
    blocks: Sequence[Strata] = (),
) -> Interval | None:
    """Return the 95% interval of a product of sums over questions [n] over another; None below FEWEST.

    processes: how many took the times in it; each adds TIMING_FLOOR. All values must be positive. strata: of the
    questions; None: questions of one task. sessions, blocks: as `estimate` takes them.
    """
    if len(above[0]) < FEWEST:
        return None
    return log_ratio(above, below, strata, sessions, blocks).ratio(more=processes * math.log1p(TIMING_FLOOR))


def log_ratio(
    above: Sequence[Floats],
    below: Sequence[Floats],
    strata: Strata | None = None,
    sessions: Sequence[Floats] = (),
    blocks: Sequence[Strata] = (),
) -> Estimate:
    """Return the logarithm of a product of sums over questions [n] over another, with its error."""
    over, under = ([column / column.sum() for column in columns] for columns in (above, below))
    value = sum(math.log(column.sum()) for column in above) - sum(math.log(column.sum()) for column in below)
    influences, shares = np.add.reduce(over) - np.add.reduce(under), np.add.reduce([*over, *under])
    return estimate(value, influences, shares, strata, sessions, blocks)


def mean_interval(differences: Floats, strata: Strata | None = None) -> Interval | None:
    """Return the 95% interval of the mean of paired differences, one a question [n]; None below FEWEST."""
    n = len(differences)
    if n < FEWEST:
        return None
    return estimate(float(differences.mean()), differences / n, np.ones(n), strata).around()


def pairwise(
    seconds: Floats,
    tokens: Floats,
    strata: Strata | None = None,
    processes: int = 1,
    simultaneous: bool = True,
    sessions: Floats | None = None,
    blocks: Sequence[Strata] = (),
) -> list[list[Interval]]:
    """Return for methods i and j, at [i][j], the 95% interval of how many times as fast i is as j.

    seconds, tokens: [methods, questions], at least FEWEST questions. simultaneous: all intervals hold together in 95%
    of runs, else each one does. sessions: [methods, sessions], by how much each process moves the logarithm of a
    method's seconds per token. blocks: as `estimate` takes them.
    """
    m, more = len(seconds), processes * math.log1p(TIMING_FLOOR)
    tail = tail_of_each(m) if simultaneous else 1 - LEVEL

    def ratio(i: int, j: int) -> Interval:
        effects = () if sessions is None else (sessions[j] - sessions[i],)
        return log_ratio((seconds[j], tokens[i]), (tokens[j], seconds[i]), strata, effects, blocks).ratio(tail, more)

    above = {(i, j): ratio(i, j) for i in range(m) for j in range(i + 1, m)}
    below = {(j, i): (1 / high, 1 / low) for (i, j), (low, high) in above.items()}
    found = above | below | {(i, i): (1.0, 1.0) for i in range(m)}
    return [[found[i, j] for j in range(m)] for i in range(m)]


@cache
def tail_of_each(methods: int) -> float:
    """Return the probability that each of all pairs of methods may miss with, for all to hold together at LEVEL.

    It is that of the studentized range (Tukey 1953; Kramer 1956), taken from the normal distribution to Student's t of
    each pair's own degrees of freedom: the range with few degrees of freedom assumes one common variance.
    """
    if methods < 3:
        return 1 - LEVEL
    from scipy.stats import studentized_range  # takes half a second

    return 2 * float(ndtr(-studentized_range.ppf(LEVEL, methods, np.inf) / math.sqrt(2)))


def compare(interval: Interval | None) -> Comparison:
    """Return how a method compares with the reference, by the interval of its speedup."""
    if interval is None:
        return "insufficient data"
    if interval[0] <= 1 <= interval[1]:
        return "not significant"
    return "faster" if interval[0] > 1 else "slower"
