"""Bootstrap intervals of paired comparisons. docs/metrics.md gives the reasons. Only arrays are known, no methods.

Whole questions are resampled, since their turns and repeats are not independent of each other.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Floats = NDArray[np.float64]
Interval = tuple[float, float]
Comparison = Literal["reference", "faster", "slower", "not distinguishable", "too few"]

LEVEL = 0.95
RESAMPLES = 2000
FEWEST = 4  # questions: of two or three, Student's t makes an interval that says nothing
SEED = 20240917
SAFETY = 1.25  # bootstrap intervals cover less than they say: ours must hold in A/A runs with room to spare
TIMING_FLOOR = 0.01  # what one process cannot see of itself: clocks, memory layout, heat


def speedup_interval(ref_s: Floats, ref_tokens: Floats, own_s: Floats, own_tokens: Floats) -> Interval | None:
    """Return the 95% interval of (ref_s / ref_tokens) / (own_s / own_tokens) over questions [n]; None below FEWEST."""

    def log_ratio(a: Floats, b: Floats, c: Floats, d: Floats, axis: int = -1) -> Floats:
        sums = [np.log(x.sum(axis)) for x in (a, b, c, d)]
        return np.asarray(sums[0] - sums[1] - sums[2] + sums[3])

    around = bootstrap(log_ratio, ref_s, ref_tokens, own_s, own_tokens)
    if around is None:
        return None
    floor = math.log1p(TIMING_FLOOR)
    return math.exp(around[0] - floor), math.exp(around[1] + floor)


def mean_interval(differences: Floats) -> Interval | None:
    """Return the 95% interval of the mean of paired differences, one a question [n]; None below FEWEST."""

    def mean(x: Floats, axis: int = -1) -> Floats:
        return np.asarray(x.mean(axis))

    return bootstrap(mean, differences)


def bootstrap(statistic: Callable[..., Floats], *samples: Floats) -> Interval | None:
    """Return the BCa interval (percentile where BCa is degenerate), widened for few questions; None below FEWEST."""
    n = len(samples[0])
    if n < FEWEST:
        return None
    estimate = float(statistic(*samples))
    low, high = _scipy(statistic, samples, "BCa")
    if not (math.isfinite(low) and math.isfinite(high)):
        low, high = _scipy(statistic, samples, "percentile")
    widen = widening(n)
    return estimate - widen * (estimate - min(low, estimate)), estimate + widen * (max(high, estimate) - estimate)


def widening(n: int) -> float:
    """Return the factor to widen an interval of n points by: Student's t over the normal, n over n - 1, the margin."""
    upper = (1 + LEVEL) / 2
    return SAFETY * float(stats.t.ppf(upper, n - 1) / stats.norm.ppf(upper)) * math.sqrt(n / (n - 1))


def compare(interval: Interval | None) -> Comparison:
    """Say how a method compares with the reference, by the interval of its speedup."""
    if interval is None:
        return "too few"
    if interval[0] <= 1 <= interval[1]:
        return "not distinguishable"
    return "faster" if interval[0] > 1 else "slower"


def _scipy(statistic: Callable[..., Floats], samples: tuple[Floats, ...], method: str) -> Interval:
    options: dict[str, Any] = {"paired": True, "vectorized": True, "n_resamples": RESAMPLES, "batch": 500}
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # degenerate data: seen by the non-finite result
        rng = np.random.default_rng(SEED)
        done = stats.bootstrap(samples, statistic, confidence_level=LEVEL, method=method, rng=rng, **options)
    return float(done.confidence_interval.low), float(done.confidence_interval.high)
