"""From a run's rows to the numbers in the tables. docs/metrics.md has every definition. No method is known by name.

A prompt is one turn of one question; its repeats are averaged. Only prompts that both the method and the reference
answered count, and n says how many those are. Intervals resample questions.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specbench_ss.method_spec import REFERENCE
from specbench_ss.results import health
from specbench_ss.results.intervals import Comparison, Interval, compare
from specbench_ss.results.latency import latencies
from specbench_ss.results.least_time import least_seconds
from specbench_ss.results.outside_time import passed_seconds
from specbench_ss.results.paired_times import PairedTimes, over, paired, total
from specbench_ss.results.quality import MARGIN, NonInferiority, mean_score, non_inferiority
from specbench_ss.results.remembering import remembering
from specbench_ss.results.sampled_output import Bias, SamplingTest, bias_found, sampling_tests, unsuited_control
from specbench_ss.results.served_counts import served_columns
from specbench_ss.results.step_tally import tally
from specbench_ss.runs.losses import unjudged, without_verdict
from specbench_ss.runs.rows import Row, Run

OVERALL = "overall"


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """One method on one category (or `overall`).

    Times are in seconds; None means that there is nothing to compute from. Void results have no speedup.

    n_prompts, n_questions: how many are paired with the reference. n_failed: the method's own failed samples. step_s
    and the parts are means over steps: draft_s + verify_s + accept_s + host_s + parts_residual_s = step_s. speedup =
    tau * step_ratio * residual, where step_ratio is the reference's step time over the method's. reference: the method
    whose output it must equal. Where that is not the run's reference, since the method changes the model,
    reference_speedup and reference_interval compare with it. reference_of: the methods that are compared with this one,
    where it is not the run's reference. within_tau, unstable: None where not checked. acceptance_at[i] and
    acceptance_given[i] belong to draft position i + 1; the _n are their denominators. target_calls, draft_calls,
    tokens, prefill_s: means over samples. peak_memory_bytes: of the sample that took most. quality_verdict,
    quality_margin: only of methods that may change the answers. baseline: the run's reference, which speedup is over.
    bias and what begins with it: as in `SamplingTest`, of sampled tokens over all tasks, whatever the category.
    """

    category: str
    method: str
    lossless: bool
    n_prompts: int
    n_questions: int
    n_failed: int
    speedup: float | None
    speedup_interval: Interval | None
    speedup_geomean: float | None
    speedup_specbench: float | None
    comparison: Comparison
    reference: str
    reference_speedup: float | None
    reference_interval: Interval | None
    reference_of: tuple[str, ...]
    tokens_per_s: float | None
    tokens: float | None
    prefill_s: float | None
    tau: float | None
    tau_request_mean: float | None
    acceptance_rate: float | None
    acceptance_at: tuple[float, ...]
    acceptance_at_n: tuple[int, ...]
    acceptance_given: tuple[float, ...]
    acceptance_given_n: tuple[int, ...]
    target_calls: float | None
    draft_calls: float | None
    overshoot: int | None
    quality: float | None
    quality_n: int
    quality_difference: float | None
    quality_interval: Interval | None
    quality_verdict: NonInferiority | None
    quality_margin: float | None
    judged: float | None
    judged_n: int
    judged_difference: float | None
    judged_interval: Interval | None
    judge: str
    step_s: float | None
    draft_s: float | None
    verify_s: float | None
    accept_s: float | None
    host_s: float | None
    parts_residual_s: float | None
    step_ratio: float | None
    residual: float | None
    ttft_s_p50: float | None
    ttft_s_p95: float | None
    ttft_s_p99: float | None
    tpot_s_p50: float | None
    tpot_s_p95: float | None
    tpot_s_p99: float | None
    latency_s_p50: float | None
    latency_s_p95: float | None
    latency_s_p99: float | None
    peak_memory_bytes: int | None
    sameness: Mapping[str, int]
    within_tau: bool | None
    unstable: bool | None
    health: tuple[str, ...]
    baseline: str = REFERENCE
    bias: Bias | None = None
    bias_tokens: int | None = None
    bias_p: float | None = None
    bias_surplus: float | None = None
    bias_outside: int | None = None
    bias_offered: int | None = None
    bias_accepted: int | None = None
    bias_expected: float | None = None
    bias_reason: str | None = None

    @property
    def step_cost(self) -> float | None:
        """Return the method's step time over the reference's: 1 over `step_ratio`."""
        return 1 / self.step_ratio if self.step_ratio else None

    def as_dict(self) -> dict[str, Any]:
        """Return the row as JSON-ready data."""
        return asdict(self)


def summarise(run: Run, quality_margin: float = MARGIN) -> list[SummaryRow]:
    """Return a row for every method on `overall`, then on each category, in the order in which they were asked for.

    quality_margin: how much lower the quality of a method that changes the model may be to be called non-inferior.
    """
    chosen, without, tests = [OVERALL, *run.categories], unjudged(run), sampling_tests(run)
    void = {label: _void(run, label, tests) for label in run.labels}
    verdicts, found = _verdicts(run), []
    for category in chosen:
        rows = [row for row in run.rows if category in (OVERALL, row.category)]
        for label in run.labels:
            here = _Compared(run, label, rows, verdicts[label, category])
            found.append(_summary(here, category, quality_margin, without, void[label], tests.get(label)))
    return found


def failing(summaries: Sequence[SummaryRow]) -> set[str]:
    """Return the methods of which more samples failed than of the reference: others are judged without them."""
    rows = [row for row in summaries if row.category == OVERALL]
    of_reference = next((row.n_failed for row in rows if row.comparison == "reference"), 0)
    return {row.method for row in rows if row.n_failed > of_reference}


def _void(run: Run, label: str, tests: Mapping[str, SamplingTest]) -> list[str]:
    """Return the findings over all tasks for which a method's numbers must not be used."""
    wrong = health.wrong_reference(run, label)
    return [*health.changed_target(run), *wrong, *remembering(run, label), *bias_found(run, label, tests)]


