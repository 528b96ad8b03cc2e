"""Statistical tests of sampled tokens against the distributions that they should have been drawn from.

Each token x of a step is compared with the distribution p [V] of its position, given all tokens before it. Two
statistics are kept for every position in the draft (root, depth 1, ...):

- drafted tokens: how often x is one of the drafted tokens S, against p(S), by the likelihood ratios of tilted odds.
  Their mean is a martingale, so that a false alarm has at most the stated probability (Ville's inequality), whatever
  the tokens before and wherever counting ends. It has the most power against rules that accept too much or too little.
- places: the place of x in the cumulative distribution, which is uniform (Rosenblatt 1952), by chi-square over ten
  bins. It has power against every other fault: tokens outside top-p or top-k, another temperature, an argmax.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specbench_ss.decoding.sampling import exponential_race

BINS, EXPECTED = 10, 20  # of a chi-square, and tokens expected in each
Floats = NDArray[np.float64]
TILTS = (-3.0, -2.0, -1.0, -0.5, 0.5, 1.0, 2.0, 3.0)  # added to the log-odds of a drafted token
# so many tokens find an acceptance of 0.98 where 0.85 is right with probability 0.99, at p < 1e-5 after Bonferroni over
# 24 tests; a chi-square over ten bins follows its limit well enough from 200 on
ENOUGH = 400
ROUNDING = 1e-6  # of a sum of float32 probabilities
BELOW_ONE = math.nextafter(1.0, 0.0)


class Decision:
    """The distribution p [V] that a token is decided by, with the drafted tokens first in its cumulative order."""

    def __init__(self, p: Tensor, drafted: Sequence[int] = ()) -> None:
        self.p = p.double().numpy()
        self.drafted = frozenset(drafted)
        first = np.isin(np.arange(len(self.p)), list(self.drafted))
        order = np.lexsort((-self.p, ~first))
        self.mass = float(self.p[first].sum())  # p(S)
        self.before = np.empty_like(self.p)  # the probability of all tokens that come before each
        self.before[order] = np.cumsum(self.p[order]) - self.p[order]


@dataclass(slots=True)
class Tally:
    """Tokens that were decided at one position of drafts.

    places: in [0, 1), one for each token. drafted: tokens with 0 < p(S) < 1; hits: those of them in S; mass: the sum
    of their p(S). log_ratios: for each tilt, the logarithm of the likelihood ratio.
    """

    places: list[float] = field(default_factory=list)
    drafted: int = 0
    hits: int = 0
    mass: float = 0.0
    log_ratios: Floats = field(default_factory=lambda: np.zeros(len(TILTS)))

    def add(self, place: float, mass: float, hit: bool) -> None:
        """Add a token. mass: p(S). hit: whether it is in S."""
        self.places.append(place)
        if 0 < mass < 1 - ROUNDING:
            self.drafted, self.hits, self.mass = self.drafted + 1, self.hits + hit, self.mass + mass
            self.log_ratios += np.multiply(TILTS, hit) - np.log1p(mass * np.expm1(TILTS))

    def p_values(self) -> Iterator[tuple[str, float]]:
        """Yield a description of each statistic that has enough tokens, and its p-value."""
        if self.drafted:
            share, expected = self.hits / self.drafted, self.mass / self.drafted
            found = f"{share:.3f} of {self.drafted} tokens are drafted ones, their probability is {expected:.3f}"
            yield found, min(1.0, float(np.exp(-np.logaddexp.reduce(self.log_ratios) + math.log(len(TILTS)))))
        if len(self.places) >= BINS * EXPECTED:
            yield f"{len(self.places)} tokens are not distributed as the logits say", uniformity(self.places)


class Tallies:
    """Tallies by position in the draft."""

    def __init__(self, seed: int) -> None:
        self.by_position = defaultdict[str, Tally](Tally)
        self.rng = np.random.default_rng(seed)

    def add(self, where: str, decision: Decision, token: int) -> None:
        """Add a token that should have been drawn from the decision's p. Raises Impossible if p(token) is 0."""
        p = float(decision.p[token])
        if p <= 0:
            raise Impossible(f"{where}: token {token} has probability 0")
        place = min(float(decision.before[token]) + self.rng.random() * p, BELOW_ONE)
        self.by_position[where].add(place, decision.mass, token in decision.drafted)

    def scarce(self, wanted: int = ENOUGH) -> list[str]:
        """Return the positions at which fewer tokens were decided."""
        return [where for where, tally in self.by_position.items() if len(tally.places) < wanted]

    @property
    def tested_acceptance(self) -> bool:
        """Return True if drafted tokens were decided often enough at some position."""
        return any(tally.drafted >= ENOUGH for tally in self.by_position.values())

    def p_values(self) -> dict[str, float]:
        """Return p-values by what was tested, each times the number of tests (Bonferroni)."""
        found = [(where, *of) for where, tally in self.by_position.items() for of in tally.p_values()]
        return {f"{where}: {what}": min(1.0, p * len(found)) for where, what, p in found}


class Impossible(Exception):  # noqa: N818
    """Raised for a token that its distribution never gives."""


def uniformity(places: Sequence[float]) -> float:
    """Return the p-value of a chi-square of values in [0, 1) against the uniform distribution."""
    from scipy.stats import chisquare

    return float(chisquare(np.histogram(places, BINS, (0, 1))[0]).pvalue)


def siblings(q: Tensor, count: int, rng: torch.Generator) -> list[int]:
    """Draw tokens from q [V] without replacement, in the order of drawing; the first again where q has fewer."""
    drawn: list[int] = exponential_race(q, rng).topk(min(count, int((q > 0).sum()))).indices.tolist()
    return [*drawn, *drawn[:1] * (count - len(drawn))]
