"""From a run's rows to the numbers in the tables. docs/metrics.md has every definition. No method is known by name.

A prompt is one turn of one question; its repeats are averaged. Only prompts that both the method and the reference
answered count, and n says how many those are. Intervals resample questions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from specbench_ss.method_spec import REFERENCE
from specbench_ss.results import health
from specbench_ss.results.intervals import Comparison, Interval, compare, speedup_interval
from specbench_ss.results.latency import latencies
from specbench_ss.results.quality import MARGIN, NonInferiority, mean_score, non_inferiority
from specbench_ss.results.remembering import remembering
from specbench_ss.results.resampling import Floats
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
    own, ref = _paired(own_rows, [r for r in here if r.method == REFERENCE])
    times = _Times(own, ref)
    same_as = _method(run, label).get("reference", REFERENCE)
    against = _Times(*_paired(own_rows, [r for r in here if r.method == same_as])) if same_as != REFERENCE else None
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


def _speedups(times: _Times, interval: Interval | None, void: bool) -> dict[str, Any]:
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


def _paired(own: Sequence[Row], ref: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Return the samples of both that succeeded on both sides, in the same order."""

    def good(rows: Sequence[Row]) -> dict[tuple[str, int, int], Row]:
        return {(r.question_id, r.turn, r.repeat): r for r in rows if r.ok and r.tokens and (r.wall_s or 0) > 0}

    mine, theirs = good(own), good(ref)
    both = [key for key in mine if key in theirs]
    return [mine[key] for key in both], [theirs[key] for key in both]


class _Times:
    """Paired times and tokens. own_s, own_tokens, ref_s, ref_tokens: [prompts], means over repeats."""

    def __init__(self, own: Sequence[Row], ref: Sequence[Row]) -> None:
        prompts = list(dict.fromkeys((r.question_id, r.turn) for r in own))
        self.questions = list(dict.fromkeys(q for q, _ in prompts))
        number = {q: i for i, q in enumerate(self.questions)}
        self._question = np.array([number[q] for q, _ in prompts], dtype=np.int64)
        place = {p: i for i, p in enumerate(prompts)}
        at = np.array([place[r.question_id, r.turn] for r in own], dtype=np.int64)
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

    def equally_long(self) -> bool:
        """Say whether the answers to every prompt have as many tokens as the reference's."""
        return bool(np.array_equal(self.own_tokens, self.ref_tokens))

    def geomean(self) -> float | None:
        """Return the geometric mean over prompts of the ratio of seconds per token."""
        if not len(self.own_s):
            return None
        return float(np.exp(np.log(self.ref_s / self.ref_tokens * self.own_tokens / self.own_s).mean()))

    def specbench(self) -> float | None:
        """Return Spec-Bench's speedup: the mean over questions of tokens per second, over the reference's mean."""
        a, b, c, d = self.by_question()
        return float((d / c).mean() / (b / a).mean()) if len(a) else None


def _means(rows: Sequence[Row], at: Any, name: str) -> Floats:
    values = np.array([getattr(r, name) for r in rows], dtype=np.float64)
    return _grouped(at, values) / np.bincount(at)


def _grouped(at: Any, values: Floats, groups: int = 0) -> Floats:
    """Return the sums of the values that have the same number in `at`."""
    return np.bincount(at, values, groups).astype(np.float64)


def _sum(rows: Sequence[Row], name: str) -> float:
    return float(sum(getattr(r, name) for r in rows))


def _over(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b
