"""Answers of a run that have no verdict on whether they are the reference's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from specbench_ss.runs.baseline import baseline_of
from specbench_ss.runs.rows import Key, OfSample, Row, Run


def is_held(row: OfSample, baseline: str) -> bool:
    """Say whether an answer is held against another one: all are, except the first ones of the run's reference."""
    return row.method != baseline or row.repeat != 0


def held_against(row: OfSample, manifest: Mapping[str, Any]) -> Key:
    """Return the sample that an answer is held against; repeats of the run's reference, against its first."""
    if row.method == (baseline := baseline_of(manifest)):
        return (row.question_id, row.turn, baseline, 0)
    references = {method["label"]: method.get("reference", baseline) for method in manifest["methods"]}
    return (row.question_id, row.turn, references.get(row.method, baseline), row.repeat)


def without_verdict(run: Run) -> list[Row]:
    """Return the good samples that should have a verdict on their answer and have none.

    In a run that has not ended, questions that are still being answered have none yet.
    """
    judged, pending = {verdict.key for verdict in run.sameness}, _pending(run)
    held = (row for row in run.rows if row.ok and is_held(row, run.baseline))
    return [row for row in held if row.key not in judged and row.question_id not in pending]


def _pending(run: Run) -> set[str]:
    """Return the questions of which samples are missing in a run that has not ended."""
    if run.manifest.get("status") == "complete":
        return set()
    made = Counter(row.question_id for row in run.rows)
    whole = {question.id: len(question.turns) * run.repeats * len(run.labels) for question in run.questions}
    return {question for question, n in made.items() if n < whole.get(question, n)}


def unjudged(run: Run) -> list[Row]:
    """Return those of a complete run: their verdicts are lost, where those of an unfinished run may still come."""
    return without_verdict(run) if run.manifest.get("status") == "complete" else []
