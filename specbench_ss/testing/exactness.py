"""Statistical tests of sampled tokens against the distributions that they should have been drawn from.

Each token x of a step is compared with the distribution p [V] of its position, given all tokens before it: its place
in the cumulative distribution is uniform (Rosenblatt 1952), and it is a drafted token with the sum of their p. The
evidence is the betting score that a run uses for its own samples (`runs.betting_score`), kept for each position in the
draft, so that chance exceeds it with at most the stated probability, wherever counting ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specbench_ss.decoding.sampling import exponential_race
from specbench_ss.runs.betting_score import acceptance, bound
from specbench_ss.runs.rows import PIT_BINS, SampledTokens

# so many tokens find an acceptance of 0.98 where 0.85 is right with probability 0.99, at p < 1e-5 after Bonferroni over
# 24 positions
ENOUGH = 400
ROUNDING = 1e-6  # of a sum of float32 probabilities


class Decision:
    """The distribution p [V] that a token is decided by, with the drafted tokens first in its cumulative order."""

    def __init__(self, p: Tensor, drafted: Sequence[int] = ()) -> None:
        self.p = p.double().numpy()
        self.drafted = frozenset(drafted)
        first = np.isin(np.arange(len(self.p)), list(self.drafted))
        order = np.lexsort((-self.p, ~first))
        self.chance = float(self.p[first].sum())  # that the token is a drafted one
        self.before = np.empty_like(self.p)  # the probability of all tokens that come before each
        self.before[order] = np.cumsum(self.p[order]) - self.p[order]


class Tallies:
    """Statistics of decided tokens by position in the draft."""

    def __init__(self, seed: int) -> None:
        self.by_position = defaultdict[str, SampledTokens](SampledTokens)
        self.rng = np.random.default_rng(seed)

    def add(self, where: str, decision: Decision, token: int) -> None:
        """Add a token that should have been drawn from the decision's p. Raises Impossible if p(token) is 0."""
        p = float(decision.p[token])
        if p <= 0:
            raise Impossible(f"{where}: token {token} has probability 0")
        place = float(decision.before[token]) + self.rng.random() * p
        if 0 < decision.chance < 1 - ROUNDING:
            self.by_position[where] += acceptance(decision.chance, token in decision.drafted)
        self.by_position[where].pit_counts[min(int(place * PIT_BINS), PIT_BINS - 1)] += 1

    def scarce(self, wanted: int = ENOUGH) -> list[str]:
        """Return the positions at which fewer tokens were decided."""
        return [where for where, tally in self.by_position.items() if tally.tokens < wanted]

    @property
    def tested_acceptance(self) -> bool:
        """Return True if drafted tokens were decided often enough at some position."""
        return any(tally.offered >= ENOUGH for tally in self.by_position.values())

    def p_values(self) -> dict[str, float]:
        """Return a p-value for each position, times the number of positions (Bonferroni), by what was found there."""
        many = len(self.by_position)
        return {_found(where, tally): min(1.0, many * bound(tally)) for where, tally in self.by_position.items()}


class Impossible(Exception):  # noqa: N818
    """Raised for a token that its distribution never gives."""


def _found(where: str, tally: SampledTokens) -> str:
    found = f"{where}: {tally.tokens} tokens are not distributed as the logits say"
    if not tally.offered:
        return found
    share, expected = tally.accepted / tally.offered, tally.expected / tally.offered
    return f"{found}; {share:.3f} of {tally.offered} are drafted ones, their probability is {expected:.3f}"


def siblings(q: Tensor, count: int, rng: torch.Generator) -> list[int]:
    """Draw tokens from q [V] without replacement, in the order of drawing; the first again where q has fewer."""
    drawn: list[int] = exponential_race(q, rng).topk(min(count, int((q > 0).sum()))).indices.tolist()
    return [*drawn, *drawn[:1] * (count - len(drawn))]
