"""Coordinate search by paired races over a method's options.

A *block* is one prompt that each remaining configuration answers once, in a balanced order. A configuration takes the
lead only if its interval excludes noise, so the search may stop at any time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Protocol

import numpy as np

from specbench_ss.bench.schedule import method_order
from specbench_ss.errors import UserError, error_text
from specbench_ss.options import MethodSpec
from specbench_ss.stats import intervals
from specbench_ss.stats.intervals import FEWEST, Floats, Interval


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one request: its wall time in seconds, with prefill, and its tokens."""

    seconds: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """One configuration compared with another, on their common blocks.

    speedup: seconds per token of the other over those of this one, each a ratio of sums; None without a common prompt.
    interval: its 95 % interval over prompts; None for fewer than four. tokens_per_s: of this one on these prompts.
    itself: compared with itself, without an interval.
    """

    speedup: float | None
    interval: Interval | None
    prompts: int
    tokens_per_s: float | None
    itself: bool = False

    @property
    def verdict(self) -> intervals.Comparison:
        """Return the interval's verdict: faster, slower, not significant, insufficient data or reference."""
        return "baseline" if self.itself else intervals.compare(self.interval)


class Measurements:
    """All samples so far."""

    def __init__(self) -> None:
        self._prompts: list[int] = []  # of each block
        self._costs: dict[str, dict[int, Cost]] = {}  # label -> block -> cost

    def open_block(self, prompt: int) -> int:
        """Add a block on this prompt and return its index."""
        self._prompts.append(prompt)
        return len(self._prompts) - 1

    def add(self, label: str, block: int, cost: Cost) -> None:
        """Add the cost of a configuration in a block."""
        self._costs.setdefault(label, {})[block] = cost

    def labels(self) -> list[str]:
        """Return every configuration with a sample, in order of its first one."""
        return list(self._costs)

    def longest(self, label: str) -> float:
        """Return the seconds of the longest request, or 0."""
        return max((cost.seconds for cost in self._costs.get(label, {}).values()), default=0.0)

    def compare(self, own: str, over: str) -> Comparison:
        """Compare `own` with `over`; dependent blocks on the same prompt are summed."""
        costs_own, costs_over = self._costs.get(own, {}), self._costs.get(over, {})
        common = [block for block in costs_own if block in costs_over]
        if not common:
            return Comparison(None, None, 0, None)
        prompts, index = np.unique([self._prompts[block] for block in common], return_inverse=True)

        def sums(costs: dict[int, Cost], name: str) -> Floats:
            return np.bincount(index, [getattr(costs[b], name) for b in common], len(prompts)).astype(np.float64)

        own_s, own_tokens = sums(costs_own, "seconds"), sums(costs_own, "tokens")
        over_s, over_tokens = sums(costs_over, "seconds"), sums(costs_over, "tokens")
        seconds_per_token = float(own_s.sum() / own_tokens.sum())
        speedup = float(over_s.sum() / over_tokens.sum()) / seconds_per_token
        itself = own == over
        interval = None if itself else intervals.speedup_interval(over_s, over_tokens, own_s, own_tokens)
        return Comparison(speedup, interval, len(prompts), 1 / seconds_per_token, itself)

    def always_slower(self, own: str, over: str, share: float) -> bool:
        """Return True if `own` had less than this share of the speed of `over` in every common block."""
        costs_own, costs_over = self._costs.get(own, {}), self._costs.get(over, {})
        pairs = [(costs_own[b], costs_over[b]) for b in costs_own if b in costs_over]
        return all(b.seconds / b.tokens < share * a.seconds / a.tokens for a, b in pairs)


class Bench(Protocol):
    """Configurations of one method, and the baseline, ready for prompts numbered from 0."""

    def options(self, at: MethodSpec) -> list[str]:
        """Return the names of the options to tune, the most important first."""

    def around(self, at: MethodSpec, option: str) -> list[MethodSpec]:
        """Return the configurations with another value of the option, the simplest first.

        Only one of several values with the same settings is returned.
        """

    def warm_up(self, spec: MethodSpec, prompt: int) -> None:
        """Answer a prompt without measuring. Raises the method's errors."""

    def measure(self, spec: MethodSpec, prompt: int) -> Cost:
        """Answer a prompt and return its cost. Raises the method's errors."""

    def keep(self, labels: Collection[str]) -> None:
        """Free the resources of all configurations except these."""


