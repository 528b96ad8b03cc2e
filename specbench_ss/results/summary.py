"""Summary of a run: speedups, mean acceptance lengths, times and counts of each method.

A prompt is one turn of one question; its repeats are averaged. Only prompts count that have an output of both the
method and the baseline. The units of intervals are questions, within tasks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import repeat, zip_longest
from typing import Annotated as Col
from typing import Any

import numpy as np

from specbench_ss.results import outliers, sample_checks
from specbench_ss.results.findings import Finding
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
from specbench_ss.results.text import format_speedup
from specbench_ss.runs.columns import Ends
from specbench_ss.runs.output_match import wrong_methods
from specbench_ss.runs.records import DTYPES, Array, Counted, Run, SampleRecord, Steps, counted
from specbench_ss.runs.run_dir import uncompared, without_verdict
from specbench_ss.stats.intervals import Comparison, Floats, Interval, compare
from specbench_ss.stats.pairs import Pairs, mean_acceptance_length, tau_of

QUANTILES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}


def latencies(rows: Sequence[SampleRecord]) -> dict[str, Any]:
    """Return ttft_s_p50 to latency_s_p99 of good samples, in seconds; None if no sample has such a time.

    Time per output token is the time of the steps / their tokens; the first token comes from prefill.
    """
    times = {
        "ttft": [row.prefill_s for row in rows if row.prefill_s is not None],
        "tpot": [time for row in rows if (time := row.tpot_s) is not None],
        "latency": [row.wall_s for row in rows if row.wall_s is not None],
    }
    shares = [*QUANTILES.values()]
    return {
        f"{name}_s_{quantile}": value
        for name, of in times.items()
        for quantile, value in zip(QUANTILES, np.quantile(of, shares).tolist() if of else repeat(None), strict=False)
    }


PARTS = ("draft_s", "verify_s", "accept_s", "host_s")


@dataclass(frozen=True, slots=True)
class Tally:
    """Sums over the steps of some samples.

    samples, steps: their numbers. sums: of each column, by name. reached: [depths, accepted + 1], number of steps by
    draft depth and accepted tokens. tau_of: tokens per step of each sample that has steps.
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
        """Return the mean acceptance length: tokens of steps / steps."""
        return mean_acceptance_length(self.sums["tokens"], self.steps)

    @property
    def step_s(self) -> float | None:
        """Return the mean seconds of a step."""
        return self._per_step("total_s")

    def columns(self) -> dict[str, Any]:
        """Return the part of a SummaryRow that is computed from the steps alone."""
        step_s, parts = self.step_s, {name: self._per_step(name) for name in PARTS}
        return {
            "request_mean_acceptance_length": float(self.tau_of.mean()) if len(self.tau_of) else None,
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
        """Return the acceptance by draft position, up to the longest draft."""
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
    """Return the number of steps by draft depth and accepted tokens: [depths + 1, accepted + 1]."""
    which = steps.steps_of(places)
    depth, accepted = steps.columns.draft_depth[which], steps.columns.accepted_tokens[which]
    if not len(which):
        return np.zeros((1, 1), np.int64)
    wide = int(accepted.max()) + 1
    counted = np.bincount(depth.astype(np.int64) * wide + accepted, minlength=(int(depth.max()) + 1) * wide)
    return counted.reshape(-1, wide)


def total(rows: Sequence[SampleRecord], name: str) -> float:
    """Return the sum of a field of the rows."""
    return float(sum(getattr(r, name) for r in rows))


def safe_div(a: float | None, b: float | None) -> float | None:
    """Return a / b; None where one of them is missing, or b is 0."""
    return None if a is None or not b else a / b


def served_columns(rows: Sequence[SampleRecord]) -> dict[str, Any]:
    """Return the columns of a server's samples that replace counts of steps; empty for other samples."""
    if not any(row.counted for row in rows):
        return {}
    return {
        "mean_acceptance_length": tau_of(rows),
        "engine_acceptance_length": engine_tau(rows),
        "acceptance_rate": safe_div(counted(rows, "accepted_tokens"), counted(rows, "draft_nodes")),
        **served_positions(rows),
        "num_target_forwards": safe_div(counted(rows, "steps"), len(rows)),
        **dict.fromkeys(("num_draft_forwards", "tokens_past_stop")),
    }


def implied_step_time(
    run: Run, own: Sequence[SampleRecord], other: Sequence[SampleRecord], tau: float | None
) -> float | None:
    """Return the mean step time relative to the baseline's, from τ: τ / the speedup of the tokens after the first.

    own, other: paired samples of a method and the baseline. tau: of the method. None if one of them is not known, and
    if the baseline drafts, since its time per token is then not that of a step.
    """
    timed = [pair for pair in zip(own, other, strict=True) if all(row.tpot_s is not None for row in pair)]
    if tau is None or not timed or any(row.accepted_tokens for row in run.of(run.baseline)):
        return None
    pace, of_baseline = (total(rows, "decode_s") / total(rows, "later") for rows in zip(*timed, strict=True))
    return safe_div(tau * pace, of_baseline)


def engine_tau(of: Sequence[Counted]) -> float | None:
    """Return 1 + accepted / drafts, as vLLM logs it: tokens per step that had a draft, before outputs are cut."""
    drafts, accepted = counted(of, "drafts"), counted(of, "accepted_tokens")
    return None if accepted is None or not drafts else 1 + accepted / drafts


def served_positions(rows: Sequence[SampleRecord]) -> dict[str, tuple[Any, ...]]:
    """Return the acceptance by draft position, of servers that report it.

    A server that reports no draft lengths is taken to have drafted every position each time.
    """
    if any(row.draft_nodes != 0 and (row.drafts is None or row.accepted_per_pos is None) for row in rows):
        return {}
    deepest = max((len(row.drafted_per_pos or row.accepted_per_pos or ()) for row in rows), default=0)
    taken, offered = [0] * deepest, [0] * deepest
    for row in rows:
        lengths = [row.drafts or 0] * deepest if row.drafted_per_pos is None else row.drafted_per_pos
        taken = [sum(pair) for pair in zip_longest(taken, row.accepted_per_pos or (), fillvalue=0)]
        offered = [sum(pair) for pair in zip_longest(offered, lengths, fillvalue=0)]
    return {
        "acceptance_rate_per_pos": tuple(a / n for a, n in zip(taken, offered, strict=True) if n),
        "acceptance_rate_per_pos_n": tuple(n for n in offered if n),
    }


OVERALL = "overall"
Number = float | None  # None: there is nothing to compute from
Whole = int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryRow:
    """One method on one task (or `overall`). None: there is nothing to compute from.

    speedup = mean_acceptance_length / relative_step_time * other_factor. acceptance_rate_per_pos[i] and
    conditional_acceptance_rate[i] belong to draft position i + 1; the columns that end in _n are their denominators.
    The columns of `SamplingTest` begin with `bias` and hold for all tasks together.
    """

    task: Col[str, "task of the suite; `overall`: all tasks together"]
    method: Col[str, "label of the method: its name with the given options"]
    lossless: Col[bool, "true if the output must equal the baseline's"]
    n_prompts: Col[
        int,
        "prompts with an output of both the method and `ar`; all numbers of the row are computed from them",
        "prompts",
    ]
    n_questions: Col[int, "questions of these prompts, the units of the intervals", "questions"]
    n_failed: Col[int, "failed samples of the method", "samples"]
    speedup: Col[Number, "time per token of `ar` / of the method, on the same prompts; missing if invalid", "×"]
    speedup_interval: Col[Interval | None, Ends("speedup", "×")]
    speedup_geomean: Col[Number, "geometric mean over prompts of the ratio of times per token", "×"]
    speedup_specbench: Col[
        Number, "Spec-Bench's formula: mean over questions of the method's tokens/s / the same mean of `ar`", "×"
    ]
    comparison: Col[Comparison, "`faster`, `slower`, `not significant`, `insufficient data`, `invalid` or `baseline`"]
    reference: Col[str, "label of the lossless reference: `ar`, or the AR baseline of the method's own model"]
    reference_speedup: Col[Number, "speedup over that baseline, if it is not `ar`", "×"]
    reference_interval: Col[Interval | None, Ends("reference_speedup", "×")]
    reference_of: Col[tuple[str, ...], "labels of the methods whose own AR baseline this method is; a tuple"]
    tokens_per_s: Col[Number, "all tokens / all seconds, prefill included", "tokens/s"]
    tokens: Col[Number, "mean output length", "tokens"]
    prefill_s: Col[Number, "mean prefill time, up to the first token", "s"]
    mean_acceptance_length: Col[Number, "τ: tokens of steps / steps, pooled over all samples; 1 for `ar`", "tokens"]
    request_mean_acceptance_length: Col[Number, "mean over samples of each sample's τ", "tokens"]
    acceptance_rate: Col[Number, "accepted tokens / draft depth, pooled over all steps", "0 to 1"]
    acceptance_rate_per_pos: Col[
        tuple[float, ...], "by draft position: share accepted among the steps that drafted it; a tuple", "0 to 1"
    ]
    acceptance_rate_per_pos_n: Col[tuple[int, ...], "by draft position: steps that drafted it; a tuple", "steps"]
    conditional_acceptance_rate: Col[
        tuple[float, ...],
        "by draft position: share accepted among the steps that drafted it and accepted the position before; a tuple",
        "0 to 1",
    ]
    conditional_acceptance_rate_n: Col[
        tuple[int, ...], "by draft position: steps that drafted it and accepted the position before; a tuple", "steps"
    ]
    num_target_forwards: Col[Number, "mean steps per sample", "steps"]
    num_draft_forwards: Col[Number, "mean forward passes of the draft model per sample", "passes"]
    tokens_past_stop: Col[Whole, "accepted tokens after the end of an output, sum over samples", "tokens"]
    quality: Col[Number, "mean over questions of the score by the task's metric", "0 to 1"]
    quality_n: Col[int, "questions with a score of both the method and `ar`", "questions"]
    quality_difference: Col[Number, "mean paired difference of quality: method - `ar`"]
    quality_interval: Col[Interval | None, Ends("quality_difference")]
    quality_verdict: Col[
        NonInferiority | None, "methods that change the model: `non-inferior`, `inferior` or `not shown`"
    ]
    quality_margin: Col[Number, "largest loss of quality against `ar` that counts as non-inferior"]
    judge_score: Col[Number, "mean over questions of the latest judge's rating, divided by ten", "0 to 1"]
    judge_score_n: Col[int, "questions with a rating of both the method and `ar`", "questions"]
    judge_score_difference: Col[Number, "mean paired difference of the rating: method - `ar`"]
    judge_score_interval: Col[Interval | None, Ends("judge_score_difference")]
    judge: Col[str, "that judge with host, prompts and token limit; empty without a judge"]
    step_s: Col[Number, "mean step time: sum of the next five columns", "s"]
    draft_s: Col[Number, "mean time per step of drafting", "s"]
    verify_s: Col[Number, "mean time per step of the target model's forward pass", "s"]
    accept_s: Col[Number, "mean time per step of acceptance and compaction of the KV cache", "s"]
    host_s: Col[Number, "mean time per step of the rest, on the host", "s"]
    parts_residual_s: Col[Number, "step_s minus the four parts; 0 unless the clocks of host and device differ", "s"]
    relative_step_time: Col[
        Number,
        "mean step time of the method / mean step time of `ar`; missing if invalid; of a server implied by its τ: "
        "τ / speedup of the tokens after the first, missing if the first server drafts",
        "×",
    ]
    other_factor: Col[
        Number, "speedup / decode_speedup: effect of prefill, of the first token and of unequal output lengths", "×"
    ]
    ttft_s_p50: Col[Number, "time to the first token: median over samples", "s"]
    ttft_s_p95: Col[Number, "time to the first token: 95th percentile over samples", "s"]
    ttft_s_p99: Col[Number, "time to the first token: 99th percentile over samples", "s"]
    tpot_s_p50: Col[Number, "time per output token after the first: median over samples", "s"]
    tpot_s_p95: Col[Number, "time per output token after the first: 95th percentile over samples", "s"]
    tpot_s_p99: Col[Number, "time per output token after the first: 99th percentile over samples", "s"]
    latency_s_p50: Col[Number, "time of a whole request: median over samples", "s"]
    latency_s_p95: Col[Number, "time of a whole request: 95th percentile over samples", "s"]
    latency_s_p99: Col[Number, "time of a whole request: 99th percentile over samples", "s"]
    peak_memory_bytes: Col[
        Whole, "highest peak CUDA memory beyond that before the sample; missing with CUDA graphs", "bytes"
    ]
    output_match: Mapping[str, int]
    bias: Col[
        Bias | None,
        "test of sampled tokens over all tasks: `biased`, `no bias found`, `too few tokens`, `not testable`",
    ] = None
    bias_tokens: Col[Whole, "tested tokens, over all tasks", "tokens"] = None
    bias_p: Col[Number, "upper bound of the test's p-value; `biased` below 1e-6", "0 to 1"] = None
    bias_surplus: Col[
        Number, "mean log-likelihood of the tested tokens minus its expectation; near 0 without bias", "nats"
    ] = None
    bias_outside: Col[Whole, "tested tokens that top-p or top-k exclude, beyond rounding", "tokens"] = None
    bias_offered: Col[Whole, "tested tokens at positions with a draft", "tokens"] = None
    bias_accepted: Col[Whole, "accepted drafted tokens among them", "tokens"] = None
    bias_expected: Col[
        Number, "expected number of accepted drafted tokens under the target's distribution", "tokens"
    ] = None
    bias_tail: Col[Whole, "servers: tested tokens outside the most probable ones that the server sent", "tokens"] = None
    bias_tail_expected: Col[Number, "upper bound of their expected number", "tokens"] = None
    bias_reason: Col[str | None, "reason of `not testable`; else empty"] = None
    speedup_within_bound: Col[
        bool | None, "false if the outputs took less time than their steps allow; missing if not checked"
    ]
    unstable: Col[bool | None, "true if times of the same work differ by more than 10 %; missing if not checked"]
    engine_acceptance_length: Col[
        Number, "servers: 1 + accepted tokens / drafts over steps with a draft, as vLLM logs it", "tokens"
    ] = None
    health: Col[
        tuple[Finding, ...], "findings about the method's numbers, a tuple of sentences; empty without findings"
    ]
    baseline: Col[str, "label of the baseline of `speedup`: `ar`, or the first endpoint"]

    @property
    def decode_speedup(self) -> float | None:
        """Return the speedup of the steps alone, prefill left out; None if the row is invalid."""
        return safe_div(self.mean_acceptance_length, self.relative_step_time)

    def as_dict(self) -> dict[str, Any]:
        """Return the row as JSON-ready data."""
        return asdict(self) | {"health": tuple(map(str, self.health))}


def summarise(run: Run, quality_margin: float = MARGIN) -> list[SummaryRow]:
    """Return a row for every method on `overall`, then on each task, in the order of the run.

    quality_margin: largest loss of quality that counts as non-inferior.
    """
    without, tests = uncompared(run), sampling_tests(run)
    invalid = {label: [*invalid_reasons(run, label), *bias_found(run, label, tests.get(label))] for label in run.labels}
    verdicts, wrong, found = _verdicts(run), wrong_methods(run.output_match, run.manifest), []
    for task in (OVERALL, *run.categories):
        rows = [row for row in run.rows if task in (OVERALL, row.category)]
        for label in run.labels:
            here = _Compared(run, label, rows, verdicts[label, task])
            why = (invalid[label], label in wrong)
            found.append(_summary(here, task, quality_margin, without, why, tests.get(label)))
    return _with_outliers(run, found)


SHOWN = 3  # methods whose speedups without an outlier of the baseline are in its finding


def _with_outliers(run: Run, summaries: list[SummaryRow]) -> list[SummaryRow]:
    """Return the rows with findings on outliers, and with the speedups that valid methods have without them."""
    found, made = outliers.outliers(run).values(), []
    for summary in summaries:
        own = [one for one in found if one.row.method == summary.method]
        own = [one for one in own if summary.task in (OVERALL, one.row.category)]
        if own:
            named = {one.row.key for one in own}
            rows = [row for row in run.rows if summary.task in (OVERALL, row.category) and row.key not in named]
            same_task = [row for row in summaries if row.task == summary.task and row.comparison != "baseline"]
            concerned = same_task if summary.comparison == "baseline" else [summary]
            valid = sorted((row for row in concerned if row.speedup), key=lambda row: -(row.speedup or 0.0))
            without = [(row.method, _speedup_of(rows, row.method, run.baseline)) for row in valid[:SHOWN]]
            shown = ", ".join(f"{label} {format_speedup(speedup)}" for label, speedup in without if speedup)
            samples = sum(row.ok for row in run.of(summary.method) if summary.task in (OVERALL, row.category))
            finding = outliers.outlier_finding(own, samples, shown.removeprefix(f"{summary.method} "))
            summary = replace(summary, health=(*summary.health, finding))
        made.append(summary)
    return made


def _speedup_of(rows: Sequence[SampleRecord], label: str, baseline: str) -> float | None:
    both = ([row for row in rows if row.method == one] for one in (label, baseline))
    return Pairs(*both).speedup()


def failing(summaries: Sequence[SummaryRow]) -> set[str]:
    """Return the methods with more failed samples than the baseline; the ranking leaves them out."""
    rows = [row for row in summaries if row.task == OVERALL]
    of_baseline = next((row.n_failed for row in rows if row.comparison == "baseline"), 0)
    return {row.method for row in rows if row.n_failed > of_baseline}


def _verdicts(run: Run) -> Mapping[tuple[str, str], Counter[str]]:
    """Return the counts of the output match by method and task; outputs without a verdict are `not compared`."""
    task_of = {row.key: row.category for row in run.rows}
    verdicts = [(one.method, task_of[one.key], one.verdict) for one in run.output_match if one.key in task_of]
    verdicts += [(row.method, row.category, "not compared") for row in without_verdict(run)]
    counted: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for method, task, verdict in verdicts:
        for name in {OVERALL, task}:
            counted[method, name][verdict] += 1
    return counted


def _summary(
    here: _Compared,
    task: str,
    margin: float,
    without: Sequence[SampleRecord],
    invalid: tuple[Sequence[Finding], bool],
    test: SamplingTest | None,
) -> SummaryRow:
    """Return the row. invalid: findings of the whole run that make it invalid, and whether an output is wrong."""
    run, label, rows = here.run, here.label, here.samples
    compared = (other for other in run.labels if run.entry(other).get("reference") == label)
    invalidating = here.invalidating_checks(invalid[0])
    is_invalid = bool(invalidating or invalid[1]) and label != run.baseline
    spread = sample_checks.spread(rows, label == run.baseline)
    return SummaryRow(
        task=task,
        method=label,
        lossless=bool(here.method["lossless"]),
        n_prompts=here.times.n_prompts,
        n_questions=len(here.times.questions),
        n_failed=sum(not r.ok for r in here.every_sample),
        **here.speedups(is_invalid),
        reference=here.reference,
        reference_of=() if label == run.baseline else tuple(other for other in compared if other != label),
        tokens_per_s=safe_div(total(rows, "tokens"), total(rows, "wall_s")),
        tokens=safe_div(total(rows, "tokens"), len(rows)),
        prefill_s=safe_div(total(rows, "prefill_s"), len(rows)),
        **here.steps(is_invalid),
        **here.quality(margin),
        judge=run.judge,
        **latencies(rows),
        peak_memory_bytes=max((r.peak_memory_bytes for r in rows if r.peak_memory_bytes is not None), default=None),
        output_match=dict(here.verdicts),
        speedup_within_bound=sample_checks.speedup_within_bound(here.excess),
        unstable=sample_checks.unstable(spread),
        health=(
            *invalidating,
            *sample_checks.findings(run, here.every_sample, here.verdicts, without, spread),
            *unsuited_control(run, label, test),
            *sample_checks.short_steps(here.short, run.baseline),
        ),
        baseline=run.baseline,
        **(test.columns() if test else {}),
    )


class _Compared:
    """A method and the baseline on some samples of the run.

    samples, baseline_samples: the paired ones. every_sample: of the method. reference: label of the baseline of the
    output match. verdicts: counts of the output match. excess, outside: intervals of the lower bound of time / measured
    time, and of the wall time / measured time. short: as excess, with steps as long as the baseline's.
    """

    def __init__(self, run: Run, label: str, rows: Sequence[SampleRecord], verdicts: Counter[str]) -> None:
        self.run, self.label, self.method, self.verdicts = run, label, run.entry(label), verdicts
        self.reference, self.itself = run.reference(label), label == run.baseline
        self.every_sample = [r for r in rows if r.method == label]
        self.times = self._pairs(rows, run.baseline)
        self.samples, self.baseline_samples = self.times.own, self.times.other
        self.against = self._pairs(rows, self.reference) if self.reference != run.baseline else None
        self.tally, self.baseline_tally = tally(self.samples, run.steps), tally(self.baseline_samples, run.steps)
        self.interval = self.excess = self.outside = self.short = None
        if not self.itself:
            self.interval = self.times.interval()
            self.excess = self._faster_than(
                lower_bound(self.samples, self.baseline_samples, run.steps) if self.tally.tau else None
            )
            if self.excess and self.reference == run.baseline and any(row.draft_nodes for row in self.samples):
                self.short = self._faster_than(lower_bound(self.samples, self.baseline_samples, run.steps, False))
            self.outside = self._faster_than(passed_seconds(self.samples, self.baseline_samples))

    def _pairs(self, rows: Sequence[SampleRecord], other: str) -> Pairs[SampleRecord]:
        return Pairs(self.every_sample, [row for row in rows if row.method == other], processes=self.run.processes)

    def _faster_than(self, seconds: Floats | None) -> Interval | None:
        return None if seconds is None else self.times.faster_than(seconds)

    def invalidating_checks(self, invalid: Sequence[Finding]) -> tuple[Finding, ...]:
        """Return the findings that make a speedup invalid. invalid: those of the whole run."""
        impossible = sample_checks.impossible(self.samples, self.run.steps)
        too_fast = sample_checks.too_fast(self.excess, self.tally.tau)
        return (*impossible, *invalid, *sample_checks.outside_clock(self.outside), *too_fast)

    def speedups(self, invalid: bool) -> dict[str, Any]:
        """Return the speedups with intervals and comparison; nothing if the numbers are invalid."""
        times, against = (None, None) if invalid else (self.times, self.against)
        return {
            "speedup": times and times.speedup(),
            "speedup_interval": None if invalid else self.interval,
            "speedup_geomean": times and times.geomean(),
            "speedup_specbench": times and times.specbench(),
            "comparison": "baseline" if self.itself else "invalid" if invalid else compare(self.interval),
            "reference_speedup": against and against.speedup(),
            "reference_interval": against and against.interval(),
        }

    def steps(self, invalid: bool) -> dict[str, Any]:
        """Return the paired step metrics; of invalid numbers nothing that gives a speedup."""
        columns: dict[str, Any] = {
            "mean_acceptance_length": self.tally.tau,
            **self.tally.columns(),
            **served_columns(self.samples),
        }
        tau, step_time = columns["mean_acceptance_length"], None
        if not invalid and self.run.served:
            step_time = implied_step_time(self.run, self.samples, self.baseline_samples, tau)
        elif not invalid:
            step_time = safe_div(self.tally.step_s, self.baseline_tally.step_s)
        other_factor = safe_div(self.times.speedup(), safe_div(tau, step_time))
        return columns | {"relative_step_time": step_time, "other_factor": other_factor}

    def quality(self, margin: float) -> dict[str, Any]:
        """Return scores and ratings and, of a method that may change the answers, whether it is non-inferior."""
        both = (self.samples, self.baseline_samples)
        changes = not self.itself and (self.reference != self.run.baseline or not self.method["lossless"])
        quality = {r.key: r.quality for rows in both for r in rows}
        scores = mean_score(*both, self.itself, "quality", quality, changes)
        compared = bool(changes and scores["quality_n"])
        return {
            **scores,
            **mean_score(*both, self.itself, "judge_score", self.run.judged_scores, changes),
            "quality_verdict": non_inferiority(scores["quality_interval"], margin) if compared else None,
            "quality_margin": margin if compared else None,
        }
