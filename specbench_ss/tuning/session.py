"""Tuning session: search on half of the prompts, comparison with the default on the rest, preset.

The winner of many noisy comparisons looks better than it is; only other prompts give its speedup without bias. So only
a confirmed configuration is chosen, and the search leaves time for the confirmation.
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
from specbench_ss.errors import UserError, plugin_code
from specbench_ss.options import REFERENCE, MethodSpec, value_text
from specbench_ss.results.text import format_speedup, interval
from specbench_ss.runs.manifest import now, plain
from specbench_ss.runs.output_match import is_wrong, judge
from specbench_ss.runs.records import SampleRecord
from specbench_ss.stats.intervals import FEWEST
from specbench_ss.suite import SuiteData
from specbench_ss.tuning.search import CUTS, Bench, BlockedRuns, Comparison, Cost, Measurements, Search, Watch

WARM_TOKENS = 32
SLOW_LOAD_S = 0.05  # loading a variant takes longer only with its own weights


class DecoderBench:
    """A `Bench` that decodes greedily.

    default: the user's configuration; its given options are never changed. prompts: token ids of each.

    Decoders are created on first use. If that loads weights, only one decoder is kept in addition to the default's, and
    it is loaded and warmed up again when needed.
    """

    def __init__(
        self, default: MethodSpec, loaded: Decoder, reference: Decoder, prompts: Sequence[list[int]], limits: StopParams
    ) -> None:
        self.default, self.prompts, self.limits = default, prompts, limits
        self._loaded = loaded
        self._kept = {default.label: loaded, REFERENCE: reference}
        self._by_identity = {_identity(loaded): default}  # resolved settings -> the first configuration with them
        self._slow_load = False
        self._expected: dict[int, list[int]] = {}  # output of the baseline by prompt

    def options(self, at: MethodSpec) -> list[str]:
        """Return the method's tunable options, except those that the user gave."""
        return [name for name in self._space(at) if name not in self.default.options]

    def around(self, at: MethodSpec, option: str) -> list[MethodSpec]:
        """Return the configurations with another value of the option.

        Without values that the method rejects here, or that lead to the same settings as `at`.
        """
        options = {name: value for name, value in at.options.items() if name != option}
        specs: dict[str, MethodSpec] = {}
        for value in self._space(at).get(option, ()):
            spec = self._first_equal(MethodSpec(at.name, {**options, option: value_text(value)}))
            if spec is not None and spec.label != at.label:
                specs[spec.label] = spec
        return list(specs.values())

    def _space(self, at: MethodSpec) -> dict[str, list[Any]]:
        with plugin_code(f"method {at.name!r}: search_space"):
            return {str(name): list(values) for name, values in self.decoder(at).search_space().items()}

    def warm_up(self, spec: MethodSpec, prompt: int) -> None:
        """Answer a prompt briefly, without measuring."""
        self._answer(spec, prompt, replace(self.limits, max_new_tokens=min(WARM_TOKENS, self.limits.max_new_tokens)))

    def measure(self, spec: MethodSpec, prompt: int) -> Cost:
        """Answer a prompt in full and return its cost, once no CUDA graph is captured meanwhile."""
        if spec.label not in self._kept:
            self.warm_up(spec, prompt)
        for _ in n_attempts(self.decoder(spec).target, self.decoder(spec).stateful):
            cost = self._answer(spec, prompt, self.limits)
        return cost

    def keep(self, labels: Collection[str]) -> None:
        """Free the decoders of all other configurations, except the default's and the baseline's."""
        wanted = {*labels, self.default.label, REFERENCE}
        self._kept = {label: decoder for label, decoder in self._kept.items() if label in wanted}

    def decoder(self, spec: MethodSpec) -> Decoder:
        """Return the decoder of a configuration. Raises UserError if the method rejects it."""
        if spec.label not in self._kept:
            if self._slow_load:
                self.keep(())
            self._kept[spec.label] = self._load(spec)
        return self._kept[spec.label]

    def _load(self, spec: MethodSpec) -> Decoder:
        started = time.perf_counter()
        decoder = self._loaded.with_options(registry.method_options(spec))
        reloads = type(self._loaded).with_options is Decoder.with_options
        self._slow_load |= reloads and time.perf_counter() - started > SLOW_LOAD_S
        return decoder

    def _answer(self, spec: MethodSpec, prompt: int, limits: StopParams) -> Cost:
        decoder = self.decoder(spec)
        with gc_disabled():
            generation = generate(decoder, self.prompts[prompt], limits, SamplingParams())
        if limits is self.limits and decoder.lossless and decoder.baseline_for(decoder.options).name == REFERENCE:
            self._compare(spec, prompt, generation.tokens)
        return Cost(generation.wall_s, len(generation.tokens))

    def _compare(self, spec: MethodSpec, prompt: int, tokens: list[int]) -> None:
        """Raise ValueError for an output that is not the baseline's, which decodes each prompt once more for this."""
        if spec.label == REFERENCE:
            self._expected[prompt] = tokens
        elif prompt not in self._expected:
            self._answer(MethodSpec(REFERENCE), prompt, self.limits)
        tokens_of = {REFERENCE: self._expected[prompt], spec.label: tokens}
        rows = [SampleRecord("", 0, x, 0, "", 0, 0, 0, "", "", "ok", token_ids=ids) for x, ids in tokens_of.items()]
        match = judge(self._kept[REFERENCE], self.prompts[prompt], rows[0], rows[-1])
        if is_wrong(match.verdict, served=False):
            raise ValueError(f"{match.verdict} with {REFERENCE}'s output at token {match.first_difference}")

    def _first_equal(self, spec: MethodSpec) -> MethodSpec | None:
        try:
            return self._by_identity.setdefault(_identity(self._kept.get(spec.label) or self._load(spec)), spec)
        except UserError:
            return None


