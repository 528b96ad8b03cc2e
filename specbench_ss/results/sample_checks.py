"""Checks of samples: failures, impossible times, work outside the clock, cross-request memory.

docs/metrics.md has the formula and the reason for the bound.

A method with a finding of the kind `impossible` or `invalid` has no speedup.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specbench_ss.engine.numerics import arithmetic
from specbench_ss.errors import UserError
from specbench_ss.results.findings import Finding
from specbench_ss.results.text import percent, pluralize
from specbench_ss.runs.records import COUNTS, KILLED, Array, Run, SampleRecord, StepColumns, Steps
from specbench_ss.runs.run_dir import STEPS
from specbench_ss.runs.run_dir import uncompared as without_verdicts
from specbench_ss.runs.server_tokens import contradiction
from specbench_ss.stats.intervals import Floats, Interval


def lower_bound(
    samples: Sequence[SampleRecord], baseline: Sequence[SampleRecord], steps: Steps, cheaper: bool = True
) -> Floats:
    """Return a lower bound of the seconds of each output of `samples`: [samples]. baseline: the baseline's outputs.

    It is the baseline's prefill and as many of its steps as the method made. A step that verifies several tokens may
    run other kernels than one of a single token, so if the method's verification is faster than the baseline's, the
    bound shrinks by the same share, if `cheaper`. That does not hold for a method that never drafts.
    """
    made, verify, _ = _steps_of(samples, steps)
    baseline_made, baseline_verify, baseline_total = _steps_of(baseline, steps)
    with np.errstate(all="ignore"):  # an answer without a step: prefill gave its one token
        share = np.minimum(1.0, np.nan_to_num((verify / made) / (baseline_verify / baseline_made), nan=1.0))
        step = np.nan_to_num(baseline_total / baseline_made, nan=0.0)
    drafts = cheaper and any(row.draft_nodes for row in samples)
    return np.asarray(_column(baseline, "prefill_s") + made * step * (share if drafts else 1.0))


def _steps_of(rows: Sequence[SampleRecord], steps: Steps) -> tuple[Floats, Floats, Floats]:
    """Return the number of steps of each sample, their verification seconds and their seconds: [samples] each."""
    places = np.array([steps.place.get(row.key, -1) for row in rows], dtype=np.int64)

    def of(values: Array) -> Floats:
        return np.append(values, 0.0)[places]  # the last one is of a sample without steps

    return of(steps.counts), of(steps.totals.verify_s), of(steps.totals.total_s)


def _column(rows: Sequence[SampleRecord], name: str) -> Floats:
    return np.array([getattr(row, name) or 0.0 for row in rows], dtype=np.float64)


LEAST = 0.1  # Lower bound, as a share of measured time; ratio_interval takes logarithms.
MOST = 1.25  # wall time over measured time of an output, at most; correct methods had 0.98 to 1.06


def passed_seconds(samples: Sequence[SampleRecord], baseline: Sequence[SampleRecord]) -> Floats | None:
    """Return the seconds from start to end of each output of `samples`, [samples]; None if unknown.

    baseline: the baseline's outputs. Their time outside the measurement is the harness's, and is subtracted.
    """
    if not samples or any(row.counted or row.started is None or row.ended is None for row in (*samples, *baseline)):
        return None
    passed, baseline_passed = (_column(rows, "ended") - _column(rows, "started") for rows in (samples, baseline))
    measured, baseline_measured = _column(samples, "wall_s"), _column(baseline, "wall_s")
    return np.maximum(LEAST * measured, passed - np.maximum(0.0, baseline_passed - baseline_measured))


HALF = ("float16", "bfloat16")  # two draft tokens may be equally likely, and repeats take different ones
NOISE = 0.1  # share of its steps that a method must save in half precision


def cross_request_memory(run: Run, label: str) -> list[str]:
    """Report a greedy method whose steps differ between repeats with the same prompt and the same output.

    The only difference of such a repeat is the method's memory of the one before. Samples with re-runs are left out.
    In half precision a few steps may differ by a tie of the drafter: only clearly fewer steps in all later repeats
    are reported.
    """
    several = comparable(run, label)
    differ = [same for same in several if len({_counts(run.steps.of(row.key)) for row in same}) > 1]
    first = sum(same[0].steps or 0 for same in several)
    later = sum(sum(row.steps or 0 for row in same[1:]) / (len(same) - 1) for same in several)
    if not differ or (run.manifest["model"]["dtype"] in HALF and later >= (1 - NOISE) * first):
        return []
    row = differ[0][0]
    return [
        f"the steps of {len(differ)} of {len(several)} prompts differ between repeats with the same output "
        f"(first {row.question_id} turn {row.turn + 1}): the method remembers earlier outputs; set stateful = True"
    ]


BY_CHANCE, FEWEST_PROMPTS = 1e-4, 20  # p-value and prompts of `order_memory`


def order_memory(run: Run, label: str) -> list[str]:
    """Report a method with a higher τ on prompts that the baseline has answered before it: their order is random.

    Repeats are left out: `cross_request_memory` compares them with each other.
    """
    taus: tuple[list[float], list[float]] = [], []
    place = {(row.question_id, row.turn): row.position for row in run.of(run.baseline) if row.ok and not row.repeat}
    for row in run.of(label):
        if row.ok and row.steps and not row.repeat and (key := (row.question_id, row.turn)) in place:
            taus[place[key] < row.position].append(((row.tokens or 0) - (row.prefill_tokens or 0)) / row.steps)
    if not all(taus) or sum(map(len, taus)) < FEWEST_PROMPTS:
        return []
    from scipy.stats import mannwhitneyu  # takes half a second

    if mannwhitneyu(*taus, alternative="less", method="asymptotic").pvalue > BY_CHANCE:
        return []
    others, after = (f"{np.mean(side):.2f}" for side in taus)
    where = f"τ is {after} on prompts that {run.baseline} answered before it and {others} on others"
    return [f"{where}: the method uses the outputs of {run.baseline}"]


def comparable(run: Run, label: str) -> list[list[SampleRecord]]:
    """Return the repeats with the same prompt and output, of a greedy method that is not stateful."""
    if run.entry(label).get("stateful", True) or run.manifest["config"]["temperature"]:
        return []
    repeats: dict[Any, list[SampleRecord]] = defaultdict(list)
    for row in sorted(run.of(label), key=lambda row: row.repeat):
        if row.ok and not row.n_reruns:
            repeats[row.question_id, row.turn, row.session, _history(run, row), tuple(row.token_ids or ())].append(row)
    return [same for same in repeats.values() if len(same) > 1]


def _counts(steps: StepColumns) -> bytes:
    """Return the comparable counts of every step."""
    return b"".join(getattr(steps, name).tobytes() for name in COUNTS)


def _history(run: Run, row: SampleRecord) -> tuple[str | None, ...]:
    """Return the method's own earlier outputs if they are part of the prompt."""
    if run.manifest["config"].get("history") != "own" or not row.turn:
        return ()
    place = (row.question_id, row.method, row.repeat)
    before = [r for r in run.rows if (r.question_id, r.method, r.repeat) == place and r.turn < row.turn]
    return tuple(r.text for r in sorted(before, key=lambda r: r.turn))


