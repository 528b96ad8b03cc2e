"""One tuning session: search on one half of the prompts, then hold the winner against the default on the other half.

The winner of many noisy comparisons looks better than it is; only prompts that it was not chosen on say by how much.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from specbench_ss.config import REFERENCE, MethodSpec
from specbench_ss.errors import UserError
from specbench_ss.intervals import FEWEST
from specbench_ss.tuning.blocks import Bench, Blocks, Watch
from specbench_ss.tuning.book import Book, Comparison
from specbench_ss.tuning.search import Search

SEARCH_SHARE = 0.6  # of the budget; the rest confirms
PASSES = 3  # over the prompts of the confirmation, at most

Outcome = Literal["faster", "not distinguishable", "slower", "not confirmed", "nothing better"]


@dataclass(slots=True)
class Tuned:
    """What came of it.

    finalist: what was held against the default, which it may be itself. search, confirmation: all samples; only the
    latter has the reference. failed: label -> why. interrupted: by Ctrl-C; what was measured until then counts.
    """

    default: MethodSpec
    finalist: MethodSpec
    leader: MethodSpec
    search: Book
    confirmation: Book
    failed: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False
    seconds: float = 0.0

    @property
    def over_default(self) -> Comparison:
        """The finalist over the default, on prompts that it was not chosen on."""
        return self.confirmation.compare(self.finalist.label, self.default.label)

    @property
    def entrants(self) -> list[str]:
        """Labels in the confirmation: the reference, the default, the finalist."""
        order = dict.fromkeys((REFERENCE, self.default.label, self.finalist.label))
        return [label for label in order if label in self.confirmation.labels()]

    @property
    def outcome(self) -> Outcome:
        """How the finalist compares with the default; `not confirmed` where time did not reach for it."""
        verdict = self.over_default.verdict
        if self.finalist.label in (self.default.label, *self.failed):
            return "nothing better"
        if verdict in ("faster", "slower", "not distinguishable"):
            return verdict
        return "not confirmed" if self.leader.label != self.default.label else "nothing better"

    @property
    def chosen(self) -> MethodSpec:
        """The finalist where it is faster beyond noise, or led the search by as much and could not be confirmed."""
        return self.finalist if self.outcome in ("faster", "not confirmed") else self.default


def tune(
    bench: Bench,
    default: MethodSpec,
    prompts: int,
    budget: float,
    seed: int,
    watch: Watch,
    clock: Callable[[], float] = time.monotonic,
) -> Tuned:
    """Spend `budget` seconds on the bench's prompts (their number is given). Ctrl-C ends it early, with what there is.

    Raises UserError where nothing may be tuned, where there are too few prompts, or where the default fails.
    """
    if prompts < 2 * FEWEST:
        raise UserError(f"tuning needs at least {2 * FEWEST} prompts that fit the model, there are {prompts}")
    if not bench.options(default):
        raise UserError(f"nothing to tune: {default.label} has no option left whose value depends on the device")
    reference, started = MethodSpec(REFERENCE), clock()
    needed = {default.label, reference.label}
    halves = _halves(prompts, seed)
    racing, confirming = (Blocks(bench, half, needed, seed, watch) for half in halves)
    search = Search(racing, default, started + SEARCH_SHARE * budget, clock)
    done = Tuned(default, default, default, racing.book, confirming.book, racing.failed)
    try:
        racing.warm_up([reference, default] * 2)
        search.run()
        done.finalist, done.leader = search.finalist(), search.best
        _confirm(confirming, {s.label: s for s in (reference, default, done.finalist)}, started + budget, clock)
    except KeyboardInterrupt:
        done.interrupted = True
        done.finalist, done.leader = search.finalist(), search.best
    done.failed |= confirming.failed
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


def _halves(prompts: int, seed: int) -> tuple[list[int], list[int]]:
    """Every other prompt, so that both halves have the categories alike; each in a shuffled order."""
    rng = random.Random(f"tune:{seed}")
    halves = list(range(0, prompts, 2)), list(range(1, prompts, 2))
    for half in halves:
        rng.shuffle(half)
    return halves
