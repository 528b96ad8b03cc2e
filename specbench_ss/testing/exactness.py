"""Statistical tests of sampled tokens against the distributions that they should have been drawn from.

Each token x of a step is compared with the distribution p [V] of its position, given all tokens before it. Two
statistics are kept for every position in the draft (root, depth 1, ...):

- drafted tokens: how often x is one of the drafted tokens S, against the sum of p(S). Its tail is bounded by the
  inequality of Hoeffding (1963, theorem 1), so that no approximation can raise a false alarm. It has the most power
  against rules that accept too much or too little.
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
from torch import Tensor

BINS = 10
# Hoeffding's bound at p < FIRST / 24 finds an acceptance of 0.98 where 0.85 is right with probability 0.99 from 220
# tokens on; a chi-square over ten bins follows its limit well enough from 200 on
ENOUGH = 220
SOME = 50  # Hoeffding's bound holds for any number; with fewer it finds nothing
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
    of their p(S).
    """

    places: list[float] = field(default_factory=list)
    drafted: int = 0
    hits: int = 0
    mass: float = 0.0

    def p_values(self) -> Iterator[tuple[str, float]]:
        """Yield a description of each statistic that has enough tokens, and its p-value."""
        if self.drafted >= SOME:
            share, expected = self.hits / self.drafted, self.mass / self.drafted
            found = f"{share:.3f} of {self.drafted} tokens are drafted ones, their probability is {expected:.3f}"
            yield found, hoeffding(share, expected, self.drafted)
        if len(self.places) >= ENOUGH:
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
        tally = self.by_position[where]
        tally.places.append(min(float(decision.before[token]) + self.rng.random() * p, BELOW_ONE))
        if 0 < decision.mass < 1 - ROUNDING:
            tally.drafted += 1
            tally.hits += token in decision.drafted
            tally.mass += decision.mass

    @property
    def fewest(self) -> int:
        """The number of tokens at the position that has fewest."""
        return min((len(tally.places) for tally in self.by_position.values()), default=0)

    @property
    def tested_acceptance(self) -> bool:
        """Whether drafted tokens were decided often enough to be tested."""
        return any(tally.drafted >= ENOUGH for tally in self.by_position.values())

    def p_values(self) -> dict[str, float]:
        """Return p-values by what was tested, each times the number of tests (Bonferroni)."""
        found = [(where, *of) for where, tally in self.by_position.items() for of in tally.p_values()]
        return {f"{where}: {what}": min(1.0, p * len(found)) for where, what, p in found}


class Impossible(Exception):  # noqa: N818
    """Raised for a token that its distribution never gives."""


def hoeffding(share: float, expected: float, n: int) -> float:
    """Return an upper bound of the two-sided p-value of a share of n Bernoulli trials with this mean probability."""

    def part(a: float, b: float) -> float:
        return a * math.log(a / b) if a > 0 else 0.0

    divergence = part(share, expected) + part(1 - share, 1 - expected)
    return min(1.0, 2 * math.exp(-n * divergence))


def uniformity(places: Sequence[float]) -> float:
    """Return the p-value of a chi-square of values in [0, 1) against the uniform distribution."""
    from scipy.stats import chisquare

    return float(chisquare(np.histogram(places, BINS, (0, 1))[0]).pvalue)


def siblings(q: Tensor, count: int, rng: torch.Generator) -> list[int]:
    """Draw tokens from q [V] without replacement, in the order of drawing; the first again where q has fewer."""
    keys = q.double() / torch.empty_like(q, dtype=torch.float64).exponential_(generator=rng)
    drawn: list[int] = keys.topk(min(count, int((q > 0).sum()))).indices.tolist()
    return [*drawn, *drawn[:1] * (count - len(drawn))]
