"""Resamples of n questions, drawn with replacement: how often each resample has each question. Made once for each n.

The sums of any columns over all resamples are one matrix product, so every method is judged on the same resamples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln

Floats = NDArray[np.float64]

RESAMPLES = 50_000  # docs/metrics.md says what error is left
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
