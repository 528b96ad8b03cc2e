"""Betting score of sampled tokens: the evidence that they are no draws of the model's distribution.

The score is a product of likelihood ratios, whose mean is at most 1 where tokens are drawn from the model's
distribution (Ville 1939; Shafer, JRSS A 184, 2021). So the probability that it ever exceeds 1 / p is at most p, after
any number of tokens and whatever ended the answers. docs/design/sampled-output.md has the alternatives.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import reduce
from operator import add

from specbench_ss.runs.rows import ACCEPT_TILTS, PIT_BINS, SampledTokens

BIASED = 1e-6  # the largest p at which a method is called biased; that of one false alarm in a million methods
COARSE, COARSE_FILTERED = 1.0, 0.75  # mean near-tie bound / temperature, beyond which rounding counts: by simulation
ROUNDING = 1e-4  # share of tokens that a filter may exclude by more than the rounding that is allowed for
PRIOR = (*[8.0] * PIT_BINS, 0.1)  # Dirichlet: how unequal the alternatives' histograms are


def acceptance(chance: float, accepted: bool) -> SampledTokens:
    """Return the terms of one token for which something was drafted. chance: the probability that it is accepted."""
    return SampledTokens(
        offered=1,
        accepted=int(accepted),
        expected=chance,
        accept_variance=chance * (1 - chance),
        accept_ratios=[tilt * accepted - math.log1p(chance * math.expm1(tilt)) for tilt in ACCEPT_TILTS],
    )


def pool(answers: Iterable[SampledTokens]) -> SampledTokens:
    """Return the sums over all these answers."""
    return reduce(add, answers, SampledTokens())


def bound(pooled: SampledTokens) -> float:
    """Return the bound on the probability of this evidence, or more, where the tokens are not biased."""
    return min(1.0, math.exp(-evidence(pooled)))


def evidence(pooled: SampledTokens) -> float:
    """Return the logarithm of the betting score: the mean of those of likelihoods, histogram and acceptance."""
    parts = (_log_mean(pooled.log_ratios), _histogram(pooled.pit_counts), _log_mean(pooled.accept_ratios))
    return _log_mean(parts)


def too_coarse(pooled: SampledTokens, filtered: bool) -> bool:
    """Return True if rounding of the logits alone may give evidence. filtered: by top-k or top-p."""
    return pooled.rounding > (COARSE_FILTERED if filtered else COARSE) * pooled.tokens


def _histogram(counts: Sequence[int]) -> float:
    """Return the log likelihood ratio of a Dirichlet mixture of histograms to the uniform one."""
    n, total = sum(counts), sum(PRIOR)
    shares = (*[1 / PIT_BINS] * PIT_BINS, ROUNDING)
    terms = (
        math.lgamma(a + k) - math.lgamma(a) - k * math.log(share)
        for a, k, share in zip(PRIOR, counts, shares, strict=True)
    )
    return math.fsum(terms) - math.lgamma(total + n) + math.lgamma(total)


def _log_mean(logs: Sequence[float]) -> float:
    largest = max(logs)
    return largest + math.log(math.fsum(math.exp(x - largest) for x in logs) / len(logs))