def _identity(decoder: Decoder) -> str:
    return json.dumps(decoder.metadata(), sort_keys=True, default=str)


SEARCH_SHARE = 0.6  # of the budget; the rest is for the confirmation
MAX_PASSES = 3  # of the confirmation over its prompts
MIN_CONFIRMATION = FEWEST + 1  # prompts with reserved time: enough for an interval, and the warm-up

Outcome = Literal["faster", "not significant", "slower", "not confirmed", "nothing better"]


@dataclass(slots=True)
class TuneResult:
    """Result of a session.

    finalist: configuration that was compared with the default, or the default. leader: of the search. search,
    confirmation: all samples; only the confirmation has the baseline's. failed: {label: reason}. interrupted: ended by
    Ctrl-C; earlier samples count. seconds: time of the session. to_confirm: estimated seconds of the shortest
    confirmation. untried: {option: number of undecided values; 0: unknown}.
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
        """Compare the finalist with the default on the confirmation's prompts."""
        return self.confirmation.compare(self.finalist.label, self.default.label)

    @property
    def entrants(self) -> list[str]:
        """Return the labels in the confirmation: baseline, default and finalist."""
        order = dict.fromkeys((REFERENCE, self.default.label, self.finalist.label))
        return [label for label in order if label in self.confirmation.labels()]

    @property
    def outcome(self) -> Outcome:
        """Return the comparison of the finalist with the default; `not confirmed` if it only led the search."""
        verdict = self.over_default.verdict
        if self.finalist.label in (self.default.label, *self.failed):
            return "nothing better"
        if verdict in ("faster", "slower", "not significant"):
            return verdict
        return "not confirmed" if self.leader.label != self.default.label else "nothing better"

    @property
    def chosen(self) -> MethodSpec:
        """Return the finalist if the confirmation shows it to be faster, else the default."""
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
    """Spend `budget` seconds on the bench's prompts of these categories. Ctrl-C ends the session early.

    Raises UserError if nothing can be tuned, if there are too few prompts, if the default fails, or if the budget is
    too short to try anything else.
    """
    if len(categories) < 2 * FEWEST:
        raise UserError(f"tuning needs at least {2 * FEWEST} prompts that fit the model, there are {len(categories)}")
    if not bench.options(default):
        raise UserError(f"nothing to tune: {default.label} has no tunable option left")
    reference, started = MethodSpec(REFERENCE), clock()
    needed = {default.label, reference.label}
    racing, confirming = (BlockedRuns(bench, half, needed, seed, watch) for half in halves(categories, seed))
    result = TuneResult(default, default, default, racing.book, confirming.book, racing.failed)
    estimate = TimeEstimate(racing.book)
    budgets = list[float]()  # sufficient budgets for untried configurations

    def room(labels: Sequence[str]) -> bool:
        """Return True if these requests leave time to confirm the leader."""
        # a later leader is no slower than the current one
        result.to_confirm = estimate.confirmation([*needed, search.best.label])
        needs = clock() - started + estimate.answers(labels) + result.to_confirm
        if needs > budget:
            budgets.append(needs)
        return needs <= budget

    search = Search(racing, default, started + SEARCH_SHARE * budget, clock, room)
    _warn_single_prompts(categories, watch)
    try:
        racing.warm_up([reference, default] * 2)
        estimate.learn(racing, [reference, default], clock)
        ready = clock() - started
        search.run()
        if not racing.book.labels() and (budgets or clock() >= search.ends):
            least = max(ready / SEARCH_SHARE, ready + estimate.least(reference, default), min(budgets, default=0))
            raise UserError(
                f"--budget {budget:g} is too short for a race and its confirmation; use at least {math.ceil(least)}"
            )
        result.finalist, result.leader = search.finalist(), search.best
        _confirm(confirming, {s.label: s for s in (reference, default, result.finalist)}, started + budget, clock)
    except KeyboardInterrupt:
        result.interrupted = True
        result.finalist, result.leader = search.finalist(), search.best
    result.failed |= confirming.failed
    result.untried = search.untried
    result.seconds = clock() - started
    return result


