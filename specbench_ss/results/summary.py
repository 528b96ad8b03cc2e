"""Summary of a run: speedups, mean acceptance lengths, times and counts of each method.

A prompt is one turn of one question; its repeats are averaged. Only prompts that both the method and the reference
answered count, and n is their number. Intervals resample questions.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Annotated as Col
from typing import Any, Protocol

import numpy as np

from specbench_ss.results import sample_checks
from specbench_ss.results.quality import (
    MARGIN,
    Bias,
    NonInferiority,
    SamplingTest,
    bias_found,
    mean_score,
    non_inferiority,
    sampling_tests,
    unsuited_control,
)
from specbench_ss.results.sample_checks import invalid_reasons, lower_bound, passed_seconds
from specbench_ss.runs.columns import Ends
from specbench_ss.runs.records import DTYPES, Array, Run, SampleRecord, Steps
from specbench_ss.runs.run_dir import uncompared, without_verdict
from specbench_ss.stats import FEWEST, Comparison, Floats, Interval, compare, ratio_interval, speedup_interval

QUANTILES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}


def latencies(rows: Sequence[SampleRecord]) -> dict[str, Any]:
    """Return ttft_s_p50 to latency_s_p99 of good samples, in seconds; None where no sample has such a time.

    Time per output token is that of the steps over the tokens that they produced; the first token is prefill's.
    """
    times = {
        "ttft": [row.prefill_s for row in rows if row.prefill_s is not None],
        "tpot": [row.decode_s / row.later for row in rows if row.decode_s is not None and row.later > 0],
        "latency": [row.wall_s for row in rows if row.wall_s is not None],
    }
    return {
        f"{name}_s_{quantile}": float(np.quantile(of, share)) if of else None
        for name, of in times.items()
        for quantile, share in QUANTILES.items()
    }


PARTS = ("draft_s", "verify_s", "accept_s", "host_s")


@dataclass(frozen=True, slots=True)
class Tally:
    """Sums over the steps of some samples.

    samples, steps: how many there are. sums: of each column, by name. reached: [depths, accepted + 1], how many steps
    drafted so deep and accepted so many. tau_of: tokens per step of each sample that has steps.
    """

    samples: int
    steps: int
    sums: dict[str, Any]
    reached: Array
    tau_of: Array
    num_draft_forwards: int
    tokens_past_stop: int

    @property
    def tau(self) -> float | None:
        """Return all tokens that steps produced over all steps."""
        return self._per_step("tokens")

    @property
    def step_s(self) -> float | None:
        """Return the mean seconds of a step."""
        return self._per_step("total_s")

    def columns(self) -> dict[str, Any]:
        """Return the part of a SummaryRow that is computed from the steps alone."""
        step_s, parts = self.step_s, {name: self._per_step(name) for name in PARTS}
        return {
            "tau_request_mean": float(self.tau_of.mean()) if len(self.tau_of) else None,
            "acceptance_rate": safe_div(self.sums["accepted_tokens"], self.sums["draft_depth"]),
            **self.acceptance(),
            "num_target_forwards": safe_div(self.steps, self.samples),
            "num_draft_forwards": safe_div(self.num_draft_forwards, self.samples),
            "tokens_past_stop": self.tokens_past_stop,
            "step_s": step_s,
            **parts,
            "parts_residual_s": None if step_s is None else step_s - sum(v or 0.0 for v in parts.values()),
        }

    def acceptance(self) -> dict[str, tuple[Any, ...]]:
        """Return the acceptance by draft position, as far as any draft reached."""
        positions = range(1, len(self.reached))
        drafted = [int(self.reached[p:].sum()) for p in positions]
        taken = [int(self.reached[p:, p:].sum()) for p in positions]
        before = [int(self.reached[p:, p - 1 :].sum()) for p in positions]  # accepted as far as the position before
        return {
            "acceptance_rate_per_pos": tuple(a / n for a, n in zip(taken, drafted, strict=True)),
            "acceptance_rate_per_pos_n": tuple(drafted),
            "conditional_acceptance_rate": tuple(a / n for a, n in zip(taken, before, strict=True) if n),
            "conditional_acceptance_rate_n": tuple(n for n in before if n),
        }

    def _per_step(self, name: str) -> float | None:
        return safe_div(self.sums[name], self.steps)


def tally(rows: Sequence[SampleRecord], steps: Steps) -> Tally:
    """Return the tally of these samples."""
    places = steps.places(row.key for row in rows)
    counts, totals = steps.counts[places], steps.totals.take(places)
    return Tally(
        samples=len(rows),
        steps=int(counts.sum()),
        sums={name: getattr(totals, name).sum().item() for name in DTYPES},
        reached=_reached(steps, places),
        tau_of=totals.tokens / counts,
        num_draft_forwards=sum(row.num_draft_forwards or 0 for row in rows),
        tokens_past_stop=sum(row.tokens_past_stop or 0 for row in rows),
    )


def _reached(steps: Steps, places: Array) -> Array:
    """Return how many steps drafted each depth and accepted each number: [depths + 1, accepted + 1]."""
    which = steps.steps_of(places)
    depth, accepted = steps.columns.draft_depth[which], steps.columns.accepted_tokens[which]
    if not len(which):
        return np.zeros((1, 1), np.int64)
    wide = int(accepted.max()) + 1
    counted = np.bincount(depth.astype(np.int64) * wide + accepted, minlength=(int(depth.max()) + 1) * wide)
    return counted.reshape(-1, wide)


def paired(own: Sequence[SampleRecord], ref: Sequence[SampleRecord]) -> tuple[list[SampleRecord], list[SampleRecord]]:
    """Return the samples of both that succeeded on both sides, in the same order."""

    def good(rows: Sequence[SampleRecord]) -> dict[tuple[str, int, int], SampleRecord]:
        return {r.prompt: r for r in rows if r.ok and r.tokens and (r.wall_s or 0) > 0}

    mine, theirs = good(own), good(ref)
    both = [key for key in mine if key in theirs]
    return [mine[key] for key in both], [theirs[key] for key in both]


class PairedTimes:
    """Paired times and tokens. own_s, own_tokens, ref_s, ref_tokens: [prompts], means over repeats."""

    def __init__(self, own: Sequence[SampleRecord], ref: Sequence[SampleRecord]) -> None:
        prompts = list(dict.fromkeys((r.question_id, r.turn) for r in own))
        self.questions = list(dict.fromkeys(q for q, _ in prompts))
        number = {q: i for i, q in enumerate(self.questions)}
        self._question = np.array([number[q] for q, _ in prompts], dtype=np.int64)
        place = {p: i for i, p in enumerate(prompts)}
        self._at = at = np.array([place[r.question_id, r.turn] for r in own], dtype=np.int64)  # [samples], its prompt
        self._wall_s = np.array([r.wall_s for r in own], dtype=np.float64)
        self.own_s, self.own_tokens = _means(own, at, "wall_s"), _means(own, at, "tokens")
        self.ref_s, self.ref_tokens = _means(ref, at, "wall_s"), _means(ref, at, "tokens")

    def by_question(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Return each question's sums: reference seconds and tokens, own seconds and tokens, [questions] each."""
        columns = (self.ref_s, self.ref_tokens, self.own_s, self.own_tokens)
        a, b, c, d = (_grouped(self._question, x, len(self.questions)) for x in columns)
        return a, b, c, d

    def speedup(self) -> float | None:
        """Return seconds per token, the reference's over the method's, each a ratio of sums."""
        a, b, c, d = (float(x.sum()) for x in self.by_question())
        return a / b / (c / d) if b and c and d else None

    def interval(self) -> Interval | None:
        """Return the 95% interval of `speedup`."""
        return speedup_interval(*self.by_question())

    def faster_than(self, other_s: Floats) -> Interval | None:
        """Return the 95% interval of other seconds over the method's own. other_s: [samples], as `own` was given.

        Where the estimate lies below 1, so does the lower end, and the interval is that one number.
        """
        other = _grouped(self._question[self._at], other_s, len(self.questions))
        own = _grouped(self._question[self._at], self._wall_s, len(self.questions))
        if len(own) < FEWEST:
            return None
        estimate = float(other.sum() / own.sum())
        return (estimate, estimate) if estimate <= 1 else ratio_interval((other,), (own,), processes=1)

    def geomean(self) -> float | None:
        """Return the geometric mean over prompts of the ratio of seconds per token."""
        if not len(self.own_s):
            return None
        return float(np.exp(np.log(self.ref_s / self.ref_tokens * self.own_tokens / self.own_s).mean()))

    def specbench(self) -> float | None:
        """Return Spec-Bench's speedup: the mean over questions of tokens per second, over the reference's mean."""
        a, b, c, d = self.by_question()
        return float((d / c).mean() / (b / a).mean()) if len(a) else None