def _verdicts(run: Run) -> Mapping[tuple[str, str], Counter[str]]:
    """Return how many answers had which verdict, by method and category. Those without were not compared."""
    category_of = {row.key: row.category for row in run.rows}
    counted: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for one in run.sameness:
        key = one.key
        for category in {OVERALL, category_of[key]} if key in category_of else ():
            counted[one.method, category][one.verdict] += 1
    for row in without_verdict(run):
        for category in (OVERALL, row.category):
            counted[row.method, category]["not compared"] += 1
    return counted


def disbelieved(run: Run, label: str) -> tuple[str, ...]:
    """Return the findings over all tasks for which a method has no speedup. The reference is never without."""
    row = _Compared(run, label, run.rows)
    return row.disbelieved(_void(run, label, sampling_tests(run))) if label != run.baseline else ()


def _summary(
    here: _Compared,
    category: str,
    margin: float,
    without: Sequence[Row],
    void: Sequence[str],
    test: SamplingTest | None,
) -> SummaryRow:
    run, label = here.run, here.label
    disbelieved = here.disbelieved(void)
    own, spread = here.own, health.spread(here.own, label == run.baseline)
    return SummaryRow(
        category=category,
        method=label,
        lossless=bool(here.method["lossless"]),
        n_prompts=len(here.times.own_s),
        n_questions=len(here.times.questions),
        n_failed=sum(not r.ok for r in here.all_own),
        **here.speedups(void=bool(disbelieved) and label != run.baseline),
        reference=here.same_as,
        reference_of=_held_against(run, label),
        tokens_per_s=over(total(own, "tokens"), total(own, "wall_s")),
        tokens=over(total(own, "tokens"), len(own)),
        prefill_s=over(total(own, "prefill_s"), len(own)),
        **here.steps(),
        **here.quality(margin),
        judge=run.judge,
        **latencies(own),
        peak_memory_bytes=max((r.peak_memory_bytes for r in own if r.peak_memory_bytes is not None), default=None),
        sameness=dict(here.verdicts),
        within_tau=health.within_tau(here.excess),
        unstable=health.unstable(spread),
        health=(
            *disbelieved,
            *health.failures(here.all_own),
            *here.differences(),
            *health.unjudged(here.all_own, without),
            *health.unsteady(spread),
            *unsuited_control(run, label, test),
        ),
        baseline=run.baseline,
        **(test.columns() if test else {}),
    )


