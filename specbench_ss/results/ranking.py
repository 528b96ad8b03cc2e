"""Ranking of methods: sure places, verdicts in words and the headline.

Two methods may both be faster than the reference, with intervals that overlap, and one of them still be ahead on
nearly every question; or the other way about. So each pair has an interval of its own, on the prompts that all
methods answered, over the same resamples of the questions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specbench_ss.options import REFERENCE
from specbench_ss.results.checks import Check, baseline_noise
from specbench_ss.results.quality import BIASED, measures
from specbench_ss.results.summary import OVERALL, PairedTimes, SummaryRow, failing, paired
from specbench_ss.results.text import MISSING, format_speedup, interval, output_match
from specbench_ss.runs.records import Run, SampleRecord
from specbench_ss.stats import FEWEST, Comparison, Floats, Interval, compare, pairwise

RANKED = ("faster", "slower", "not significant")


@dataclass(frozen=True, slots=True)
class RankRange:
    """The places that a method may have: behind those that are surely faster, ahead of those that are surely slower.

    best, worst: places from 1. level: the methods that are not significantly different from it, the fastest first.
    """

    best: int
    worst: int
    tied_with: tuple[str, ...]


def ranked(summaries: Sequence[SummaryRow]) -> list[SummaryRow]:
    """Return the methods that have an interval over all tasks, without controls and without those that fail."""
    rows = [row for row in summaries if row.category == OVERALL and row.comparison in RANKED and not row.reference_of]
    return [row for row in rows if row.method not in failing(summaries)]


def rank_ranges(run: Run, summaries: Sequence[SummaryRow]) -> Mapping[str, RankRange]:
    """Return the standing of every method that `ranked` gives; nothing below FEWEST questions."""
    rows = ranked(summaries)
    labels = [row.method for row in sorted(rows, key=lambda row: -(row.speedup or 0.0))]
    seconds, tokens = by_question([run.of(label) for label in labels])
    if seconds.shape[1] < FEWEST:
        return {}
    found = {}
    for label, ratios in zip(labels, pairwise(seconds, tokens), strict=True):  # how many times as fast as each other
        faster, slower = sum(high < 1 for _, high in ratios), sum(low > 1 for low, _ in ratios)
        level = [other for other, (low, high) in zip(labels, ratios, strict=True) if low <= 1 <= high]
        found[label] = RankRange(1 + faster, len(labels) - slower, tuple(other for other in level if other != label))
    return found


def by_question(samples: Sequence[Sequence[SampleRecord]]) -> tuple[Floats, Floats]:
    """Return seconds and tokens of every method [methods, questions], on the prompts that all of them answered.

    samples: of each method.
    """
    shared: Sequence[SampleRecord] = next(iter(samples), [])
    for own in samples:
        shared = paired(shared, own)[0]
    sums = [PairedTimes(paired(shared, own)[1], shared).by_question() for own in samples]
    seconds, tokens = ([of[column] for of in sums] or [np.empty(0)] for column in (2, 3))
    return np.stack(seconds), np.stack(tokens)


NOT_COMPARED, SAMPLED = "not compared", "sampled"
PROMISED = f"{SAMPLED}: the method promises the same distribution, not the same text; quality may differ by chance"
NO_MEAN = "quality over all tasks is left out: the tasks are scored by different measures"
BIAS = {
    "no bias found": "no bias found: the sampled tokens (how many were tested) fit the target's distribution; texts, "
    "and quality, differ by chance",
    "biased": f"biased: sampled tokens (how many were tested) do not follow the target's distribution, p < {BIASED:g}",
    "too few tokens": "too few tokens: not enough to find a clear bias; ask more prompts or allow longer answers",
    "not testable": "not testable: rounding at this temperature, or a reference that fails the test; see below",
}
MARKS = {"not significant": "≈", "insufficient data": "?"}


def config_of(run: Run) -> dict[str, Any]:
    """Return the configuration of a run's manifest, with the repeats that were made and what tasks are scored by."""
    return {**run.manifest["config"], "repeats": run.repeats, "measures": measures(run.questions)}