def _means(rows: Sequence[SampleRecord], at: Any, name: str) -> Floats:
    values = np.array([getattr(r, name) for r in rows], dtype=np.float64)
    return _grouped(at, values) / np.bincount(at)


def _grouped(at: Any, values: Floats, groups: int = 0) -> Floats:
    """Return the sums of the values that have the same number in `at`."""
    return np.bincount(at, values, groups).astype(np.float64)


def total(rows: Sequence[SampleRecord], name: str) -> float:
    """Return the sum of a field of the rows."""
    return float(sum(getattr(r, name) for r in rows))


def safe_div(a: float | None, b: float | None) -> float | None:
    """Return a / b; None where one of them is missing, or b is 0."""
    return None if a is None or not b else a / b


class Counted(Protocol):
    """Record with a server's counts: a sample or a concurrency level."""

    steps: int | None
    drafts: int | None
    draft_nodes: int | None
    accepted_tokens: int | None


def served_columns(rows: Sequence[SampleRecord]) -> dict[str, Any]:
    """Return what replaces the counts of steps in a summary of samples that a server made; nothing for others."""
    if not any(row.counted for row in rows):
        return {}
    return {
        "mean_acceptance_length": safe_div(sum(row.later for row in rows), counted(rows, "steps")),
        "engine_acceptance_length": engine_tau(rows),
        "acceptance_rate": safe_div(counted(rows, "accepted_tokens"), counted(rows, "draft_nodes")),
        **served_positions(rows),
        "num_target_forwards": safe_div(counted(rows, "steps"), len(rows)),
        **dict.fromkeys(("num_draft_forwards", "tokens_past_stop")),
    }