class _Compared:
    """A method beside the reference on some of the run's samples. own, ref: those that are paired.

    verdicts: how many of its answers compared how with those of the method whose output they must equal.
    """

    def __init__(self, run: Run, label: str, rows: Sequence[Row], verdicts: Counter[str] | None = None) -> None:
        self.run, self.label, self.method = run, label, _method(run, label)
        self.verdicts = verdicts or Counter()
        self.same_as: str = self.method.get("reference", run.baseline)
        self.all_own = [r for r in rows if r.method == label]
        self.own, self.ref = self._paired(rows, run.baseline)
        self.times = PairedTimes(self.own, self.ref)
        self.against = PairedTimes(*self._paired(rows, self.same_as)) if self.same_as != run.baseline else None
        self.mine, self.theirs = tally(self.own, run.steps), tally(self.ref, run.steps)
        self.interval = None if label == run.baseline else self.times.interval()
        self.tau = self.mine.tau
        self.served = served_columns(self.own)
        least = least_seconds(self.own, self.ref, run.steps) if label != run.baseline and self.tau else None
        self.excess = None if least is None else self.times.faster_than(least)
        passed = passed_seconds(self.own, self.ref) if label != run.baseline else None
        self.passed = None if passed is None else self.times.faster_than(passed)

    def _paired(self, rows: Sequence[Row], other: str) -> tuple[list[Row], list[Row]]:
        return paired(self.all_own, [r for r in rows if r.method == other])

    def disbelieved(self, void: Sequence[str]) -> tuple[str, ...]:
        """Return the findings after which no speedup is told. void: what `remembering` found in the whole run."""
        impossible = health.impossible(self.own, self.run.steps)
        outside = health.outside_clock(self.passed)
        return (*impossible, *void, *outside, *health.too_fast(self.excess, self.tau))

    def speedups(self, void: bool) -> dict[str, Any]:
        """Return the speedups with their intervals and what they say; nothing where the numbers are void."""
        reference = self.label == self.run.baseline
        times, against = (None, None) if void else (self.times, self.against)
        return {
            "speedup": times and times.speedup(),
            "speedup_interval": None if void else self.interval,
            "speedup_geomean": times and times.geomean(),
            "speedup_specbench": times and times.specbench(),
            "comparison": "reference" if reference else "void" if void else compare(self.interval),
            "reference_speedup": against and against.speedup(),
            "reference_interval": against and against.interval(),
        }

    def steps(self) -> dict[str, Any]:
        """Return what is computed from the steps of both."""
        step_ratio, speedup = over(self.theirs.step_s, self.mine.step_s), self.times.speedup()
        explained = None if self.tau is None or step_ratio is None else self.tau * step_ratio
        residual = over(speedup, explained)
        return {"tau": self.tau, **self.mine.columns(), "step_ratio": step_ratio, "residual": residual} | self.served

    def quality(self, margin: float) -> dict[str, Any]:
        """Return scores and ratings and, of a method that may change the answers, whether it is non-inferior."""
        both, itself = (self.own, self.ref), self.label == self.run.baseline
        changes = not itself and (self.same_as != self.run.baseline or not self.method["lossless"])
        given = {r.key: r.quality for r in (*self.own, *self.ref)}
        scores = mean_score(*both, itself, "quality", given, changes)
        told = bool(changes and scores["quality_n"])
        return {
            **scores,
            **mean_score(*both, itself, "judged", self.run.judged_scores, changes),
            "quality_verdict": non_inferiority(scores["quality_interval"], margin) if told else None,
            "quality_margin": margin if told else None,
        }

    def differences(self) -> tuple[str, ...]:
        """Return what differs from the answers that must be equal."""
        named = f", {self.same_as}" if self.same_as != self.run.baseline else ""
        return tuple(
            f"{line}{named}" for line in health.differences(self.verdicts, self.run.manifest["model"]["dtype"])
        )


def _method(run: Run, label: str) -> dict[str, Any]:
    """Return the method's entry in the manifest."""
    return next(m for m in run.manifest["methods"] if m["label"] == label)


def _held_against(run: Run, label: str) -> tuple[str, ...]:
    """Return the methods whose output must equal this one's; none for the run's reference."""
    methods = [] if label == run.baseline else run.manifest["methods"]
    return tuple(m["label"] for m in methods if m.get("reference") == label != m["label"])