SPREAD = 0.10  # relative standard deviation of times of the same work above which they are called unstable
ENOUGH = 4  # times of the same work from which their spread is known
FOR_A_LINE = 10  # samples from which the cost of a longer context is fitted
CLOCKS = 1e-4  # seconds a step by which the parts, read off the device's clock, may exceed the whole, off the host's

NOT_LOCKED = "no process has locked this folder; if it is a copy, the run may continue elsewhere"

STEP_CHECKS: dict[str, Callable[[StepColumns], Array]] = {  # impossible property -> steps [n] that have it
    "more accepted than the depth of the draft": lambda s: s.accepted_tokens > s.draft_depth,
    "more accepted than drafted": lambda s: s.accepted_tokens > s.draft_nodes,
    "more nodes verified than drafted": lambda s: s.verified_nodes > s.draft_nodes,
    "a step kept more tokens than it accepted plus one": lambda s: s.tokens > s.accepted_tokens + 1,
    "a negative time": lambda s: np.any([part < 0 for part in (*_parts(s), s.total_s)], axis=0),
    "the parts of a step exceed its time": lambda s: sum(_parts(s)) > 1.01 * s.total_s + CLOCKS,
}
SUM_CHECKS: dict[
    str, Callable[[SampleRecord, int, float], bool]
] = {  # the same for a sample with the tokens and seconds of its steps
    "tokens of prefill and steps do not add up": lambda r, tokens, _: (
        r.tokens != (r.prefill_tokens or 0) + tokens or r.tokens != len(r.token_ids or ())
    ),
    "steps and prefill do not add up to the wall time": lambda r, _, seconds: (
        not math.isclose(r.wall_s or 0, (r.prefill_s or 0) + seconds, rel_tol=1e-6, abs_tol=1e-9)
    ),
}