class Watch(Protocol):
    """Callbacks of tuning, called between samples; they must be fast."""

    def on_race(self, what: str, labels: Sequence[str]) -> None:
        """Report a race of these configurations. what: the option whose values differ."""

    def on_sample(self, label: str) -> None:
        """Report a sample of a configuration."""

    def on_warning(self, text: str) -> None:
        """Report a warning; tuning continues."""


class BlockedRuns:
    """Blocks over prompts, cyclically.

    needed: labels that must not fail; any other failing configuration is dropped. failed: {label: reason}.
    """

    def __init__(self, bench: Bench, prompts: Sequence[int], needed: Collection[str], seed: int, watch: Watch) -> None:
        self.bench, self.needed, self.seed, self.watch = bench, frozenset(needed), seed, watch
        self.book = Measurements()
        self.failed: dict[str, str] = {}
        self.prompts = tuple(prompts)
        self._next: Iterator[int] = cycle(self.prompts)

    def warm_up(self, specs: Sequence[MethodSpec]) -> list[MethodSpec]:
        """Run each configuration once without measuring; return the successful ones."""
        return [spec for spec in specs if self._succeeds(spec, lambda s: self.bench.warm_up(s, self.prompts[0]))]

    def rehearse(self, spec: MethodSpec) -> None:
        """Run one full request without recording it."""
        self._succeeds(spec, lambda s: self.bench.measure(s, self.prompts[0]))

    def measure(self, specs: Sequence[MethodSpec]) -> list[MethodSpec]:
        """Measure one block; return the successful configurations in the given order."""
        prompt, by_label = next(self._next), {spec.label: spec for spec in specs}
        block = self.book.open_block(prompt)

        def sample(spec: MethodSpec) -> None:
            self.book.add(spec.label, block, self.bench.measure(spec, prompt))
            self.watch.on_sample(spec.label)

        order = method_order(list(by_label), block, self.seed)
        good = {label for label in order if self._succeeds(by_label[label], sample)}
        return [spec for spec in specs if spec.label in good]

    def _succeeds(self, spec: MethodSpec, work: Callable[[MethodSpec], object]) -> bool:
        try:
            work(spec)
        except Exception as error:  # such as out of memory: continue with the others
            if spec.label in self.needed:
                raise UserError(f"{spec.label} fails, so nothing can be compared: {error_text(error)}") from error
            self.failed[spec.label] = error_text(error)
            self.watch.on_warning(f"{spec.label} failed and is left out: {self.failed[spec.label]}")
            return False
        return True


FIRST_CHECK = 2  # blocks before the slowest configurations are dropped
TIE_SHARE = 0.98  # of the fastest challenger's speed: a simpler one this fast stays
DROP_SHARE = 0.75  # of the leader's speed, in every block
CUTS = (4, 8, 16)  # blocks after which the slower half and clearly slower ones are dropped; the last one ends a race


