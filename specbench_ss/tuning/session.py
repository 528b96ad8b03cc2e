"""Tuning session: search on half of the prompts, comparison with the default on the rest, preset.

The winner of many noisy comparisons looks better than it is; only prompts that it was not chosen on show by how much.
So nothing is chosen that was not confirmed, and the search leaves time to confirm.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from specbench_ss import __version__, registry
from specbench_ss.bench.timed_sample import gc_disabled, n_attempts
from specbench_ss.engine.decoder import Decoder
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.errors import UserError
from specbench_ss.options import REFERENCE, MethodSpec, value_text
from specbench_ss.results.text import format_speedup, interval
from specbench_ss.runs.manifest import now, plain
from specbench_ss.stats import FEWEST
from specbench_ss.suite import SuiteData
from specbench_ss.tuning.search import CUTS, Bench, BlockedRuns, Comparison, Cost, Measurements, Search, Watch

WARM_TOKENS = 32
HEAVY_S = 0.05  # a variant that takes longer to load has weights of its own


class DecoderBench:
    """A `Bench` that decodes greedily.

    default: the configuration that the user gave; the options given there are never changed. prompts: token ids of
    each.

    Decoders are made when they are first measured. Where making one loads weights again, only one such decoder is kept
    besides the default's: it is loaded and warmed up again whenever its turn comes.
    """

    def __init__(
        self, default: MethodSpec, loaded: Decoder, reference: Decoder, prompts: Sequence[list[int]], limits: StopParams
    ) -> None:
        self.default, self.prompts, self.limits = default, prompts, limits
        self._loaded = loaded
        self._kept = {default.label: loaded, REFERENCE: reference}
        self._same = {_identity(loaded): default}  # what a configuration comes down to -> the first that did
        self._heavy = False

    def options(self, at: MethodSpec) -> list[str]:
        """Return the options that the method declares tunable, except those that the user has settled."""
        return [name for name in self.decoder(at).search_space() if name not in self.default.options]

    def around(self, at: MethodSpec, option: str) -> list[MethodSpec]:
        """Return the configurations with another value of the option.

        Values that the method cannot take here are left out, and so are those that lead to the same settings as `at`.
        """
        given = {name: value for name, value in at.options.items() if name != option}
        found: dict[str, MethodSpec] = {}
        for value in self.decoder(at).search_space().get(option, ()):
            spec = self._first_alike(MethodSpec(at.name, {**given, option: value_text(value)}))
            if spec is not None and spec.label != at.label:
                found[spec.label] = spec
        return list(found.values())

    def warm_up(self, spec: MethodSpec, prompt: int) -> None:
        """Answer a prompt shortly, without measuring."""
        self._answer(spec, prompt, replace(self.limits, max_new_tokens=min(WARM_TOKENS, self.limits.max_new_tokens)))

    def measure(self, spec: MethodSpec, prompt: int) -> Cost:
        """Answer a prompt in full and return what it cost, once no pass is recorded meanwhile, to be replayed later."""
        if spec.label not in self._kept:
            self.warm_up(spec, prompt)
        for _ in n_attempts(self.decoder(spec).target, self.decoder(spec).stateful):
            cost = self._answer(spec, prompt, self.limits)
        return cost

    def keep(self, labels: Collection[str]) -> None:
        """Forget the decoders of all other configurations, except the default's and the reference's."""
        wanted = {*labels, self.default.label, REFERENCE}
        self._kept = {label: decoder for label, decoder in self._kept.items() if label in wanted}

    def decoder(self, spec: MethodSpec) -> Decoder:
        """Return the decoder of a configuration. Raises UserError where the method cannot take it."""
        if spec.label not in self._kept:
            if self._heavy:
                self.keep(())
            self._kept[spec.label] = self._made(spec)
        return self._kept[spec.label]

    def _made(self, spec: MethodSpec) -> Decoder:
        started = time.perf_counter()
        made = self._loaded.with_options(registry.method_options(spec))
        reloads = type(self._loaded).with_options is Decoder.with_options
        self._heavy |= reloads and time.perf_counter() - started > HEAVY_S
        return made

    def _answer(self, spec: MethodSpec, prompt: int, limits: StopParams) -> Cost:
        decoder = self.decoder(spec)
        with gc_disabled():
            done = generate(decoder, self.prompts[prompt], limits, SamplingParams())
        return Cost(done.wall_s, len(done.tokens))

    def _first_alike(self, spec: MethodSpec) -> MethodSpec | None:
        try:
            return self._same.setdefault(_identity(self._kept.get(spec.label) or self._made(spec)), spec)
        except UserError:
            return None


def _identity(decoder: Decoder) -> str:
    return json.dumps(decoder.metadata(), sort_keys=True, default=str)


SEARCH_SHARE = 0.6  # of the budget; the rest confirms
PASSES = 3  # over the prompts of the confirmation, at most
LEAST = FEWEST + 1  # prompts that time is kept back for: as many as make an interval, and the warm-up

Outcome = Literal["faster", "not significant", "slower", "not confirmed", "nothing better"]


@dataclass(slots=True)
class TuneResult:
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
    search: Measurements
    confirmation: Measurements
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
        if verdict in ("faster", "slower", "not significant"):
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
) -> TuneResult:
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
    racing, confirming = (BlockedRuns(bench, half, needed, seed, watch) for half in halves(categories, seed))
    done = TuneResult(default, default, default, racing.book, confirming.book, racing.failed)
    pace = TimeEstimate(racing.book)
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


def _confirm(blocks: BlockedRuns, entrants: dict[str, MethodSpec], ends: float, clock: Callable[[], float]) -> None:
    blocks.bench.keep(entrants)
    blocks.watch.on_race("confirmation", list(entrants))
    alive = blocks.warm_up(list(entrants.values()))
    for _ in range(PASSES * len(blocks.prompts)):
        if clock() >= ends:
            return
        alive = blocks.measure(alive)


class TimeEstimate:
    """Estimates how many seconds an answer may take: as long as the longest so far."""

    def __init__(self, book: Measurements) -> None:
        self.book = book
        self._first: dict[str, float] = {}

    def learn(self, blocks: BlockedRuns, specs: Sequence[MethodSpec], clock: Callable[[], float]) -> None:
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


def sentence(tuned: TuneResult) -> str:
    """Say whether anything is better than the default, by how much, and what there was no time to try."""
    if not tuned.untried:
        return _found(tuned)
    options = ", ".join(
        f"{name} ({n} {'value' if n == 1 else 'values'})" if n else name for name, n in tuned.untried.items()
    )
    return f"{_found(tuned)}; not tried, or not on enough prompts, for lack of time: {options}: give a longer --budget"


def _found(tuned: TuneResult) -> str:
    """Compare with the default on prompts that were not used for choosing."""
    over, finalist = tuned.over_default, tuned.finalist.label
    measured = f"{format_speedup(over.speedup)}, interval {interval(over.interval)}, {over.prompts} prompts"
    if tuned.outcome == "faster":
        return f"{finalist} is faster than the default ({measured})"
    if tuned.outcome == "not confirmed":
        had = f"{over.prompts} of at least {FEWEST}"
        needs = f"tune again with a --budget that leaves {tuned.to_confirm:.0f} s more for that"
        return (
            f"the default is kept: {finalist} led the search, but was not confirmed on other prompts ({had}): {needs}"
        )
    if tuned.outcome in ("slower", "not significant"):
        return f"the default is best within noise ({finalist}, which looked best, over it: {measured})"
    if not tuned.search.labels():
        return "the default is kept: nothing else was tried"
    return "the default is best within noise: nothing that was tried looked better on enough prompts"


def content(tuned: TuneResult, resolved: dict[str, Any], made_for: dict[str, Any], asked: SuiteData, **how: Any) -> Any:
    """Return the preset of the chosen configuration, for `preset.write_preset`.

    resolved: the settings that its options lead to. made_for: the conditions from
    `preflight.conditions`. asked: the calibration questions. how: further facts about the measurement.
    """
    options = {name: int(x) if x.lstrip("-").isdecimal() else x for name, x in tuned.chosen.options.items()}
    found = {
        "method": tuned.chosen.name,
        "options": options,  # whole numbers without quotes
        "verdict": sentence(tuned),
        **({"candidate": tuned.finalist.label} if tuned.outcome == "not confirmed" else {}),
        "made_for": {**made_for, "specbench_ss": __version__, "date": now()},
        "resolved": resolved,
        "measured": {
            "seconds": round(tuned.seconds, 1),
            "interrupted": tuned.interrupted,
            "untried": tuned.untried,
            **how,
            "confirmation": _confirmation(tuned),
            "search": _search(tuned),
        },
        "calibration": {
            "suite": asked.name,
            "edition": asked.edition,
            "content_hash": asked.content_hash,
            "notes": list(asked.notes),
            "prompts": [question.mark for question in asked.questions],
        },
    }
    return plain(found)


def _confirmation(tuned: TuneResult) -> list[dict[str, Any]]:
    """Return the reference, the default and the finalist as measured on the second half of the prompts."""
    book, rows = tuned.confirmation, []
    for label in tuned.entrants:
        of_ar = book.compare(label, REFERENCE)
        counts = {"prompts": of_ar.prompts, "tokens_per_s": _short(of_ar.tokens_per_s)}
        of_default = _speedup(book.compare(label, tuned.default.label), "over_default")
        rows.append({"configuration": label, **counts, **_speedup(of_ar, "over_ar"), **of_default})
    return rows


def _search(tuned: TuneResult) -> list[dict[str, Any]]:
    """Return everything that was tried on the first half, compared with the default on the same prompts."""
    book, rows = tuned.search, list[dict[str, Any]]()
    for label in book.labels():
        found = book.compare(label, tuned.default.label)
        rows.append({"configuration": label, "prompts": found.prompts, **_speedup(found, "over_default")})
    return rows + [{"configuration": label, "failed": why} for label, why in tuned.failed.items()]


def _speedup(found: Comparison, name: str) -> dict[str, Any]:
    bounds = found.interval and [round(bound, 4) for bound in found.interval]
    return {name: _short(found.speedup), f"{name}_interval": bounds}


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