def counted(of: Sequence[Counted], name: str) -> int | None:
    """Return the sum of a count; None where one of them was not measured."""
    values = [getattr(one, name) for one in of]
    return None if not values or None in values else sum(values)


def engine_tau(of: Sequence[Counted]) -> float | None:
    """Return 1 + accepted / drafts, as vLLM logs it: tokens per step that had a draft, before outputs are cut."""
    drafts, accepted = counted(of, "drafts"), counted(of, "accepted_tokens")
    return None if accepted is None or not drafts else 1 + accepted / drafts


def served_positions(rows: Sequence[SampleRecord]) -> dict[str, tuple[Any, ...]]:
    """Return the acceptance by draft position, of servers that report it.

    A server that reports no draft lengths is taken to have drafted every position each time.
    """
    taken, offered = list[int](), list[int]()
    for row in rows:
        if not row.accepted_per_pos:
            continue
        lengths = row.drafted_per_pos or [row.drafts or 0] * len(row.accepted_per_pos)
        taken = [sum(pair) for pair in zip_longest(taken, row.accepted_per_pos, fillvalue=0)]
        offered = [sum(pair) for pair in zip_longest(offered, lengths, fillvalue=0)]
    if not offered or any(row.drafts and not row.accepted_per_pos for row in rows):
        return {}
    return {
        "acceptance_rate_per_pos": tuple(a / n for a, n in zip_longest(taken, offered, fillvalue=0) if n),
        "acceptance_rate_per_pos_n": tuple(n for n in offered if n),
    }


