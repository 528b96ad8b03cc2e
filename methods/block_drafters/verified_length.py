"""Number of drafted tokens that a step verifies, from estimates of their acceptance and measured times of passes.

DSpark (arXiv:2607.05147, sec. 4, algorithm 1) for one request: with a_j, the estimated probability that the first j
drafted tokens are accepted, verifying l of them yields S(l) = (1 + a_1 + .. + a_l) / T(l) tokens per second, where T(l)
is the time of a step that verifies l tokens.

At temperature 0 any length is exact, and the best one is taken. Above it the decision to verify token j may depend on
the tokens before j alone: else the tokens that are verified no longer follow the draft distribution that the acceptance
rule assumes. The length therefore grows while S does and ends at the first token that does not raise it. T is replaced
by its lower convex hull, for which S has one maximum; a staircase would end the search too early.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds T(l) of a step that verifies l = 0, 1, .. drafted tokens, drafting included."""

    seconds: tuple[float, ...]

    def best_length(self, confidence: Sequence[float]) -> int:
        """Return the length with the largest S, for temperature 0. confidence: c_j, acceptance given all before."""
        rates = self._rates(confidence, self.seconds)
        return max(range(len(rates)), key=rates.__getitem__)

    def stopping_length(self, confidence: Sequence[float]) -> int:
        """Return the length before the first drafted token that does not raise S, for a temperature above 0."""
        rates = self._rates(confidence, convex_hull(self.seconds))
        return next((j for j in range(len(rates) - 1) if rates[j + 1] <= rates[j]), len(rates) - 1)

    @staticmethod
    def _rates(confidence: Sequence[float], seconds: Sequence[float]) -> list[float]:
        """Return S(0), S(1), .."""
        tokens = accumulate(accumulate(confidence, mul), initial=1.0)
        return [n / t for n, t in zip(tokens, seconds, strict=True)]


def threshold_length(confidence: Sequence[float], threshold: float) -> int:
    """Return the length before the first token with less confidence, which is exact at every temperature."""
    return next((j for j, c in enumerate(confidence) if c < threshold), len(confidence))


def convex_hull(values: Sequence[float]) -> list[float]:
    """Return the lower convex hull of values at 0, 1, 2, .., at the same places."""
    hull: list[int] = []
    for i, value in enumerate(values):
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            if (values[b] - values[a]) * (i - a) < (value - values[a]) * (b - a):
                break
            hull.pop()
        hull.append(i)
    parts = zip(hull, hull[1:], strict=False)
    inner = [values[a] + (values[b] - values[a]) * (i - a) / (b - a) for a, b in parts for i in range(a, b)]
    return [*inner, values[-1]]