def _parts(steps: StepColumns) -> tuple[Array, ...]:
    return (steps.draft_s, steps.verify_s, steps.accept_s, steps.host_s)


def impossible(rows: Sequence[SampleRecord], steps: Steps) -> list[Finding]:
    """Report samples whose numbers contradict each other."""
    bad = {**_bad_sums(rows, steps), **_bad_steps(rows, steps)}
    return [Finding("impossible", f"{text} ({_samples(found)})") for text, found in bad.items() if found]


def _bad_sums(rows: Sequence[SampleRecord], steps: Steps) -> dict[str, list[SampleRecord]]:
    """Return the samples that each of `SUM_CHECKS` finds, without those of servers."""
    tokens, seconds = [*steps.totals.tokens.tolist(), 0], [*steps.totals.total_s.tolist(), 0.0]
    sums = [(row, steps.place.get(row.key, -1)) for row in rows if row.counted is None]
    return {
        text: [row for row, at in sums if broken(row, tokens[at], seconds[at])] for text, broken in SUM_CHECKS.items()
    }


def _bad_steps(rows: Sequence[SampleRecord], steps: Steps) -> dict[str, list[SampleRecord]]:
    """Return the samples with a step that one of `STEP_CHECKS` finds."""
    made = [row for row in rows if row.key in steps.place]
    places = steps.places(row.key for row in made)
    columns = steps.columns.take(steps.steps_of(places))
    sample = np.repeat(np.arange(len(made)), steps.counts[places])  # [steps], index into `made`
    return {text: [made[i] for i in np.unique(sample[bad(columns)]).tolist()] for text, bad in STEP_CHECKS.items()}


def invalid_reasons(run: Run, label: str) -> list[Finding]:
    """Report the reasons why a method is invalid: an altered model, a wrong reference, or outputs from memory."""
    off, reference = run.manifest.get("target_changed"), run.reference(label)
    found = [f"a method altered the model: its own logits changed in the run, by {off}"] if off else []
    if reference not in (label, run.baseline):
        wrong = sum(one.verdict == "mismatch" for one in run.output_match if one.method == reference)
        text = f"{wrong} outputs of its reference {reference} are not those of its own model"
        found += [text] if wrong else []
    other = contradiction(run.rows, label, run.baseline) if run.served else ""
    found += [f"its server counts {other}"] if other else []
    found += [*cross_request_memory(run, label), *order_memory(run, label)]
    return [Finding("invalid", text) for text in found]


def speedup_within_bound(excess: Interval | None) -> bool | None:
    """Return whether a method is no faster than its steps allow; None without an interval.

    excess: the interval of the lower bound over the method's time. It fails if the whole interval lies above 1.
    """
    return None if excess is None else excess[0] <= 1


def short_steps(excess: Interval | None, baseline: str) -> list[Finding]:
    """Report outputs that took less time than so many steps of the baseline. excess: interval of the ratio."""
    if excess is None or excess[0] <= 1:
        return []
    return [Finding("short-steps", f"at least {excess[0]:.2f} times as fast as its number of steps of {baseline}")]


def too_fast(excess: Interval | None, tau: float | None) -> list[Finding]:
    """Report outputs that took less than the lower bound by `speedup_within_bound`."""
    if excess is None or tau is None or speedup_within_bound(excess):
        return []
    text = f"at least {excess[0]:.2f} times as fast as its steps allow, with {tau:.2f} tokens per step"
    return [Finding("impossible", text)]


def outside_clock(passed: Interval | None) -> list[Finding]:
    """Report outputs with more wall time than measured time, if the whole interval lies above `MOST`.

    passed: the interval of wall time over measured time.
    """
    if passed is None or passed[0] <= MOST:
        return []
    text = f"wall time is at least {passed[0]:.2f}x the measured time; work happens outside the clock"
    return [Finding("invalid", text)]


