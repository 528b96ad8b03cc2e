"""Bootstrap intervals of paired comparisons, and resamples of questions.

The sums of any columns over all resamples are one matrix product, so every method is judged on the same resamples.

Whole questions are resampled, since their turns and repeats are not independent of each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import combinations
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln, ndtr, ndtri, stdtrit

Floats = NDArray[np.float64]

RESAMPLES = 50_000  # docs/metrics.md states the remaining error
ENTRIES = 25_000_000  # of a matrix of counts: its bytes. More questions need fewer resamples for the same error
LISTED = 10  # questions of which every resample that there is can be listed, 92,378: then nothing is left to chance
SEED = 20240917
CHUNK = 1_000_000  # entries of a matrix of counts that are turned into floats at a time


@dataclass(frozen=True, slots=True)
class Resamples:
    """counts: uint8 [R, n], each row adds up to n. weights: [R], the probability of each; None where all are alike."""

    counts: NDArray[np.uint8]
    weights: Floats | None = None

    def sums(self, columns: Floats) -> Floats:
        """Return the sums [R, k] of columns [n, k] over each resample."""
        rows = max(1, CHUNK // len(columns))
        parts = (self.counts[i : i + rows] for i in range(0, len(self.counts), rows))
        return np.concatenate([part.astype(np.float64) @ columns for part in parts])

    def share(self, found: NDArray[np.bool_]) -> float:
        """Return the probability of the resamples [R] that are marked."""
        return float(found.mean() if self.weights is None else self.weights[found].sum())

    def quantiles(self, values: Floats, at: Floats) -> Floats:
        """Return the quantiles of values [R], one of each resample."""
        if self.weights is None:
            return np.asarray(np.quantile(values, at))
        return np.asarray(np.quantile(values, at, weights=self.weights, method="inverted_cdf"))


def resamples(n: int, seed: int = SEED) -> Resamples:
    """Return the resamples of n questions: all that there are where these are few, else random ones from the seed."""
    return listed(n) if n <= LISTED else drawn(n, min(RESAMPLES, ENTRIES // n), seed)


@cache
def listed(n: int) -> Resamples:
    """Return every resample of n questions with its probability."""
    # n draws and n - 1 bars between the questions, in every order
    bars = np.array(list(combinations(range(2 * n - 1), n - 1)), dtype=np.int64).reshape(-1, n - 1)
    edges = np.pad(bars, ((0, 0), (1, 1)), constant_values=((0, 0), (-1, 2 * n - 1)))
    counts = np.diff(edges, axis=1) - 1  # [C(2n - 1, n), n]
    weights = np.exp(math.lgamma(n + 1) - gammaln(counts + 1).sum(1) - n * math.log(n))
    return Resamples(counts.astype(np.uint8), weights)


@lru_cache(maxsize=3)
def drawn(n: int, rows: int, seed: int) -> Resamples:
    """Return random resamples of n questions, the same for the same seed."""
    rng, counts = np.random.default_rng(seed), np.empty((rows, n), np.uint8)
    step = max(1, CHUNK // n)
    for start in range(0, rows, step):
        some = counts[start : start + step]
        places = rng.integers(0, n, some.shape) + n * np.arange(len(some))[:, None]
        some[:] = np.bincount(places.ravel(), minlength=some.size).reshape(some.shape)
    return Resamples(counts)


Interval = tuple[float, float]
Comparison = Literal["baseline", "faster", "slower", "not significant", "insufficient data", "invalid"]
Statistic = Callable[[Floats], Floats]  # of sums [..., k]: [...]

LEVEL = 0.95
FEWEST = 4  # questions: of two or three, the interval of Student's t is too wide to be of use
SAFETY = 1.25  # bootstrap intervals cover less than stated: ours must cover in A/A runs with a margin
TIMING_FLOOR = 0.01  # what one process cannot see of itself: clocks, memory layout, heat
TIE = 1e-12  # sums of the same numbers in another order


def speedup_interval(ref_s: Floats, ref_tokens: Floats, own_s: Floats, own_tokens: Floats) -> Interval | None:
    """Return the 95% interval of (ref_s / ref_tokens) / (own_s / own_tokens) over questions [n]; None below FEWEST."""
    return ratio_interval((ref_s, own_tokens), (ref_tokens, own_s), processes=1)


def ratio_interval(above: Sequence[Floats], below: Sequence[Floats], processes: int = 0) -> Interval | None:
    """Return the 95% interval of a product of sums over questions [n] over another; None below FEWEST.

    processes: how many took the times in it; each adds TIMING_FLOOR. All values must be positive.
    """

    def log_ratio(sums: Floats) -> Floats:
        by_column = np.moveaxis(sums, -1, 0)  # [k, ...]; one logarithm of the ratio is cheaper than k
        return np.asarray(np.log(math.prod(by_column[: len(above)]) / math.prod(by_column[len(above) :])))

    around = bootstrap(log_ratio, np.stack([*above, *below], 1))
    if around is None:
        return None
    floor = processes * math.log1p(TIMING_FLOOR)
    return math.exp(around[0] - floor), math.exp(around[1] + floor)


def mean_interval(differences: Floats) -> Interval | None:
    """Return the 95% interval of the mean of paired differences, one a question [n]; None below FEWEST."""

    def mean(sums: Floats) -> Floats:
        return np.asarray(sums[..., 0] / len(differences))

    return bootstrap(mean, differences[:, None])


def pairwise(seconds: Floats, tokens: Floats) -> list[list[Interval]]:
    """Return for methods i and j, at [i][j], the 95% interval of how many times as fast i is as j.

    seconds, tokens: [methods, questions], at least FEWEST questions. All pairs share one product with the resamples.
    """
    columns, m = np.concatenate((seconds, tokens)).T, len(seconds)  # [n, 2m]

    def log_pace(sums: Floats) -> Floats:
        return np.asarray(np.log(sums[..., :m] / sums[..., m:]))  # [.., m], seconds a token

    of, total = resamples(len(columns)), columns.sum(0)
    paces = [log_pace(sums) for sums in (total, of.sums(columns), total - columns)]
    floor = math.log1p(TIMING_FLOOR)

    def ratio(i: int, j: int) -> Interval:
        estimate, values, left_one_out = (pace[..., j] - pace[..., i] for pace in paces)
        low, high = _widened(float(estimate), _bca(estimate, values, left_one_out, of), len(columns))
        return math.exp(low - floor), math.exp(high + floor)

    above = {(i, j): ratio(i, j) for i in range(m) for j in range(i + 1, m)}
    below = {(j, i): (1 / high, 1 / low) for (i, j), (low, high) in above.items()}
    found = above | below | {(i, i): (1.0, 1.0) for i in range(m)}
    return [[found[i, j] for j in range(m)] for i in range(m)]


def bootstrap(statistic: Statistic, columns: Floats) -> Interval | None:
    """Return the interval of a statistic of the sums of columns [n, k], widened for few questions; None below FEWEST.

    It is BCa, or percentile where BCa is degenerate.
    """
    n = len(columns)
    if n < FEWEST:
        return None
    return _widened(float(statistic(columns.sum(0))), bca(statistic, columns, resamples(n)), n)


def _widened(estimate: float, around: Interval, n: int) -> Interval:
    """Widen an interval for small n."""
    (low, high), widen = around, widening(n)
    return estimate - widen * (estimate - min(low, estimate)), estimate + widen * (max(high, estimate) - estimate)


def bca(statistic: Statistic, columns: Floats, of: Resamples) -> Interval:
    """Return the BCa interval (Efron 1987) of a statistic of sums, as `scipy.stats.bootstrap` computes it.

    Every question enters the statistic by its sums [n, k] alone, so leaving one out is a subtraction, and all
    resamples are one product.
    """
    total = columns.sum(0)
    return _bca(statistic(total), statistic(of.sums(columns)), statistic(total - columns), of)


def _bca(estimate: Floats, values: Floats, left_one_out: Floats, of: Resamples) -> Interval:
    """Return the interval from the statistic of all questions, of each resample [R], and without each question [n]."""
    level = np.array([(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    below, above = (of.share(values < estimate + sign * TIE) for sign in (-1, 1))
    bias = ndtri((below + above) / 2)
    pull = bias + ndtri(level)
    with np.errstate(all="ignore"):  # a bias without bounds: no resample lies below the estimate, or none above
        corrected = ndtr(bias + pull / (1 - _acceleration(left_one_out) * pull))
    low, high = of.quantiles(values, corrected if np.isfinite(corrected).all() else level)
    return float(low), float(high)


def _acceleration(left_one_out: Floats) -> float:
    """Return BCa's acceleration from the statistic with each question left out [n]; 0 where these are all equal."""
    pulls = left_one_out.mean() - left_one_out
    squares = float((pulls**2).sum())
    return float((pulls**3).sum()) / (6 * squares**1.5) if squares > 0 else 0.0


def widening(n: int) -> float:
    """Return the factor to widen an interval of n points by: Student's t over the normal, n over n - 1, the margin."""
    upper = (1 + LEVEL) / 2
    return SAFETY * float(stdtrit(n - 1, upper) / ndtri(upper)) * math.sqrt(n / (n - 1))


def compare(interval: Interval | None) -> Comparison:
    """Return how a method compares with the reference, by the interval of its speedup."""
    if interval is None:
        return "insufficient data"
    if interval[0] <= 1 <= interval[1]:
        return "not significant"
    return "faster" if interval[0] > 1 else "slower"
