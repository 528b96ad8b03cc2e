"""What configurations cost, block by block, and how two of them compare. Only labels and times are known, no methods.

A *block* is one prompt that each configuration still in question answers once, in a shuffled order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specbench_ss.results import intervals
from specbench_ss.results.intervals import Interval
from specbench_ss.results.resampling import Floats


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one answer: its wall time in seconds, prefill included, and the tokens that were kept."""

    seconds: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """One configuration compared with another, on the prompts that both answered in the same blocks.

    speedup: seconds per token of the other over those of this one, each a ratio of sums; None without a common prompt.
    interval: the 95 % interval of the speedup, over prompts; None for fewer than four. tokens_per_s: the speed of this
    one on these prompts.
    """

    speedup: float | None
    interval: Interval | None
    prompts: int
    tokens_per_s: float | None
    itself: bool = False  # compared with itself: there is no interval

    @property
    def verdict(self) -> intervals.Comparison:
        """Say what the interval shows: faster, slower, not distinguishable or too few; `reference` for itself."""
        return "reference" if self.itself else intervals.compare(self.interval)


class Book:
    """A record of every sample so far."""

    def __init__(self) -> None:
        self._prompts: list[int] = []  # of each block
        self._costs: dict[str, dict[int, Cost]] = {}  # label -> block -> cost

    def open_block(self, prompt: int) -> int:
        """Begin a new block on this prompt and return the block's number."""
        self._prompts.append(prompt)
        return len(self._prompts) - 1

    def add(self, label: str, block: int, cost: Cost) -> None:
        """Record that a configuration has answered the block's prompt."""
        self._costs.setdefault(label, {})[block] = cost

    def labels(self) -> list[str]:
        """Return every configuration that has a sample, in order of its first one."""
        return list(self._costs)

    def longest(self, label: str) -> float:
        """Return the seconds of the longest answer, or 0 where there is none yet."""
        return max((cost.seconds for cost in self._costs.get(label, {}).values()), default=0.0)

    def compare(self, own: str, over: str) -> Comparison:
        """Compare `own` with `over`.

        Blocks on the same prompt are added up, since they are not independent of each other.
        """
        mine, theirs = self._costs.get(own, {}), self._costs.get(over, {})
        common = [block for block in mine if block in theirs]
        if not common:
            return Comparison(None, None, 0, None)
        prompts, place = np.unique([self._prompts[block] for block in common], return_inverse=True)

        def sums(costs: dict[int, Cost], name: str) -> Floats:
            return np.bincount(place, [getattr(costs[b], name) for b in common], len(prompts)).astype(np.float64)

        own_s, own_tokens = sums(mine, "seconds"), sums(mine, "tokens")
        over_s, over_tokens = sums(theirs, "seconds"), sums(theirs, "tokens")
        pace = float(own_s.sum() / own_tokens.sum())
        speedup = float(over_s.sum() / over_tokens.sum()) / pace
        itself = own == over
        around = None if itself else intervals.speedup_interval(over_s, over_tokens, own_s, own_tokens)
        return Comparison(speedup, around, len(prompts), 1 / pace, itself)

    def always_slower(self, own: str, over: str, share: float) -> bool:
        """Say whether `own` ran at less than this share of the speed of `over` in every block that both have."""
        mine, theirs = self._costs.get(own, {}), self._costs.get(over, {})
        paces = [(mine[b], theirs[b]) for b in mine if b in theirs]
        return all(b.seconds / b.tokens < share * a.seconds / a.tokens for a, b in paces)