def _confirm(blocks: BlockedRuns, entrants: dict[str, MethodSpec], ends: float, clock: Callable[[], float]) -> None:
    blocks.bench.keep(entrants)
    blocks.watch.on_race("confirmation", list(entrants))
    alive = blocks.warm_up(list(entrants.values()))
    for _ in range(MAX_PASSES * len(blocks.prompts)):
        if clock() >= ends:
            return
        alive = blocks.measure(alive)


class TimeEstimate:
    """Estimate of the seconds of a request: those of the longest so far."""

    def __init__(self, book: Measurements) -> None:
        self.book = book
        self._first: dict[str, float] = {}

    def learn(self, blocks: BlockedRuns, specs: Sequence[MethodSpec], clock: Callable[[], float]) -> None:
        """Time one full request of each configuration, without recording it."""
        for spec in specs:
            before = clock()
            blocks.rehearse(spec)
            self._first[spec.label] = clock() - before

    def answers(self, labels: Sequence[str]) -> float:
        """Return the seconds of one request of each; one without a sample counts as the slowest."""
        slowest = max(self._first.values(), default=0.0)
        return sum(max(self.book.longest(x), self._first.get(x, 0.0)) or slowest for x in labels)

    def confirmation(self, labels: Sequence[str]) -> float:
        """Return the seconds of the shortest confirmation of these."""
        return MIN_CONFIRMATION * self.answers(labels)

    def least(self, reference: MethodSpec, default: MethodSpec) -> float:
        """Return the seconds of the shortest session: a challenger's race up to the first cut, and its confirmation."""
        race = self.answers([default.label, ""] * CUTS[0])
        return race + self.confirmation([reference.label, default.label, ""])


def halves(categories: Sequence[str], seed: int) -> tuple[list[int], list[int]]:
    """Split the prompts into those to search and those to confirm on, each in a shuffled order.

    The first half has at most one prompt more. The prompts of a category alternate between the halves, so that both
    have every category with two prompts; a single prompt is in either half.
    """
    rng = random.Random(f"tune:{seed}")
    by_category: dict[str, list[int]] = {}
    for prompt, category in enumerate(categories):
        by_category.setdefault(category, []).append(prompt)
    groups = list(by_category.values())
    rng.shuffle(groups)
    for group in groups:
        rng.shuffle(group)
    shuffled = [prompt for group in groups for prompt in group]
    parts = shuffled[::2], shuffled[1::2]
    for part in parts:
        rng.shuffle(part)
    return parts