OVERALL = "overall"
Number = float | None  # None: there is nothing to compute from
Whole = int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryRow:
    """One method on one category (or `overall`). None: there is nothing to compute from.

    speedup = mean_acceptance_length * step_ratio * other_factor. acceptance_rate_per_pos[i] and
    conditional_acceptance_rate[i] belong to draft position i + 1; the
    _n are their denominators. bias and what begins with it: as in `SamplingTest`, whatever the category.
    """

    category: Col[str, "task of the suite; `overall` is all of them together"]
    method: Col[str, "label of the method: its name, with the options that were given for it"]
    lossless: Col[bool, "whether the method promises the output of its reference"]
    n_prompts: Col[int, "turns that both the method and `ar` answered: what all numbers of the row are of", "prompts"]
    n_questions: Col[int, "questions that these turns belong to: what intervals resample", "questions"]
    n_failed: Col[int, "the method's own samples that failed", "samples"]
    speedup: Col[Number, "time per token of `ar` over that of the method, same prompts; missing where invalid", "×"]
    speedup_interval: Col[Interval | None, Ends("speedup", "×")]
    speedup_geomean: Col[Number, "the same ratio taken prompt by prompt, its geometric mean", "×"]
    speedup_specbench: Col[Number, "Spec-Bench's formula: mean tokens per second over questions, method over `ar`", "×"]
    comparison: Col[
        Comparison, "`faster`, `slower`, `not significant`, `insufficient data` (questions), `invalid` or `reference`"
    ]
    reference: Col[str, "label of the method that the output is compared with"]
    reference_speedup: Col[Number, "speedup over that method, where it is not `ar`", "×"]
    reference_interval: Col[Interval | None, Ends("reference_speedup", "×")]
    reference_of: Col[tuple[str, ...], "labels of the methods compared with this one, if it is not `ar`; a tuple"]
    tokens_per_s: Col[Number, "all tokens over all seconds, prefill included", "tokens/s"]
    tokens: Col[Number, "mean length of an answer", "tokens"]
    prefill_s: Col[Number, "mean time to read a prompt, up to the first token", "s"]
    mean_acceptance_length: Col[Number, "tokens per step, pooled over all steps; 1 for `ar`", "tokens"]
    tau_request_mean: Col[Number, "tokens per step of each sample, their mean", "tokens"]
    acceptance_rate: Col[Number, "accepted drafted tokens over drafted ones, where a tree counts its depth", "0 to 1"]
    acceptance_rate_per_pos: Col[
        tuple[float, ...], "for each draft position, share of the steps that drafted it and accepted it", "0 to 1"
    ]
    acceptance_rate_per_pos_n: Col[tuple[int, ...], "for each draft position, the steps that drafted it", "steps"]
    conditional_acceptance_rate: Col[
        tuple[float, ...], "for each draft position, the share accepted once the one before it was", "0 to 1"
    ]
    conditional_acceptance_rate_n: Col[
        tuple[int, ...], "for each draft position, the steps that had accepted the one before it", "steps"
    ]
    num_target_forwards: Col[Number, "mean steps of a sample", "steps"]
    num_draft_forwards: Col[Number, "mean forward passes of a draft model in a sample", "passes"]
    tokens_past_stop: Col[Whole, "accepted tokens beyond the end of an answer, in all", "tokens"]
    quality: Col[Number, "the suite's score, a mean over questions", "0 to 1"]
    quality_n: Col[int, "questions that have a score on both sides", "questions"]
    quality_difference: Col[Number, "mean paired difference of quality to `ar`"]
    quality_interval: Col[Interval | None, Ends("quality_difference")]
    quality_verdict: Col[
        NonInferiority | None, "of a method that changes the model: `non-inferior`, `inferior` or `not shown`"
    ]
    quality_margin: Col[Number, "how much lower than `ar` its quality may be to be called non-inferior"]
    judge_score: Col[Number, "rating over ten by the judge who judged last, a mean over questions", "0 to 1"]
    judge_score_n: Col[int, "questions that have a rating on both sides", "questions"]
    judge_score_difference: Col[Number, "mean paired difference of the rating to `ar`"]
    judge_score_interval: Col[Interval | None, Ends("judge_score_difference")]
    judge: Col[str, "that judge, its host, prompts and most tokens; empty where there is none"]
    step_s: Col[Number, "mean time of a step: the sum of the next five", "s"]
    draft_s: Col[Number, "of it, making the draft", "s"]
    verify_s: Col[Number, "of it, the model's pass over the draft", "s"]
    accept_s: Col[Number, "of it, choosing the accepted path and compacting the cache", "s"]
    host_s: Col[Number, "of it, the rest, on the host", "s"]
    parts_residual_s: Col[Number, "of it, by what it differs from the four parts; 0 but where clocks differ", "s"]
    step_ratio: Col[Number, "mean time of a step of `ar` over that of the method", "×"]
    other_factor: Col[Number, "speedup / (tau × step_ratio): prefill, the first token, answers of other lengths", "×"]
    ttft_s_p50: Col[Number, "time to the first token: median over samples", "s"]
    ttft_s_p95: Col[Number, "time to the first token: 95th percentile over samples", "s"]
    ttft_s_p99: Col[Number, "time to the first token: 99th percentile over samples", "s"]
    tpot_s_p50: Col[Number, "time per output token after the first: median over samples", "s"]
    tpot_s_p95: Col[Number, "time per output token after the first: 95th percentile over samples", "s"]
    tpot_s_p99: Col[Number, "time per output token after the first: 99th percentile over samples", "s"]
    latency_s_p50: Col[Number, "time of a whole request: median over samples", "s"]
    latency_s_p95: Col[Number, "time of a whole request: 95th percentile over samples", "s"]
    latency_s_p99: Col[Number, "time of a whole request: 99th percentile over samples", "s"]
    peak_memory_bytes: Col[Whole, "peak of the additional CUDA memory of a sample; missing with CUDA graphs", "bytes"]
    output_match: Mapping[str, int]
    bias: Col[
        Bias | None, "of sampled tokens, over all tasks: `biased`, `no bias found`, `too few tokens`, `not testable`"
    ] = None
    bias_tokens: Col[Whole, "sampled tokens that were compared, over all tasks", "tokens"] = None
    bias_p: Col[Number, "bound on the probability of such tokens without bias; `biased` below 1e-6", "0 to 1"] = None
    bias_surplus: Col[Number, "their mean log-likelihood minus its expectation; 0 without bias", "nats"] = None
    bias_outside: Col[Whole, "of them, tokens that top-p or top-k exclude, beyond rounding", "tokens"] = None
    bias_offered: Col[Whole, "of them, tokens for which something was drafted", "tokens"] = None
    bias_accepted: Col[Whole, "of these, tokens that were drafted", "tokens"] = None
    bias_expected: Col[Number, "as many as should have been, by the model's distribution", "tokens"] = None
    bias_tail: Col[Whole, "of a server: tokens that are not among the most probable ones it reported", "tokens"] = None
    bias_tail_expected: Col[Number, "as many as there may be at most", "tokens"] = None
    bias_reason: Col[str | None, "why they are not testable; empty where they are"] = None
    speedup_within_bound: Col[
        bool | None, "whether it is no faster than its steps allow, as it must be; missing where not checked"
    ]
    unstable: Col[bool | None, "whether times of the same work spread by more than a tenth; missing where not checked"]
    engine_acceptance_length: Col[
        Number, "of a server, as vLLM logs it: 1 + accepted tokens / drafts, of the steps that had a draft", "tokens"
    ] = None
    health: Col[tuple[str, ...], "problems of the numbers, a tuple of sentences; empty if there are none"]
    baseline: Col[str, "label of the run's reference, which `speedup` is over: `ar`, or the first endpoint"]

    @property
    def step_cost(self) -> float | None:
        """Return the method's step time over the reference's: 1 over `step_ratio`."""
        return 1 / self.step_ratio if self.step_ratio else None

    @property
    def decode_speedup(self) -> float | None:
        """Return the speedup of the steps alone, prefill left out; None if the row is invalid."""
        if self.comparison == "invalid" or self.mean_acceptance_length is None or self.step_ratio is None:
            return None
        return self.mean_acceptance_length * self.step_ratio

    def as_dict(self) -> dict[str, Any]:
        """Return the row as JSON-ready data."""
        return asdict(self)


