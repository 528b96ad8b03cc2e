"""One tuning session: search on one half of the prompts, then compare the winner with the default on the other half.

The winner of many noisy comparisons looks better than it is; only prompts that it was not chosen on show by how much.
So nothing is chosen that was not confirmed, and the search leaves time to confirm.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from specbench_ss.errors import UserError
from specbench_ss.method_spec import REFERENCE, MethodSpec
from specbench_ss.results.intervals import FEWEST
from specbench_ss.tuning.blocks import Bench, Blocks, Watch
from specbench_ss.tuning.measurements import Book, Comparison
from specbench_ss.tuning.search import CUTS, Search

SEARCH_SHARE = 0.6  # of the budget; the rest confirms
PASSES = 3  # over the prompts of the confirmation, at most
LEAST = FEWEST + 1  # prompts that time is kept back for: as many as make an interval, and the warm-up

Outcome = Literal["faster", "not distinguishable", "slower", "not confirmed", "nothing better"]


@dataclass(slots=True)
class Tuned:
    """The outcome of a session.

    finalist: the configuration that was compared with the default, which it may be itself. search, confirmation: all
    samples; only the confirmation has those of the reference. failed: {label: why it failed}. interrupted: whether
    Ctrl-C ended it; what was measured before counts. seconds: time of the whole session. to_confirm: estimated seconds
    of the shortest confirmation. untried: {option: how many of its values were not tried, or not often
    enough; 0: not counted}.
    """

    default: MethodSpec
    finalist: MethodSpec
    leader: MethodSpec
    search: Book
    confirmation: Book
    failed: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False
    seconds: float = 0.0
    to_confirm: float = 0.0
    untried: dict[str, int] = field(default_factory=dict)

    @property
    def over_default(self) -> Comparison:
        """Compare the finalist with the default, on prompts that it was not chosen on."""
        return self.confirmation.compare(self.finalist.label, self.default.label)

    @property
    def entrants(self) -> list[str]:
        """Return the labels in the confirmation: the reference, the default and the finalist."""
        order = dict.fromkeys((REFERENCE, self.default.label, self.finalist.label))
        return [label for label in order if label in self.confirmation.labels()]

    @property
    def outcome(self) -> Outcome:
        """Say how the finalist compares with the default; `not confirmed` where it only led the search."""
        verdict = self.over_default.verdict
        if self.finalist.label in (self.default.label, *self.failed):
            return "nothing better"
        if verdict in ("faster", "slower", "not distinguishable"):
            return verdict
        return "not confirmed" if self.leader.label != self.default.label else "nothing better"

    @property
    def chosen(self) -> MethodSpec:
        """Return the finalist where it is faster beyond noise on the prompts of the confirmation, else the default."""
        return self.finalist if self.outcome == "faster" else self.default


def tune(
    bench: Bench,
    default: MethodSpec,
    categories: Sequence[str],
    budget: float,
    seed: int,
    watch: Watch,
    clock: Callable[[], float] = time.monotonic,
) -> Tuned:
    """Spend `budget` seconds on the bench's prompts, whose categories are given. Ctrl-C ends the session early.

    Raises UserError where nothing can be tuned, where there are too few prompts, where the default fails, or where the
    budget is too short to try anything else.
    """
    if len(categories) < 2 * FEWEST:
        raise UserError(f"tuning needs at least {2 * FEWEST} prompts that fit the model, there are {len(categories)}")
    if not bench.options(default):
        raise UserError(f"nothing to tune: {default.label} has no option left whose value depends on the device")
    reference, started = MethodSpec(REFERENCE), clock()
    needed = {default.label, reference.label}
    racing, confirming = (Blocks(bench, half, needed, seed, watch) for half in halves(categories, seed))
    done = Tuned(default, default, default, racing.book, confirming.book, racing.failed)
    pace = Pace(racing.book)
    short = list[float]()  # budgets that would have had room for what was not tried

    def room(labels: Sequence[str]) -> bool:
        """Say whether these answers leave time to confirm the leader."""
        # a leader yet to come is no slower than the present one
        done.to_confirm = pace.confirmation([*needed, search.best.label])
        needs = clock() - started + pace.answers(labels) + done.to_confirm
        if needs > budget:
            short.append(needs)
        return needs <= budget

    search = Search(racing, default, started + SEARCH_SHARE * budget, clock, room)
    _tell_of_single_prompts(categories, watch)
    try:
        racing.warm_up([reference, default] * 2)
        pace.learn(racing, [reference, default], clock)
        ready = clock() - started
        search.run()
        if not racing.book.labels() and (short or clock() >= search.ends):
            least = max(ready / SEARCH_SHARE, ready + pace.least(reference, default), min(short, default=0))
            raise UserError(
                f"--budget {budget:g} is too short to try anything but the default: a race of other values and its "
                f"confirmation take at least {math.ceil(least)} s here"
            )
        done.finalist, done.leader = search.finalist(), search.best
        _confirm(confirming, {s.label: s for s in (reference, default, done.finalist)}, started + budget, clock)
    except KeyboardInterrupt:
        done.interrupted = True
        done.finalist, done.leader = search.finalist(), search.best
    done.failed |= confirming.failed
    done.untried = search.untried
    done.seconds = clock() - started
    return done


def _confirm(blocks: Blocks, entrants: dict[str, MethodSpec], ends: float, clock: Callable[[], float]) -> None:
    blocks.bench.keep(entrants)
    blocks.watch.on_race("confirmation", list(entrants))
    alive = blocks.warm_up(list(entrants.values()))
    for _ in range(PASSES * len(blocks.prompts)):
        if clock() >= ends:
            return
        alive = blocks.measure(alive)


class Pace:
    """Estimates how many seconds an answer may take: as long as the longest so far."""

    def __init__(self, book: Book) -> None:
        self.book = book
        self._first: dict[str, float] = {}

    def learn(self, blocks: Blocks, specs: Sequence[MethodSpec], clock: Callable[[], float]) -> None:
        """Time one whole answer of each configuration, which is used for nothing else."""
        for spec in specs:
            before = clock()
            blocks.rehearse(spec)
            self._first[spec.label] = clock() - before

    def answers(self, labels: Sequence[str]) -> float:
        """Return the seconds of one answer of each of these.

        One that never answered is taken to be as slow as the slowest.
        """
        slowest = max(self._first.values(), default=0.0)
        return sum(max(self.book.longest(x), self._first.get(x, 0.0)) or slowest for x in labels)

    def confirmation(self, labels: Sequence[str]) -> float:
        """Return the seconds of the shortest confirmation of these."""
        return LEAST * self.answers(labels)

    def least(self, reference: MethodSpec, default: MethodSpec) -> float:
        """Return the seconds of the shortest session: a challenger's race up to the first cut, and its confirmation."""
        race = self.answers([default.label, ""] * CUTS[0])
        return race + self.confirmation([reference.label, default.label, ""])


def halves(categories: Sequence[str], seed: int) -> tuple[list[int], list[int]]:
    """Deal the prompts out into those to search on and those to confirm on, each in a shuffled order.

    The first half has at most one prompt more. The prompts of a category go to the halves in turn, so both halves have
    every category that has two prompts; a category with a single prompt falls to either half.
    """
    rng = random.Random(f"tune:{seed}")
    by_category: dict[str, list[int]] = {}
    for prompt, category in enumerate(categories):
        by_category.setdefault(category, []).append(prompt)
    groups = list(by_category.values())
    rng.shuffle(groups)
    for group in groups:
        rng.shuffle(group)
    dealt = [prompt for group in groups for prompt in group]
    parts = dealt[::2], dealt[1::2]
    for part in parts:
        rng.shuffle(part)
    return parts


def _tell_of_single_prompts(categories: Sequence[str], watch: Watch) -> None:
    counts = Counter(categories)
    single = sum(n == 1 for n in counts.values())
    if single:
        watch.on_warning(
            f"{single} of {len(counts)} categories have only one prompt, which is used either to choose or to "
            "confirm: give more prompts of each, so that the choice holds for all"
        )
