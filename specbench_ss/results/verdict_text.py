"""A row of the results in words, and notes that explain its marks: the same in the terminal and in the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specbench_ss.results.intervals import FEWEST, Comparison, Interval, compare
from specbench_ss.results.number_text import MISSING, interval, sameness, times
from specbench_ss.results.quality import measures
from specbench_ss.results.summary import OVERALL, SummaryRow
from specbench_ss.runs.betting_score import BIASED
from specbench_ss.runs.rows import Run

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
MARKS = {"not distinguishable": "≈", "too few": "?"}


def config_of(run: Run) -> dict[str, Any]:
    """Return the configuration of a run's manifest, with the repeats that were made and what tasks are scored by."""
    return {**run.manifest["config"], "repeats": run.repeats, "measures": measures(run.questions)}


def speedup(row: SummaryRow) -> str:
    """Return a speedup as in '≈ 1.13×' where the interval covers 1, or '? 1.61×' where there is none."""
    return _marked(row.speedup, row.comparison)


def _marked(value: float | None, comparison: Comparison) -> str:
    if comparison == "void":
        return "void"
    mark = "" if value is None else MARKS.get(comparison, "")
    return f"{mark} {times(value)}" if mark else times(value)


def output(row: SummaryRow, config: Mapping[str, Any]) -> str:
    """Say how its answers compare with its reference's: 'identical', 'sampled', 'identical to ss-shared-ar'.

    How the repeats of the run's reference compare is among the findings. config: that of the manifest.
    """
    if row.comparison == "reference":
        return "reference"
    if row.reference_of:
        return f"reference of {', '.join(row.reference_of)}"
    said = _sampled(row) if row.bias else sameness(row.sameness)
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
    """Return what a method that changes the model gains over plain decoding of that model: '1.52× (1.41–1.66)'."""
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
    return _difference(row, row.judged_difference, row.judged_interval)


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
        "void: numbers contradict each other, sampled tokens are biased, or the method answered from memory or outside "
        "the clock; see below": any(row.comparison == "void" for row in rows),
        "≈ not distinguishable from the reference: the interval covers 1": "≈" in marks,
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
