"""Coordinate search by paired races: one option at a time, all of its values against the best configuration so far.

A configuration takes the lead only where its interval is better than noise, so the search may stop at any time. This
module knows no method.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from specbench_ss.method_spec import MethodSpec
from specbench_ss.results.intervals import FEWEST
from specbench_ss.tuning.blocks import Blocks

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
        blocks: Blocks,
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
