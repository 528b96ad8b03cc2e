"""From a run's rows to the numbers in the tables. docs/metrics.md has every definition. No method is known by name.

A prompt is one turn of one question; its repeats are averaged. Only prompts that both the method and the reference
answered count, and n says how many those are. Intervals resample questions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specbench_ss.method_spec import REFERENCE
from specbench_ss.results import health
from specbench_ss.results.intervals import Comparison, Interval, compare
from specbench_ss.results.latency import latencies
from specbench_ss.results.paired_times import PairedTimes, paired
from specbench_ss.results.quality import MARGIN, NonInferiority, mean_score, non_inferiority
from specbench_ss.results.remembering import remembering
from specbench_ss.results.step_tally import tally
from specbench_ss.runs.losses import unjudged
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
    quality_margin: only of methods that may change the answers.
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
    overshoot: int
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

    def as_dict(self) -> dict[str, Any]:
        """Return the row as JSON-ready data."""
        return asdict(self)


def summarise(run: Run, quality_margin: float = MARGIN) -> list[SummaryRow]:
    """Return a row for every method on `overall`, then on each category, in the order in which they were asked for.

    quality_margin: how much lower the quality of a method that changes the model may be to be called non-inferior.
    """
    chosen, without = [OVERALL, *run.categories], unjudged(run)
    void = {label: remembering(run, label) for label in run.labels}
    return [
        _summary(run, label, category, quality_margin, without, void[label])
        for category in chosen
        for label in run.labels
    ]


def _summary(
    run: Run, label: str, category: str, margin: float, without: Sequence[Row], void: Sequence[str]
) -> SummaryRow:
    here = [r for r in run.rows if category in (OVERALL, r.category)]
    own_rows = [r for r in here if r.method == label]
    own, ref = paired(own_rows, [r for r in here if r.method == REFERENCE])
    times = PairedTimes(own, ref)
    same_as = _method(run, label).get("reference", REFERENCE)
    against = PairedTimes(*paired(own_rows, [r for r in here if r.method == same_as])) if same_as != REFERENCE else None
    mine, theirs = tally(own, run.steps), tally(ref, run.steps)
    around = None if label == REFERENCE else times.interval()
    speedup, tau = times.speedup(), mine.tau
    step_ratio = _over(theirs.step_s, mine.step_s)
    keys = {r.key for r in own_rows}
    verdicts: Counter[str] = Counter(s.verdict for s in run.sameness if s.method == label and s.key in keys)
    named = f", {same_as}" if same_as != REFERENCE else ""
    unstable = health.unstable(own, label == REFERENCE)
    disbelieved = (
        *health.impossible(own, run.steps),
        *void,
        *health.too_fast(around, tau, times.equally_long()),
    )
    void_here = bool(disbelieved) and label != REFERENCE
    given = {r.key: r.quality for r in (*own, *ref)}
    scores = mean_score(own, ref, label == REFERENCE, "quality", given)
    changes = (
        label != REFERENCE and scores["quality_n"] and (same_as != REFERENCE or not _method(run, label)["lossless"])
    )
    return SummaryRow(
        category=category,
        method=label,
        lossless=bool(_method(run, label)["lossless"]),
        n_prompts=len(times.own_s),
        n_questions=len(times.questions),
        n_failed=sum(not r.ok for r in own_rows),
        **_speedups(times, around, void_here),
        comparison="reference" if label == REFERENCE else "void" if void_here else compare(around),
        reference=same_as,
        reference_speedup=against.speedup() if against and not void_here else None,
        reference_interval=against.interval() if against and not void_here else None,
        reference_of=_held_against(run, label),
        tokens_per_s=_over(_sum(own, "tokens"), _sum(own, "wall_s")),
        tokens=_over(_sum(own, "tokens"), len(own)),
        prefill_s=_over(_sum(own, "prefill_s"), len(own)),
        tau=tau,
        **mine.columns(),
        step_ratio=step_ratio,
        residual=_over(speedup, None if tau is None or step_ratio is None else tau * step_ratio),
        **scores,
        **mean_score(own, ref, label == REFERENCE, "judged", run.judged_scores),
        judge=run.judge,
        quality_verdict=non_inferiority(scores["quality_interval"], margin) if changes else None,
        quality_margin=margin if changes else None,
        **latencies(own),
        peak_memory_bytes=max((r.peak_memory_bytes for r in own if r.peak_memory_bytes is not None), default=None),
        sameness=dict(verdicts),
        within_tau=health.within_tau(around, tau, times.equally_long()),
        unstable=unstable,
        health=(
            *disbelieved,
            *health.failures(own_rows),
            *(f"{line}{named}" for line in health.differences(verdicts, run.manifest["model"]["dtype"])),
            *health.unjudged(own_rows, without),
            *health.unsteady(unstable),
        ),
    )


def _speedups(times: PairedTimes, interval: Interval | None, void: bool) -> dict[str, Any]:
    """Return the speedups with the interval of the first; nothing where the numbers are void."""
    return {
        "speedup": None if void else times.speedup(),
        "speedup_interval": None if void else interval,
        "speedup_geomean": None if void else times.geomean(),
        "speedup_specbench": None if void else times.specbench(),
    }


def _method(run: Run, label: str) -> dict[str, Any]:
    """Return the method's entry in the manifest."""
    return next(m for m in run.manifest["methods"] if m["label"] == label)


def _held_against(run: Run, label: str) -> tuple[str, ...]:
    """Return the methods whose output must equal this one's; none for the run's reference."""
    methods = [] if label == REFERENCE else run.manifest["methods"]
    return tuple(m["label"] for m in methods if m.get("reference") == label != m["label"])


def _sum(rows: Sequence[Row], name: str) -> float:
    return float(sum(getattr(r, name) for r in rows))


def _over(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b
