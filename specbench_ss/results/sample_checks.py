"""Checks of samples: failures, impossible times, work outside the clock, cross-request memory.

docs/metrics.md has the formula and the reason for the bound.

Each sentence begins with its kind, one of `checks.FOUND`. After `impossible:` or `invalid:` a method has no speedup.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specbench_ss.engine.numerics import arithmetic
from specbench_ss.results.text import percent
from specbench_ss.runs.records import COUNTS, KILLED, Array, Run, SampleRecord, StepColumns, Steps
from specbench_ss.runs.run_dir import uncompared as without_verdicts
from specbench_ss.stats import Floats, Interval


def lower_bound(own: Sequence[SampleRecord], ref: Sequence[SampleRecord], steps: Steps) -> Floats:
    """Return the least seconds of each answer of `own`: [samples]. ref: the reference's answers to the same prompts.

    They are the reference's prefill and as many of its steps as the method made. A step in which a method verifies
    several rows may run other kernels than one of a single row: where the method's verifying takes a smaller share of
    the reference's, its steps may take that share too. A method that never drafts has no such excuse.
    """
    made, verify, _ = _steps_of(own, steps)
    made_ref, verify_ref, total_ref = _steps_of(ref, steps)
    with np.errstate(all="ignore"):  # an answer without a step: prefill gave its one token
        share = np.minimum(1.0, np.nan_to_num((verify / made) / (verify_ref / made_ref), nan=1.0))
        step = np.nan_to_num(total_ref / made_ref, nan=0.0)
    drafts = any(row.draft_nodes for row in own)
    return np.asarray(_column(ref, "prefill_s") + made * step * (share if drafts else 1.0))


def _steps_of(rows: Sequence[SampleRecord], steps: Steps) -> tuple[Floats, Floats, Floats]:
    """Return the number of steps of each sample, their seconds of verifying and their seconds: [samples] each."""
    places = np.array([steps.place.get(row.key, -1) for row in rows], dtype=np.int64)

    def of(values: Array) -> Floats:
        return np.append(values, 0.0)[places]  # the last one is of a sample without steps

    return of(steps.counts), of(steps.totals.verify_s), of(steps.totals.total_s)


def _column(rows: Sequence[SampleRecord], name: str) -> Floats:
    return np.array([getattr(row, name) or 0.0 for row in rows], dtype=np.float64)


LEAST = 0.1  # Lower bound, as a share of measured time; ratio_interval takes logarithms.
MOST = 1.25  # times its measured time that an answer may take; honest methods had 0.98 to 1.06


def passed_seconds(own: Sequence[SampleRecord], ref: Sequence[SampleRecord]) -> Floats | None:
    """Return the seconds from start to end of each answer of `own`, [samples]; None where that is not known.

    ref: the reference's answers to the same prompts. The time within these that is not measured is the harness's: it
    is taken off.
    """
    if not own or any(row.counted or row.started is None or row.ended is None for row in (*own, *ref)):
        return None
    passed, passed_ref = (_column(rows, "ended") - _column(rows, "started") for rows in (own, ref))
    measured, measured_ref = _column(own, "wall_s"), _column(ref, "wall_s")
    return np.maximum(LEAST * measured, passed - np.maximum(0.0, passed_ref - measured_ref))


HALF = ("float16", "bfloat16")  # where two drafted tokens may be equally likely, and one repeat takes the other one
NOISE = 0.1  # share of its steps that a method must save in half precision


def cross_request_memory(run: Run, label: str) -> list[str]:
    """Report a greedy method whose steps differ between repeats with the same prompt and the same answer.

    Nothing in such a repeat is new but what the method kept from the one before. Samples that were made again are left
    out: the method was asked them twice. In half precision a step or two may differ by a tie of the drafter: only
    clearly fewer steps in all later repeats are told.
    """
    several = comparable(run, label)
    differ = [same for same in several if len({_counts(run.steps.of(row.key)) for row in same}) > 1]
    first = sum(same[0].steps or 0 for same in several)
    later = sum(sum(row.steps or 0 for row in same[1:]) / (len(same) - 1) for same in several)
    if not differ or (run.manifest["model"]["dtype"] in HALF and later >= (1 - NOISE) * first):
        return []
    row = differ[0][0]
    return [
        f"invalid: the steps of {len(differ)} of {len(several)} prompts differ between repeats with the same answer "
        f"(first {row.question_id} turn {row.turn + 1}): the method remembers earlier answers and does not say so"
    ]


def comparable(run: Run, label: str) -> list[list[SampleRecord]]:
    """Return the repeats with the same prompt and answer, of a greedy method that says it remembers nothing."""
    if run.entry(label).get("stateful", True) or run.manifest["config"]["temperature"]:
        return []
    repeats: dict[Any, list[SampleRecord]] = defaultdict(list)
    for row in sorted(run.of(label), key=lambda row: row.repeat):
        if row.ok and not row.n_reruns:
            repeats[row.question_id, row.turn, _history(run, row), tuple(row.token_ids or ())].append(row)
    return [same for same in repeats.values() if len(same) > 1]


def _counts(steps: StepColumns) -> bytes:
    """Return what can be compared of the counts of every step."""
    return b"".join(getattr(steps, name).tobytes() for name in COUNTS)


def _history(run: Run, row: SampleRecord) -> tuple[str | None, ...]:
    """The method's own earlier answers, where they are part of the prompt."""
    if run.manifest["config"].get("history") != "own" or not row.turn:
        return ()
    place = (row.question_id, row.method, row.repeat)
    before = [r for r in run.rows if (r.question_id, r.method, r.repeat) == place and r.turn < row.turn]
    return tuple(r.text for r in sorted(before, key=lambda r: r.turn))