class Search:
    """Search for a better configuration. best: the current leader, `default` at first.

    Every race measures the default and the leader along with the challengers. ends: time after which no race begins.
    room(labels): returns True if there is time for one more request of each.
    """

    def __init__(
        self,
        blocks: BlockedRuns,
        default: MethodSpec,
        ends: float,
        clock: Callable[[], float],
        room: Callable[[Sequence[str]], bool] = lambda labels: True,
    ) -> None:
        self.blocks, self.bench, self.book = blocks, blocks.bench, blocks.book
        self.default = self.best = default
        self.ends, self.clock, self.room = ends, clock, room
        self.specs = {default.label: default}
        self.untried: dict[str, int] = {}  # option -> undecided values; 0: unknown

    def run(self) -> None:
        """Race one option after the other until none gives a better leader, or time is up."""
        pending = self.bench.options(self.best)
        self.untried = dict.fromkeys(pending, 0)
        while pending and self.clock() < self.ends and self._has_room(()):
            option, before = pending.pop(0), self.best
            # one extra share of the time, for the options of a new leader
            self._race(option, self.clock() + (self.ends - self.clock()) / (len(pending) + 2))
            if self.best is not before:
                pending += [name for name in self.bench.options(self.best) if name not in (option, *pending)]
                self.untried |= dict.fromkeys(pending, 0)

    def finalist(self) -> MethodSpec:
        """Return the configuration to compare with the default on other prompts.

        It is the leader, else the challenger with the best speedup, else the default.
        """
        if self.best is not self.default:
            return self.best
        over = {label: self.book.compare(label, self.default.label) for label in self.book.labels()}
        usable = [x for x in over if over[x].prompts >= FEWEST and x not in self.blocks.failed]
        return self.specs[max(usable, key=lambda x: over[x].speedup or 0.0, default=self.default.label)]

    def _race(self, option: str, deadline: float) -> None:
        excluded = {*self.blocks.failed, self.default.label, self.best.label}
        candidates = [spec for spec in self.bench.around(self.best, option) if spec.label not in excluded]
        self.specs |= {spec.label: spec for spec in candidates}
        self.untried[option] = len(candidates)
        if candidates and not self._has_room([*candidates, *candidates]):  # for a warm-up and a block
            return
        self._report_race(option, candidates)
        candidates, measured = self.blocks.warm_up(candidates), 0
        for block in range(1, CUTS[-1] + 1):
            # fewer blocks than the first cut are useless, so a race gets that far while there is any time
            if (
                not candidates
                or self.clock() >= (deadline if block > CUTS[0] else self.ends)
                or not self._has_room(candidates)
            ):
                break
            alive = self.blocks.measure(self._with_leaders(candidates))
            measured = block
            candidates = self._survivors([spec for spec in candidates if spec in alive], block)
            if block in CUTS:
                self._report_race(option, candidates)
                if len(candidates) == 1 and self._compare(candidates[0], self.best) == "faster":
                    break
        if not candidates or measured >= CUTS[0]:
            del self.untried[option]
        self._update_leader(candidates)

    def _with_leaders(self, candidates: Sequence[MethodSpec]) -> list[MethodSpec]:
        both = [self.default] if self.best is self.default else [self.default, self.best]
        return [*both, *candidates]

    def _has_room(self, candidates: Sequence[MethodSpec]) -> bool:
        return self.room([spec.label for spec in self._with_leaders(candidates)])

    def _report_race(self, option: str, candidates: Sequence[MethodSpec]) -> None:
        labels = [spec.label for spec in self._with_leaders(candidates)]
        self.bench.keep(labels)
        self.blocks.watch.on_race(option, labels)

    def _survivors(self, candidates: list[MethodSpec], block: int) -> list[MethodSpec]:
        """Return the configurations that remain after this many blocks, in the given order."""
        leader = self.best.label
        if block == FIRST_CHECK:
            return [spec for spec in candidates if not self.book.always_slower(spec.label, leader, DROP_SHARE)]
        if block not in CUTS:
            return candidates
        over = {spec.label: self.book.compare(spec.label, leader) for spec in candidates}
        candidates = [spec for spec in candidates if over[spec.label].verdict != "slower"]
        speeds = sorted((over[spec.label].speedup or 0.0 for spec in candidates), reverse=True)
        least = min(speeds[math.ceil(len(candidates) / 2) - 1], TIE_SHARE * speeds[0]) if candidates else 0.0
        return [spec for spec in candidates if (over[spec.label].speedup or 0.0) >= least]

    def _update_leader(self, candidates: Sequence[MethodSpec]) -> None:
        """Choose a new leader: the simplest of those that beat the old one and are not beaten among themselves."""
        better = [spec for spec in (self.default, *candidates) if self._compare(spec, self.best) == "faster"]
        for spec in better:
            if all(self._compare(other, spec) != "faster" for other in better):
                self.best = spec
                return

    def _compare(self, own: MethodSpec, over: MethodSpec) -> str:
        return self.book.compare(own.label, over.label).verdict
