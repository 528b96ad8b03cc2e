"""Betting score of sampled tokens: evidence that they are not drawn from the distribution that they should be.

The score is a product of likelihood ratios of alternatives to that distribution, one factor a token. Each factor has a
mean of at most 1 where the tokens are drawn from it, so the probability that the score ever exceeds 1 / p is at most p,
after any number of tokens and whatever ended the outputs (Ville 1939; Shafer, JRSS A 184, 2021). A mean of several
scores is such a score again. docs/design/sampled-output.md has the alternatives.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import reduce
from operator import add
from typing import Annotated as Col
from typing import Any

import numpy as np
from scipy.special import gammaln

from specbench_ss.user_files import Count, NonNegative

BIASED = 1e-6  # the largest p at which a method is called biased; that of one false alarm in a million methods
COARSE, COARSE_FILTERED = 1.0, 0.75  # mean tie bound / temperature beyond which rounding counts: by simulation
ROUNDING = 1e-4  # share of tokens that a filter may exclude by more than the rounding that is allowed for

PIT_BINS = 10  # of the histogram of PIT values
OUTSIDE = PIT_BINS  # bin of tokens that the sampling filters exclude
PRIOR = (*[8.0] * PIT_BINS, 0.1)  # Dirichlet: how unequal the alternatives' histograms are
TILTS = (-1 / 4, -1 / 16, 1 / 16, 1 / 4, 1.0)  # exponents of the alternatives p^(1 + tilt)
ACCEPT_TILTS = (-1 / 2, 1 / 8, 1 / 2, 2.0)  # shifts of the log-odds of acceptance in the alternatives
TAIL_FACTORS = (2.0, 10.0, 100.0)  # how much more probable than possible improbable tokens are in the alternatives
TAIL_FLOOR = 1e-6  # the least probability of all other tokens; float32 sums of probabilities are off by less


@dataclass(slots=True)
class SampledTokens:
    """Sums over the tokens x of sampled outputs, each compared with its target distribution p.

    pit_counts: the most probable token is first in the cumulative distribution; the last entry counts tokens that the
    filters exclude, beyond rounding. log_ratios: log p^(1 + tilt)(x) / (Z p(x)) for each of `TILTS`. accept_ratios: of
    acceptance with shifted log-odds, for each of `ACCEPT_TILTS`.
    """

    pit_counts: Col[
        list[Count],
        "histogram of these tokens over tenths of the cumulative distribution; last bin: excluded by top-p or top-k",
        "tokens",
    ] = field(default_factory=lambda: [0] * (PIT_BINS + 1))
    log_ratios: Col[list[float], "log-likelihood ratios of tempered distributions to the target's", "nats"] = field(
        default_factory=lambda: [0.0] * len(TILTS)
    )
    surplus: Col[float, "log-likelihood of these tokens minus its expectation", "nats"] = 0.0
    variance: Col[NonNegative, "variance of the log-likelihood under the target's distribution", "nats²"] = 0.0
    offered: Col[Count, "tokens at positions with a draft", "tokens"] = 0
    accepted: Col[Count, "accepted drafted tokens among them", "tokens"] = 0
    expected: Col[
        NonNegative, "expected number of accepted drafted tokens under the target's distribution", "tokens"
    ] = 0.0
    accept_variance: Col[NonNegative, "variance of that number"] = 0.0
    accept_ratios: Col[list[float], "log-likelihood ratios of higher and lower acceptance", "nats"] = field(
        default_factory=lambda: [0.0] * len(ACCEPT_TILTS)
    )
    tail: Col[Count, "servers: tokens outside the most probable ones that the server sent", "tokens"] = 0
    tail_expected: Col[NonNegative, "upper bound of their expected number", "tokens"] = 0.0
    tail_ratios: Col[list[float], "log-likelihood ratios of such tokens being more frequent", "nats"] = field(
        default_factory=lambda: [0.0] * len(TAIL_FACTORS)
    )
    rounding: Col[NonNegative, "sum over tokens of the numerical tie bound / temperature"] = 0.0

    @property
    def tokens(self) -> int:
        """Return the number of compared tokens."""
        return sum(self.pit_counts)

    def __add__(self, other: SampledTokens) -> SampledTokens:
        """Return the sums over the tokens of both."""
        sums: list[Any] = []
        for a, b in ((getattr(self, column.name), getattr(other, column.name)) for column in fields(self)):
            sums.append([x + y for x, y in zip(a, b, strict=True)] if isinstance(a, list) else a + b)
        return SampledTokens(*sums)


def acceptance(chance: float, accepted: bool) -> SampledTokens:
    """Return the terms of one token for which something was drafted. chance: the probability that it is accepted."""
    return SampledTokens(
        offered=1,
        accepted=int(accepted),
        expected=chance,
        accept_variance=chance * (1 - chance),
        accept_ratios=[tilt * accepted - math.log1p(chance * math.expm1(tilt)) for tilt in ACCEPT_TILTS],
    )


def tail(chance: float, outside: bool) -> SampledTokens:
    """Return the terms of whether a token is outside the reported ones. chance: an upper bound of its probability.

    The likelihood ratio of a larger probability, min(1/2, factor * chance), to `chance` has a mean of at most 1 for
    every true probability up to `chance`, so the bound need not be exact.
    """
    chance = max(chance, TAIL_FLOOR)
    raised = [min(0.5, factor * chance) for factor in TAIL_FACTORS]
    ratios = [math.log(p / chance if outside else (1 - p) / (1 - chance)) if p > chance else 0.0 for p in raised]
    return SampledTokens(tail=int(outside), tail_expected=chance, tail_ratios=ratios)


def pool(answers: Iterable[SampledTokens]) -> SampledTokens:
    """Return the sums over all these answers."""
    return reduce(add, answers, SampledTokens())


def bound(pooled: SampledTokens) -> float:
    """Return the bound on the probability of this evidence, or more, where the tokens are not biased."""
    return min(1.0, math.exp(-evidence(pooled)))


def evidence(pooled: SampledTokens) -> float:
    """Return the logarithm of the betting score: the mean of those of likelihoods, histogram, acceptance and tail."""
    parts = [_log_mean(pooled.log_ratios), _histogram(pooled.pit_counts), _log_mean(pooled.accept_ratios)]
    return _log_mean([*parts, _log_mean(pooled.tail_ratios)] if pooled.tail_expected else parts)


def too_coarse(pooled: SampledTokens, filtered: bool) -> bool:
    """Return True if rounding of the logits alone may give evidence. filtered: by top-k or top-p."""
    return pooled.rounding > (COARSE_FILTERED if filtered else COARSE) * pooled.tokens


def _histogram(counts: Sequence[int]) -> float:
    """Return the log likelihood ratio of a Dirichlet mixture of histograms to the uniform one."""
    k, prior, shares = np.array(counts), np.array(PRIOR), np.array([*[1 / PIT_BINS] * PIT_BINS, ROUNDING])
    terms = gammaln(prior + k) - gammaln(prior) - k * np.log(shares)
    return float(terms.sum() - gammaln(prior.sum() + k.sum()) + gammaln(prior.sum()))


def _log_mean(logs: Sequence[float]) -> float:
    return float(np.logaddexp.reduce(logs)) - math.log(len(logs))