SPREAD = 0.10  # relative standard deviation of times of the same work above which they are called unstable
ENOUGH = 4  # times of the same work, to say that they do not spread
FOR_A_LINE = 10  # samples, to say what a longer context costs
CLOCKS = 1e-4  # seconds a step by which the parts, read off the device's clock, may exceed the whole, off the host's

NOT_HELD = "no process holds this folder; it may go on elsewhere if this is a copy"  # of a run that has not ended

STEP_CHECKS: dict[str, Callable[[StepColumns], Array]] = {  # what no step may be, in words, and which steps [n] are
    "more accepted than the depth of the draft": lambda s: s.accepted_tokens > s.draft_depth,
    "more accepted than drafted": lambda s: s.accepted_tokens > s.draft_nodes,
    "more nodes verified than drafted": lambda s: s.verified_nodes > s.draft_nodes,
    "a step kept more tokens than it accepted plus one": lambda s: s.tokens > s.accepted_tokens + 1,
    "a negative time": lambda s: np.any([part < 0 for part in (*_parts(s), s.total_s)], axis=0),
    "the parts of a step exceed its time": lambda s: sum(_parts(s)) > 1.01 * s.total_s + CLOCKS,
}
SUM_CHECKS: dict[
    str, Callable[[SampleRecord, int, float], bool]
] = {  # the same of a sample and its steps' tokens and seconds
    "tokens of prefill and steps do not add up": lambda r, tokens, _: (
        r.tokens != (r.prefill_tokens or 0) + tokens or r.tokens != len(r.token_ids or ())
    ),
    "steps and prefill do not add up to the wall time": lambda r, _, seconds: (
        not math.isclose(r.wall_s or 0, (r.prefill_s or 0) + seconds, rel_tol=1e-6, abs_tol=1e-9)
    ),
}


def _parts(steps: StepColumns) -> tuple[Array, ...]:
    return (steps.draft_s, steps.verify_s, steps.accept_s, steps.host_s)


def impossible(rows: Sequence[SampleRecord], steps: Steps) -> list[str]:
    """Report samples whose numbers contradict each other."""
    bad = {**_bad_sums(rows, steps), **_bad_steps(rows, steps)}
    return [f"impossible: {text} ({_samples(found)})" for text, found in bad.items() if found]


def _bad_sums(rows: Sequence[SampleRecord], steps: Steps) -> dict[str, list[SampleRecord]]:
    """Return the samples that each of `SUM_CHECKS` finds; a server's steps are not known."""
    tokens, seconds = [*steps.totals.tokens.tolist(), 0], [*steps.totals.total_s.tolist(), 0.0]
    sums = [(row, steps.place.get(row.key, -1)) for row in rows if row.counted is None]
    return {
        text: [row for row, at in sums if broken(row, tokens[at], seconds[at])] for text, broken in SUM_CHECKS.items()
    }


def _bad_steps(rows: Sequence[SampleRecord], steps: Steps) -> dict[str, list[SampleRecord]]:
    """Return the samples that have a step that one of `STEP_CHECKS` finds."""
    made = [row for row in rows if row.key in steps.place]
    places = steps.places(row.key for row in made)
    own = steps.columns.take(steps.steps_of(places))
    sample = np.repeat(np.arange(len(made)), steps.counts[places])  # [steps], which of `made` each belongs to
    return {text: [made[i] for i in np.unique(sample[broken(own)]).tolist()] for text, broken in STEP_CHECKS.items()}


def invalid_reasons(run: Run, label: str) -> list[str]:
    """Report why a method's numbers must not be used: another model, a wrong reference, or answers from memory."""
    off, reference = run.manifest.get("target_changed"), run.reference(label)
    found = [f"invalid: a method altered the model: its own logits changed in the run, by {off}"] if off else []
    if reference not in (label, run.baseline):
        wrong = sum(one.verdict == "mismatch" for one in run.output_match if one.method == reference)
        told = f"invalid: {wrong} answers of its reference {reference} are not those of its own model"
        found += [told] if wrong else []
    return [*found, *cross_request_memory(run, label)]


def speedup_within_bound(excess: Interval | None) -> bool | None:
    """Say whether a method is no faster than its steps allow. excess: the interval of the least time over its own.

    It is not where the whole interval lies above 1. None where there is no interval.
    """
    return None if excess is None else excess[0] <= 1


def too_fast(excess: Interval | None, tau: float | None) -> list[str]:
    """Report answers that took less than the least time, where `speedup_within_bound` says so."""
    if excess is None or tau is None or speedup_within_bound(excess):
        return []
    return [f"impossible: at least {excess[0]:.2f} times as fast as its steps allow, with {tau:.2f} tokens per step"]