def speedup(row: SummaryRow) -> str:
    """Return a speedup as in '≈ 1.13×' where the interval covers 1, or '? 1.61×' where there is none."""
    return _marked(row.speedup, row.comparison)


def _marked(value: float | None, comparison: Comparison) -> str:
    if comparison == "invalid":
        return "invalid"
    mark = "" if value is None else MARKS.get(comparison, "")
    return f"{mark} {format_speedup(value)}".strip()


def output(row: SummaryRow, config: Mapping[str, Any]) -> str:
    """Say how its answers compare with its reference's: 'identical', 'sampled', 'identical to ss-shared-ar'.

    How the repeats of the run's reference compare is among the findings. config: that of the manifest.
    """
    if row.comparison == "reference":
        return "reference"
    if row.reference_of:
        return f"reference of {', '.join(row.reference_of)}"
    said = _sampled(row) if row.bias else output_match(row.output_match)
    if said == NOT_COMPARED:
        return SAMPLED if row.lossless and config["temperature"] else said
    if row.reference == row.baseline or said == MISSING:
        return said
    return f"{said} {'to' if said == 'identical' else 'against'} {row.reference}"


def _sampled(row: SummaryRow) -> str:
    """Describe the test of sampled tokens: 'no bias found (1,480 tokens)'."""
    if not row.lossless:
        return f"not promised, {row.bias}"
    return f"{row.bias} ({row.bias_tokens:,})" if row.bias != "not testable" else row.bias


def short_output(row: SummaryRow, config: Mapping[str, Any]) -> str:
    """Return the same for narrow columns: 'identical †' where the reference is of the method's own model."""
    said = output(row, config)
    if row.reference_of:
        return "reference †"
    if row.reference == row.baseline or not said.endswith(row.reference):
        return said
    return f"{said.removesuffix(row.reference).rsplit(maxsplit=1)[0]} †"


def own_model(row: SummaryRow) -> str:
    """Return what a method that changes the model gains over `ar` of that model: '1.52× (1.41–1.66)'."""
    around = interval(row.reference_interval)
    return _marked(row.reference_speedup, compare(row.reference_interval)) + (f" ({around})" if around else "")


def quality(row: SummaryRow, config: Mapping[str, Any]) -> float | None:
    """Return the mean quality to be shown; None over all tasks where these are scored by different measures.

    config: that of the manifest, with `measures`: what the tasks are scored by.
    """
    return None if row.category == OVERALL and len(config.get("measures", ())) > 1 else row.quality


def quality_difference(row: SummaryRow) -> str:
    """Return the paired difference of quality to the reference, as in '+0.01 (−0.02–0.04)'; '' without one."""
    return _difference(row, row.quality_difference, row.quality_interval)


def judged_difference(row: SummaryRow) -> str:
    """Return the same of the judge's rating."""
    return _difference(row, row.judge_score_difference, row.judge_score_interval)


def _difference(row: SummaryRow, difference: float | None, around: Interval | None) -> str:
    if difference is None or row.comparison == "reference":
        return ""
    bounds = f" ({interval(around, line=0)})" if around else ""
    return f"{difference:+.2f}{bounds}".replace("-", "−")


def non_inferiority(row: SummaryRow) -> str:
    """Return whether a method that changes the model answers no worse: 'non-inferior to ar (margin 0.02)'; '' else."""
    if row.quality_verdict is None:
        return ""
    than = "than" if row.quality_verdict == "not shown" else "to"
    said = "not shown to be no worse" if row.quality_verdict == "not shown" else row.quality_verdict
    return f"{said} {than} {row.baseline} (margin {row.quality_margin:g})"


def counts(row: SummaryRow) -> list[str]:
    """Return what n leaves unsaid: '52 questions', where prompts are turns of fewer questions, and '4 failed'."""
    questions = [f"{row.n_questions:,} questions"] if row.n_questions != row.n_prompts else []
    return questions + ([f"{row.n_failed:,} failed"] if row.n_failed else [])