def summarise(run: Run, quality_margin: float = MARGIN) -> list[SummaryRow]:
    """Return a row for every method on `overall`, then on each category, in the order in which they were asked for.

    quality_margin: how much lower the quality of a method that changes the model may be to be called non-inferior.
    """
    without, tests = uncompared(run), sampling_tests(run)
    invalid = {label: [*invalid_reasons(run, label), *bias_found(run, label, tests.get(label))] for label in run.labels}
    verdicts, found = _verdicts(run), []
    for category in (OVERALL, *run.categories):
        rows = [row for row in run.rows if category in (OVERALL, row.category)]
        for label in run.labels:
            here = _Compared(run, label, rows, verdicts[label, category])
            found.append(_summary(here, category, quality_margin, without, invalid[label], tests.get(label)))
    return found


def failing(summaries: Sequence[SummaryRow]) -> set[str]:
    """Return the methods of which more samples failed than of the reference: others are judged without them."""
    rows = [row for row in summaries if row.category == OVERALL]
    of_reference = next((row.n_failed for row in rows if row.comparison == "reference"), 0)
    return {row.method for row in rows if row.n_failed > of_reference}


def _verdicts(run: Run) -> Mapping[tuple[str, str], Counter[str]]:
    """Return how many answers had which verdict, by method and category. Those without were not compared."""
    category_of = {row.key: row.category for row in run.rows}
    verdicts = [(one.method, category_of[one.key], one.verdict) for one in run.output_match if one.key in category_of]
    verdicts += [(row.method, row.category, "not compared") for row in without_verdict(run)]
    counted: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for method, category, verdict in verdicts:
        for where in {OVERALL, category}:
            counted[method, where][verdict] += 1
    return counted