def _warn_single_prompts(categories: Sequence[str], watch: Watch) -> None:
    counts = Counter(categories)
    single = sum(n == 1 for n in counts.values())
    if single:
        watch.on_warning(
            f"{single} of {len(counts)} tasks have only one prompt, for either the search or the confirmation; "
            "add prompts to each"
        )


def sentence(tuned: TuneResult) -> str:
    """Return a sentence on the result: the speedup over the default, and the untried options."""
    if not tuned.untried:
        return _outcome_text(tuned)
    options = ", ".join(
        f"{name} ({n} {'value' if n == 1 else 'values'})" if n else name for name, n in tuned.untried.items()
    )
    return f"{_outcome_text(tuned)}; undecided for lack of time: {options}; use a longer --budget"


def _outcome_text(tuned: TuneResult) -> str:
    """Return the comparison with the default on the confirmation's prompts as text."""
    over, finalist = tuned.over_default, tuned.finalist.label
    measured = f"{format_speedup(over.speedup)}, interval {interval(over.interval)}, {over.prompts} prompts"
    if tuned.outcome == "faster":
        return f"{finalist} is faster than the default ({measured})"
    if tuned.outcome == "not confirmed":
        progress = f"{over.prompts} of at least {FEWEST}"
        hint = f"use a --budget that leaves {tuned.to_confirm:.0f} s more for that"
        kept = f"the default is kept: {finalist} led the search, but was not confirmed on other prompts"
        return f"{kept} ({progress}); {hint}"
    if tuned.outcome in ("slower", "not significant"):
        return f"the default is best within noise (over {finalist}, the best other one: {measured})"
    if not tuned.search.labels():
        return "the default is kept: nothing else was tried"
    return "the default is best within noise: no other configuration was faster on enough prompts"


def content(tuned: TuneResult, resolved: dict[str, Any], made_for: dict[str, Any], data: SuiteData, **how: Any) -> Any:
    """Return the preset of the chosen configuration, for `preset.write_preset`.

    resolved: the settings of its options. made_for: conditions from `preflight.conditions`. data: the calibration
    questions. how: further facts about the measurement.
    """
    options = {name: int(x) if x.lstrip("-").isdecimal() else x for name, x in tuned.chosen.options.items()}
    preset = {
        "method": tuned.chosen.name,
        "options": options,  # integers without quotes
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
            "suite": data.name,
            "edition": data.edition,
            "content_hash": data.content_hash,
            "notes": list(data.notes),
            "prompts": [question.mark for question in data.questions],
        },
    }
    return plain(preset)


def _confirmation(tuned: TuneResult) -> list[dict[str, Any]]:
    """Return baseline, default and finalist as measured on the second half of the prompts."""
    book, rows = tuned.confirmation, []
    for label in tuned.entrants:
        of_ar = book.compare(label, REFERENCE)
        counts = {"prompts": of_ar.prompts, "tokens_per_s": _rounded(of_ar.tokens_per_s)}
        of_default = _speedup(book.compare(label, tuned.default.label), "over_default")
        rows.append({"configuration": label, **counts, **_speedup(of_ar, "over_ar"), **of_default})
    return rows


def _search(tuned: TuneResult) -> list[dict[str, Any]]:
    """Return all configurations of the first half, compared with the default on the same prompts."""
    book, rows = tuned.search, list[dict[str, Any]]()
    for label in book.labels():
        comparison = book.compare(label, tuned.default.label)
        rows.append({"configuration": label, "prompts": comparison.prompts, **_speedup(comparison, "over_default")})
    return rows + [{"configuration": label, "failed": why} for label, why in tuned.failed.items()]


def _speedup(comparison: Comparison, name: str) -> dict[str, Any]:
    bounds = comparison.interval and [round(bound, 4) for bound in comparison.interval]
    return {name: _rounded(comparison.speedup), f"{name}_interval": bounds}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
