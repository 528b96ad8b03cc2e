"""Quality metrics by name. Every metric takes an answer and its acceptable references and returns a score in [0, 1].

This package knows no suite. The library behind a metric is imported when the metric is first used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specbench_ss.errors import UserError, did_you_mean
from specbench_ss.runs.suite import Question
from specbench_ss.suites.scorers import answers, boxed, overlap, sql

Metric = Callable[[str, Sequence[str]], float]

METRICS: dict[str, Metric] = {
    "exact_sql": sql.exact_sql,
    "numeric": answers.numeric,
    "boxed": boxed.boxed,
    "token_f1": answers.token_f1,
    "em": answers.exact_match,
    "contains": answers.contains,
    "rouge_1": overlap.rouge_1,
    "rouge_2": overlap.rouge_2,
    "rouge_l": overlap.rouge_l,
    "rouge_lsum": overlap.rouge_lsum,
    "bleu": overlap.bleu,
    "chrf": overlap.chrf,
}


def score(metric: str, answer: str, references: Sequence[str]) -> float:
    """Return the best score of the answer over the references, or 0 where there are none."""
    if metric not in METRICS:
        raise UserError(f"unknown metric {metric!r}{did_you_mean(metric, METRICS)}")
    if not references:
        return 0.0
    return min(1.0, max(0.0, METRICS[metric](answer, references)))


def score_turn(question: Question, turn: int, answer: str) -> float | None:
    """Return what `Suite.score` returns: None where the question has no metric or the turn has no reference."""
    references = question.references[turn] if turn < len(question.references) else ()
    if question.metric is None or not references:
        return None
    return score(question.metric, answer, references)