def _summary(
    here: _Compared,
    category: str,
    margin: float,
    without: Sequence[SampleRecord],
    invalid: Sequence[str],
    test: SamplingTest | None,
) -> SummaryRow:
    run, label, own = here.run, here.label, here.own
    others = (other for other in run.labels if run.entry(other).get("reference") == label)  # compared with this one
    disbelieved = here.invalidating_checks(invalid)
    spread = sample_checks.spread(own, label == run.baseline)
    return SummaryRow(
        category=category,
        method=label,
        lossless=bool(here.method["lossless"]),
        n_prompts=len(here.times.own_s),
        n_questions=len(here.times.questions),
        n_failed=sum(not r.ok for r in here.all_own),
        **here.speedups(invalid=bool(disbelieved) and label != run.baseline),
        reference=here.same_as,
        reference_of=() if label == run.baseline else tuple(other for other in others if other != label),
        tokens_per_s=safe_div(total(own, "tokens"), total(own, "wall_s")),
        tokens=safe_div(total(own, "tokens"), len(own)),
        prefill_s=safe_div(total(own, "prefill_s"), len(own)),
        **here.steps(),
        **here.quality(margin),
        judge=run.judge,
        **latencies(own),
        peak_memory_bytes=max((r.peak_memory_bytes for r in own if r.peak_memory_bytes is not None), default=None),
        output_match=dict(here.verdicts),
        speedup_within_bound=sample_checks.speedup_within_bound(here.excess),
        unstable=sample_checks.unstable(spread),
        health=(
            *disbelieved,
            *sample_checks.findings(run, here.all_own, here.verdicts, without, spread),
            *unsuited_control(run, label, test),
        ),
        baseline=run.baseline,
        **(test.columns() if test else {}),
    )