def n(row: SummaryRow) -> str:
    """Return the number of prompts with its details, as in '84 (52 questions, 4 failed)'."""
    more = counts(row)
    return f"{row.n_prompts:,} ({', '.join(more)})" if more else f"{row.n_prompts:,}"


def short_n(row: SummaryRow) -> str:
    """Return the same for narrow columns, as in '84 (52 q, 4 failed)'. A note explains it."""
    return n(row).replace(" questions", " q")


def notes(
    rows: Sequence[SummaryRow], config: Mapping[str, Any], outputs: bool = True, short: bool = False
) -> list[str]:
    """Return what the marks and numbers of these rows mean.

    config: that of the manifest, with `measures` as `quality` has it. outputs: whether `output` is shown. short: the
    rows use `short_output` and `short_n`.
    """
    measured_by = ", ".join(config.get("measures", ()))
    q, dagger = (" (q)", "† ") if short else ("", "")
    marks = {text[0] for row in rows for text in (speedup(row), own_model(row))}
    shown = {(output(row, config), row.lossless) for row in rows} if outputs else set()
    own = dict.fromkeys(row.reference for row in rows if row.reference != row.baseline)
    repeats, baseline = int(config["repeats"]), next((row.baseline for row in rows), "")
    said = {
        "invalid: numbers contradict each other, sampled tokens are biased, or the method answered from memory "
        "or outside "
        "the clock; see below": any(row.comparison == "invalid" for row in rows),
        "≈ not significant from the reference: the interval covers 1": "≈" in marks,
        f"? no interval, since there are fewer than {FEWEST} questions: how far off the value may be is not known": (
            "?" in marks
        ),
        f"n counts prompts, which are turns of fewer questions{q}: intervals resample questions, and "
        "quality is a mean over questions": any(row.n_questions != row.n_prompts for row in rows),
        f"every method answered every prompt {repeats} times; a prompt counts once in n, with its mean": repeats > 1,
        f"{NO_MEAN} ({measured_by})": any(row.quality is not None and quality(row, config) is None for row in rows),
        PROMISED: (SAMPLED, True) in shown,
        **{text: outputs and any(bias in output(row, config) for row in rows) for bias, text in BIAS.items()},
        f"{NOT_COMPARED}: the method does not promise the output of its reference": (NOT_COMPARED, False) in shown,
        f"{dagger}a method that changes the model must give that model's plain output ({', '.join(own)}); in "
        f"every row speedup and quality are relative to {baseline}": bool(own),
    }
    return [text for text, here in said.items() if here]


# checks after which no speed is a finding
DISBELIEVE = ("impossible", "invalid", "biased", "mismatch", "failed", "incomplete", "tokens")


def headline(summaries: Sequence[SummaryRow], made: Sequence[Check], placed: Mapping[str, RankRange]) -> str:
    """Return the finding over all tasks.

    made: the checks of the run; what is wrong is named before the numbers. placed: as `standings` has it.
    """
    measured = [row for row in summaries if row.category == OVERALL and row.comparison != "reference"]
    baseline = next((row.baseline for row in summaries), REFERENCE)
    rows = [
        row for row in measured if not row.reference_of
    ] or measured  # autoregressive decodings of changed models are none
    wrong = [check.name for check in made if check.state == "wrong" and check.name in DISBELIEVE]
    rows, wrong, left_out = _without_failing(summaries, rows, wrong)
    said = _fastest(rows, placed) if rows else f"Only {baseline} was measured: there is nothing to compare it with."
    said += _noise([row for row in summaries if row.category == OVERALL], rows) + left_out
    if not wrong:
        return said
    made_so_far = next((check.made for check in made if check.name == "incomplete"), None)
    if wrong == ["incomplete"] and made_so_far is not None:
        return f"Not finished: {math.floor(100 * made_so_far)} % of the samples. So far {_within(said, rows)}"
    return f"Something is wrong ({', '.join(wrong)}); until it is explained, do not rely on this: {said}"