def outside_clock(passed: Interval | None) -> list[str]:
    """Report answers during which more time passed than was measured. passed: the interval of the one over the other.

    It is reported where the whole interval lies above `MOST`.
    """
    if passed is None or passed[0] <= MOST:
        return []
    return [f"invalid: wall time is at least {passed[0]:.2f}x the measured time; work happens outside the clock"]


def findings(
    run: Run,
    rows: Sequence[SampleRecord],
    verdicts: Mapping[str, int],
    without: Sequence[SampleRecord],
    times: Spread | None,
) -> Iterator[str]:
    """Yield what is wrong with a method's samples, whatever its speed: failures, other answers, unstable times.

    verdicts: on its answers, how many of each. without: all samples of the run that lack a verdict. In half precision
    numerical ties are expected and left out.
    """
    if bad := [row for row in rows if not row.ok]:
        yield f"failed: {_samples(bad)}: {bad[0].error}"
    exact = arithmetic(run.manifest["model"]["dtype"]) in ("float32", "float64")
    reference = run.reference(rows[0].method) if rows else run.baseline
    named = f", {reference}" if reference != run.baseline else ""
    for kind in ("mismatch", "length differs", "numerical tie") if exact else ("mismatch", "length differs"):
        if n := verdicts.get(kind):
            yield f"{kind.replace(' ', '-')}: {n} of {sum(verdicts.values())} answers against the reference{named}"
    if lacking := {row.key for row in without}.intersection(row.key for row in rows):
        yield f"uncompared: {len(lacking)} of {len(rows)} answers, which --resume compares"
    if times and unstable(times):
        what = "times of the same work differ by {}, more than a tenth"
        what = what if times.of_repeats else "its step times over different prompts differ by {} (middle half)"
        yield f"unstable: {what.format(percent(times.share))}"


def unfinished(run: Run) -> str:
    """Return 'not complete (interrupted): 3 of 8 samples', or '' for a complete run, of which nothing is lost."""
    status, made, said = run.manifest["status"], len(run.rows), list[str]()
    if status != "complete" or made < run.samples:
        said.append({"complete": "samples are missing", KILLED: NOT_HELD}.get(status, status))
    if n := len(without_verdicts(run)):
        said.append(f"{n:,} {'answer was' if n == 1 else 'answers were'} not compared with the reference's")
    return f"not complete ({'; '.join(said)}): {made:,} of {run.samples:,} samples" if said else ""


@dataclass(frozen=True, slots=True)
class Spread:
    """The relative standard deviation of times. of_repeats: of the same answers; else of steps over prompts."""

    share: float
    of_repeats: bool


def unstable(found: Spread | None) -> bool | None:
    """Say whether times spread by more than a tenth; None where that is not known."""
    return None if found is None else found.share > SPREAD


def spread(rows: Sequence[SampleRecord], equal_steps: bool) -> Spread | None:
    """Return how far times of the same work spread; None where there are too few to call it small.

    The same work is repeats of a prompt that gave the same tokens. Where every step does nearly equal work (the
    reference), step times of different samples, without their outer quarters, stand in for it, as they would be behind
    a context of the same length.
    """
    repeats: dict[tuple[str, int, tuple[int, ...] | str], list[float]] = defaultdict(list)
    for row in rows:
        answer = (row.text or "") if row.counted else tuple(row.token_ids or ())
        repeats[row.question_id, row.turn, answer].append(row.wall_s or 0.0)
    squares = [(np.std(t, ddof=1) / np.mean(t)) ** 2 for t in repeats.values() if len(t) > 1]
    of_repeats = math.sqrt(float(np.mean(squares))) if squares else 0.0
    if of_repeats > SPREAD or sum(len(t) - 1 for t in repeats.values()) >= ENOUGH - 1:
        return Spread(of_repeats, True)
    per_step = _at_one_length([row for row in rows if row.steps])
    if not equal_steps or len(per_step) < ENOUGH:
        return None
    low, middle, high = np.quantile(per_step, (0.25, 0.5, 0.75))
    return Spread(float((high - low) / 1.349 / middle), False)


def _samples(rows: Sequence[SampleRecord]) -> str:
    first = rows[0]
    what = "sample" if len(rows) == 1 else "samples"
    return f"{len(rows)} {what}, first {first.question_id} turn {first.turn + 1}"


def _at_one_length(rows: Sequence[SampleRecord]) -> Array:
    """Return the mean seconds of a step of each sample [n], less what a longer context than the usual one adds.

    What a token of context adds is the slope of a line through all samples, where there are enough for one.
    """
    seconds = np.array([(row.decode_s or 0.0) / (row.steps or 1) for row in rows])
    length = np.array([(row.prompt_tokens or 0) + (row.tokens or 0) / 2 for row in rows])
    if len(rows) < FOR_A_LINE or np.ptp(length) == 0:
        return seconds
    slope = float(np.polyfit(length, seconds, 1)[0])
    corrected: Array = seconds - slope * (length - np.median(length))
    return corrected