class _Compared:
    """A method and the reference on some of the run's samples. own, ref: those that are paired.

    verdicts: how many of its answers compared how with those of the method whose output they must equal.
    """

    def __init__(self, run: Run, label: str, rows: Sequence[SampleRecord], verdicts: Counter[str]) -> None:
        self.run, self.label, self.method, self.verdicts = run, label, run.entry(label), verdicts
        self.same_as, self.itself = run.reference(label), label == run.baseline
        self.all_own = [r for r in rows if r.method == label]
        self.own, self.ref = self._paired(rows, run.baseline)
        self.times = PairedTimes(self.own, self.ref)
        self.against = PairedTimes(*self._paired(rows, self.same_as)) if self.same_as != run.baseline else None
        self.mine, self.theirs = tally(self.own, run.steps), tally(self.ref, run.steps)
        self.interval = self.excess = self.passed = None
        if not self.itself:
            self.interval = self.times.interval()
            self.excess = self._faster_than(lower_bound(self.own, self.ref, run.steps) if self.mine.tau else None)
            self.passed = self._faster_than(passed_seconds(self.own, self.ref))

    def _paired(self, rows: Sequence[SampleRecord], other: str) -> tuple[list[SampleRecord], list[SampleRecord]]:
        return paired(self.all_own, [r for r in rows if r.method == other])

    def _faster_than(self, seconds: Floats | None) -> Interval | None:
        return None if seconds is None else self.times.faster_than(seconds)

    def invalidating_checks(self, invalid: Sequence[str]) -> tuple[str, ...]:
        """Return the findings that make a speedup invalid. invalid: those of the whole run."""
        impossible = sample_checks.impossible(self.own, self.run.steps)
        too_fast = sample_checks.too_fast(self.excess, self.mine.tau)
        return (*impossible, *invalid, *sample_checks.outside_clock(self.passed), *too_fast)

    def speedups(self, invalid: bool) -> dict[str, Any]:
        """Return the speedups with intervals and comparison; nothing if the numbers are invalid."""
        times, against = (None, None) if invalid else (self.times, self.against)
        return {
            "speedup": times and times.speedup(),
            "speedup_interval": None if invalid else self.interval,
            "speedup_geomean": times and times.geomean(),
            "speedup_specbench": times and times.specbench(),
            "comparison": "reference" if self.itself else "invalid" if invalid else compare(self.interval),
            "reference_speedup": against and against.speedup(),
            "reference_interval": against and against.interval(),
        }

    def steps(self) -> dict[str, Any]:
        """Return the paired step metrics."""
        tau, step_ratio = self.mine.tau, safe_div(self.theirs.step_s, self.mine.step_s)
        explained = None if tau is None or step_ratio is None else tau * step_ratio
        residual = safe_div(self.times.speedup(), explained)
        columns = {
            "mean_acceptance_length": tau,
            **self.mine.columns(),
            "step_ratio": step_ratio,
            "other_factor": residual,
        }
        return columns | served_columns(self.own)

    def quality(self, margin: float) -> dict[str, Any]:
        """Return scores and ratings and, of a method that may change the answers, whether it is non-inferior."""
        both = (self.own, self.ref)
        changes = not self.itself and (self.same_as != self.run.baseline or not self.method["lossless"])
        given = {r.key: r.quality for rows in both for r in rows}
        scores = mean_score(*both, self.itself, "quality", given, changes)
        compared = bool(changes and scores["quality_n"])
        return {
            **scores,
            **mean_score(*both, self.itself, "judge_score", self.run.judged_scores, changes),
            "quality_verdict": non_inferiority(scores["quality_interval"], margin) if compared else None,
            "quality_margin": margin if compared else None,
        }