def findings(
    run: Run,
    rows: Sequence[SampleRecord],
    verdicts: Mapping[str, int],
    without: Sequence[SampleRecord],
    times: Spread | None,
) -> Iterator[Finding]:
    """Yield findings on a method's samples: failures, output mismatches, unstable times.

    verdicts: counts of its output matches. without: all samples of the run that lack a verdict. In half precision
    numerical ties are expected and left out.
    """
    if bad := [row for row in rows if not row.ok]:
        yield Finding("failed", f"{_samples(bad)}: {bad[0].error}")
    exact = arithmetic(run.manifest["model"]["dtype"]) in ("float32", "float64")
    reference = run.reference(rows[0].method) if rows else run.baseline
    kinds = ("mismatch", "text differs", "length differs")
    for kind in (*kinds, "numerical tie") if exact else kinds:
        if n := verdicts.get(kind):
            text = f"{n} of {sum(verdicts.values())} outputs compared with {reference}"
            yield Finding(kind.replace(" ", "-"), text)
    if lacking := {row.key for row in without}.intersection(row.key for row in rows):
        yield Finding("uncompared", f"{len(lacking)} of {len(rows)} outputs, which --resume compares")
    if times and unstable(times):
        what = "times of the same work differ by {}, more than a tenth"
        what = what if times.of_repeats else "its step times over different prompts differ by {} (interquartile range)"
        yield Finding("unstable", what.format(percent(times.share)))


def unfinished(run: Run) -> str:
    """Return 'not complete (interrupted): 3 of 8 samples', or '' for a complete run."""
    status, made, reasons = run.manifest["status"], len(run.rows), list[str]()
    if status != "complete" or made < run.samples:
        reasons.append({"complete": "samples are missing", KILLED: NOT_LOCKED}.get(status, status))
    if run.without_steps:
        reasons.append(f"{STEPS} is cut: it lacks the steps of {pluralize(run.without_steps, 'sample')}")
    if n := len(without_verdicts(run)):
        reasons.append(f"{n:,} {'output was' if n == 1 else 'outputs were'} not compared with the baseline's")
    return f"not complete ({'; '.join(reasons)}): {made:,} of {run.samples:,} samples" if reasons else ""


def check_samples(run: Run, purpose: str) -> None:
    """Raise UserError for a run without a sample. purpose: a verb, as in 'nothing to report'."""
    if not run.rows:
        cut = f"; {STEPS} lacks their steps: restore it, or measure again with --resume" if run.without_steps else ""
        raise UserError(f"nothing to {purpose}: {run.path} has none of the run's {run.samples:,} samples{cut}")


@dataclass(frozen=True, slots=True)
class Spread:
    """Relative standard deviation of times. of_repeats: of the same outputs; else of steps over prompts."""

    share: float
    of_repeats: bool


def unstable(found: Spread | None) -> bool | None:
    """Return whether times spread by more than a tenth; None if unknown."""
    return None if found is None else found.share > SPREAD


def spread(rows: Sequence[SampleRecord], equal_steps: bool) -> Spread | None:
    """Return the spread of times of the same work; None with too few of them.

    The same work is repeats of a prompt with the same tokens. If every step does nearly equal work (the baseline),
    step times of different samples replace it: their interquartile range, corrected for the length of the context.
    """
    repeats: dict[tuple[str, int, tuple[int, ...] | str], list[float]] = defaultdict(list)
    for row in rows:
        answer = (row.text or "") if row.counted else tuple(row.token_ids or ())
        repeats[row.question_id, row.turn, answer].append(row.wall_s or 0.0)
    squares = [(np.std(t, ddof=1) / np.mean(t)) ** 2 for t in repeats.values() if len(t) > 1]
    of_repeats = math.sqrt(float(np.mean(squares))) if squares else 0.0
    if of_repeats > SPREAD or sum(len(t) - 1 for t in repeats.values()) >= ENOUGH - 1:
        return Spread(of_repeats, True)
    per_step = _at_one_length([row for row in rows if row.steps and row.decode_s])
    if not equal_steps or len(per_step) < ENOUGH:
        return None
    low, middle, high = np.quantile(per_step, (0.25, 0.5, 0.75))
    return Spread(float((high - low) / 1.349 / middle), False)


def _samples(rows: Sequence[SampleRecord]) -> str:
    first = rows[0]
    what = "sample" if len(rows) == 1 else "samples"
    return f"{len(rows)} {what}, first {first.question_id} turn {first.turn + 1}"


def _at_one_length(rows: Sequence[SampleRecord]) -> Array:
    """Return the mean seconds of a step of each sample [n], corrected to the median length of the context.

    The cost of a token of context is the slope of a line through all samples, if there are enough.
    """
    seconds = np.array([(row.decode_s or 0.0) / (row.steps or 1) for row in rows])
    length = np.array([(row.prompt_tokens or 0) + (row.tokens or 0) / 2 for row in rows])
    if len(rows) < FOR_A_LINE or np.ptp(length) == 0:
        return seconds
    slope = float(np.polyfit(length, seconds, 1)[0])
    corrected: Array = seconds - slope * (length - np.median(length))
    return corrected
