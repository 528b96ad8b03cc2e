"""Coordinate search by paired races over a method's options.

A *block* is one prompt that each configuration still in question answers once, in a shuffled order.

A configuration takes the lead only where its interval is better than noise, so the search may stop at any time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Protocol

import numpy as np

from specbench_ss import stats
from specbench_ss.bench.schedule import method_order
from specbench_ss.errors import UserError, error_text
from specbench_ss.options import MethodSpec
from specbench_ss.stats import FEWEST, Floats, Interval


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
    def verdict(self) -> stats.Comparison:
        """Say what the interval shows: faster, slower, not significant or too few; `reference` for itself."""
        return "reference" if self.itself else stats.compare(self.interval)


class Measurements:
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
        around = None if itself else stats.speedup_interval(over_s, over_tokens, own_s, own_tokens)
        return Comparison(speedup, around, len(prompts), 1 / pace, itself)

    def always_slower(self, own: str, over: str, share: float) -> bool:
        """Say whether `own` ran at less than this share of the speed of `over` in every block that both have."""
        mine, theirs = self._costs.get(own, {}), self._costs.get(over, {})
        paces = [(mine[b], theirs[b]) for b in mine if b in theirs]
        return all(b.seconds / b.tokens < share * a.seconds / a.tokens for a, b in paces)


class Bench(Protocol):
    """Configurations of one method, and the reference, ready to answer prompts, which are numbered from 0."""

    def options(self, at: MethodSpec) -> list[str]:
        """Return the names of the options that may be changed here, those that matter most first."""

    def around(self, at: MethodSpec, option: str) -> list[MethodSpec]:
        """Return the configurations with another value of the option, the simplest first.

        Of values that lead to the same settings, only one is returned.
        """

    def warm_up(self, spec: MethodSpec, prompt: int) -> None:
        """Answer a prompt without measuring. Raises whatever the method raises."""

    def measure(self, spec: MethodSpec, prompt: int) -> Cost:
        """Answer a prompt and return what it cost. Raises whatever the method raises."""

    def keep(self, labels: Collection[str]) -> None:
        """Take note that configurations other than these will not be needed for now."""


class Watch(Protocol):
    """What tuning tells whoever watches it. Its methods must be quick, since they are called between samples."""

    def on_race(self, what: str, labels: Sequence[str]) -> None:
        """Learn that these configurations run against each other from now on. what: the option whose values differ."""

    def on_sample(self, label: str) -> None:
        """Learn that a configuration has answered a prompt."""

    def on_warning(self, text: str) -> None:
        """Learn something that the user should know. Tuning goes on."""


class BlockedRuns:
    """Blocks over some prompts, which start again from the first prompt when all are used up.

    needed: labels that must not fail; any other configuration that fails is left out. failed: {label: why it failed}.
    """

    def __init__(self, bench: Bench, prompts: Sequence[int], needed: Collection[str], seed: int, watch: Watch) -> None:
        self.bench, self.needed, self.seed, self.watch = bench, frozenset(needed), seed, watch
        self.book = Measurements()
        self.failed: dict[str, str] = {}
        self.prompts = tuple(prompts)
        self._next: Iterator[int] = cycle(self.prompts)

    def warm_up(self, specs: Sequence[MethodSpec]) -> list[MethodSpec]:
        """Have each configuration give one unmeasured answer; return those that gave one."""
        return [spec for spec in specs if self._done(spec, lambda s: self.bench.warm_up(s, self.prompts[0]))]

    def rehearse(self, spec: MethodSpec) -> None:
        """Give a whole answer that is not recorded."""
        self._done(spec, lambda s: self.bench.measure(s, self.prompts[0]))

    def measure(self, specs: Sequence[MethodSpec]) -> list[MethodSpec]:
        """Measure one block; return the configurations that have not failed, in the order given."""
        prompt, by_label = next(self._next), {spec.label: spec for spec in specs}
        block = self.book.open_block(prompt)

        def sample(spec: MethodSpec) -> None:
            self.book.add(spec.label, block, self.bench.measure(spec, prompt))
            self.watch.on_sample(spec.label)

        order = method_order(list(by_label), block, self.seed)
        good = {label for label in order if self._done(by_label[label], sample)}
        return [spec for spec in specs if spec.label in good]

    def _done(self, spec: MethodSpec, work: Callable[[MethodSpec], object]) -> bool:
        try:
            work(spec)
        except Exception as error:  # one configuration, say out of memory: the others are worth having
            if spec.label in self.needed:
                raise UserError(f"{spec.label} fails, so nothing can be compared: {error_text(error)}") from error
            self.failed[spec.label] = error_text(error)
            self.watch.on_warning(f"{spec.label} is left out because it failed: {self.failed[spec.label]}")
            return False
        return True


FIRST_LOOK = 2  # blocks after which what is hopeless goes
TIED = 0.98  # of the fastest challenger's speed: no reason to drop a simpler one
HOPELESS = 0.75  # of the leader's speed, in every block
CUTS = (4, 8, 16)  # blocks after which the slower half goes, and whatever is clearly slower; the last one ends a race


class Search:
    """The search for a better configuration. best: the present leader, which is `default` at first.

    Every race measures the default and the leader along with the challengers. ends: the time after which no race
    begins. room(labels): whether there is time for one more answer of each of these.
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
        self.untried: dict[str, int] = {}  # option -> values that no race had time to decide on; 0: not counted

    def run(self) -> None:
        """Race one option after the other until none gives a better leader, or time is up."""
        pending = self.bench.options(self.best)
        self.untried = dict.fromkeys(pending, 0)
        while pending and self.clock() < self.ends and self._has_room(()):
            option, before = pending.pop(0), self.best
            # one share is left over for what a new leader brings
            self._race(option, self.clock() + (self.ends - self.clock()) / (len(pending) + 2))
            if self.best is not before:
                pending += [name for name in self.bench.options(self.best) if name not in (option, *pending)]
                self.untried |= dict.fromkeys(pending, 0)

    def finalist(self) -> MethodSpec:
        """Return the configuration to compare with the default on other prompts.

        It is the leader, or else the challenger that looked best, or the default itself where nothing looked better.
        """
        if self.best is not self.default:
            return self.best
        over = {label: self.book.compare(label, self.default.label) for label in self.book.labels()}
        usable = [x for x in over if over[x].prompts >= FEWEST and x not in self.blocks.failed]
        return self.specs[max(usable, key=lambda x: over[x].speedup or 0.0, default=self.default.label)]

    def _race(self, option: str, deadline: float) -> None:
        out = {*self.blocks.failed, self.default.label, self.best.label}
        field = [spec for spec in self.bench.around(self.best, option) if spec.label not in out]
        self.specs |= {spec.label: spec for spec in field}
        self.untried[option] = len(field)
        if field and not self._has_room([*field, *field]):  # warm-up, and a block
            return
        self._announce(option, field)
        field, measured = self.blocks.warm_up(field), 0
        for block in range(1, CUTS[-1] + 1):
            # less than the first cut decides nothing, so a race that is begun gets that far while there is any time
            if not field or self.clock() >= (deadline if block > CUTS[0] else self.ends) or not self._has_room(field):
                break
            alive = self.blocks.measure(self._with_leaders(field))
            measured = block
            field = self._stays([spec for spec in field if spec in alive], block)
            if block in CUTS:
                self._announce(option, field)
                if len(field) == 1 and self._compare(field[0], self.best) == "faster":
                    break
        if not field or measured >= CUTS[0]:
            del self.untried[option]
        self._crown(field)

    def _with_leaders(self, field: Sequence[MethodSpec]) -> list[MethodSpec]:
        both = [self.default] if self.best is self.default else [self.default, self.best]
        return [*both, *field]

    def _has_room(self, field: Sequence[MethodSpec]) -> bool:
        return self.room([spec.label for spec in self._with_leaders(field)])

    def _announce(self, option: str, field: Sequence[MethodSpec]) -> None:
        labels = [spec.label for spec in self._with_leaders(field)]
        self.bench.keep(labels)
        self.blocks.watch.on_race(option, labels)

    def _stays(self, field: list[MethodSpec], block: int) -> list[MethodSpec]:
        """Return the configurations that go on after this many blocks, in the order given."""
        leader = self.best.label
        if block == FIRST_LOOK:
            return [spec for spec in field if not self.book.always_slower(spec.label, leader, HOPELESS)]
        if block not in CUTS:
            return field
        over = {spec.label: self.book.compare(spec.label, leader) for spec in field}
        field = [spec for spec in field if over[spec.label].verdict != "slower"]
        speeds = sorted((over[spec.label].speedup or 0.0 for spec in field), reverse=True)
        least = min(speeds[math.ceil(len(field) / 2) - 1], TIED * speeds[0]) if field else 0.0
        return [spec for spec in field if (over[spec.label].speedup or 0.0) >= least]

    def _crown(self, field: Sequence[MethodSpec]) -> None:
        """Choose a new leader: of those that clearly beat the old one, the simplest that none of them beats.

        The leader stays where none beats it.
        """
        better = [spec for spec in (self.default, *field) if self._compare(spec, self.best) == "faster"]
        for spec in better:
            if all(self._compare(other, spec) != "faster" for other in better):
                self.best = spec
                return

    def _compare(self, own: MethodSpec, over: MethodSpec) -> str:
        return self.book.compare(own.label, over.label).verdict