def _without_failing(
    summaries: Sequence[SummaryRow], rows: list[SummaryRow], wrong: list[str]
) -> tuple[list[SummaryRow], list[str], str]:
    """Return the methods of which no sample failed, what is wrong beside the failures, and a sentence on the others.

    Where samples of the reference failed, failures concern every method; so they do where every method failed.
    """
    ill = failing(summaries)
    well = [row for row in rows if row.method not in ill]
    reference = next((row for row in summaries if row.category == OVERALL and row.comparison == "reference"), None)
    if not ill or not well:
        return rows, wrong, ""
    if not (reference and reference.n_failed):
        wrong = [name for name in wrong if name != "failed"]
    names = [row.method for row in rows if row.method in ill]
    said = f" Without {_some(names)}, of which samples failed." if names else ""
    return well, wrong, said


def _within(said: str, rows: Sequence[SummaryRow]) -> str:
    """Return a sentence as it stands behind other words; names of methods stay as they are."""
    named = any(said.startswith(row.method) for row in rows)
    return said if named else said[:1].lower() + said[1:]


def _fastest(rows: Sequence[SummaryRow], placed: Mapping[str, RankRange]) -> str:
    over, invalid = rows[0].baseline, [row.method for row in rows if row.comparison == "invalid"]
    known = sorted((row for row in rows if row.speedup_interval), key=lambda row: -(row.speedup or 0))
    if not known and invalid:
        return f"The numbers of {_some(invalid)} are invalid."
    if not known and not any(row.n_prompts for row in rows):
        return f"No method has an answer that can be compared with {over}'s."
    if not known:
        return f"Too few questions to tell a method from {over}: an interval takes {FEWEST}."
    best, several = known[0], len(known) > 1
    measured = f"95% interval {interval(best.speedup_interval)}"
    if faster := [row for row in known if row.comparison == "faster"]:
        best = faster[0]
        measured = f"95% interval {interval(best.speedup_interval)}"
        return f"{best.method} is {format_speedup(best.speedup)} as fast as {over} ({measured}){_of(known, placed)}."
    nearest = (
        f"({f'the fastest of {len(known)} is {best.method}: ' * several}{format_speedup(best.speedup)}, {measured})"
    )
    counts = Counter(row.comparison for row in known)
    slower, same = counts["slower"], counts["not significant"]
    if same == len(known):
        return (
            f"{'No method is' if several else f'{best.method} is not'} significantly different from {over} {nearest}."
        )
    if slower == len(known):
        which = f"All {len(known)} methods are" if several else f"{best.method} is"
        return f"{which} slower than {over} {nearest}."
    return f"No method is faster than {over}: {slower} slower, {same} not significant {nearest}."


def _noise(overall: Sequence[SummaryRow], rows: Sequence[SummaryRow]) -> str:
    """Say that the fastest method's lead may be noise, where autoregressive decoding seems as fast; '' elsewhere."""
    seems = baseline_noise(overall)
    best = max((row for row in rows if row.speedup_interval), key=lambda row: row.speedup or 0.0, default=None)
    if seems is None or best is None or not seems.holds(best):
        return ""
    return f" That may be noise: {seems.method}, which keeps one token a step, reaches {format_speedup(seems.speedup)}."


def _of(known: Sequence[SummaryRow], placed: Mapping[str, RankRange]) -> str:
    """Say where the fastest stands among the others, and which of these are not significantly different from it."""
    if len(known) == 1:
        return ""
    level = placed[known[0].method].tied_with if known[0].method in placed else ()
    near = f"; tied with {_some(level)}" if level else ""
    return f", the fastest of {len(known)} methods{near}"


def _some(names: Sequence[str], shown: int = 3) -> str:
    rest = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {rest} more" if rest > 0 else "")
