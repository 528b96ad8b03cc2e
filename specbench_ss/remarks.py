"""A row of the results in words, and the notes that explain its marks: the same in the terminal and in the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specbench_ss.intervals import FEWEST
from specbench_ss.stats import SummaryRow
from specbench_ss.words import MISSING, times

MARKS = {"not distinguishable": "≈", "too few": "?"}


def speedup(row: SummaryRow) -> str:
    """'≈ 1.13×' where the interval covers 1, '? 1.61×' where there is none."""
    text = times(row.speedup)
    mark = MARKS.get(row.comparison, "") if text != MISSING else ""
    return f"{mark} {text}" if mark else text


def counts(row: SummaryRow) -> list[str]:
    """What n leaves unsaid: '52 questions', where prompts are turns of fewer questions, and '4 failed'."""
    questions = [f"{row.n_questions:,} questions"] if row.n_questions != row.n_prompts else []
    return questions + ([f"{row.n_failed:,} failed"] if row.n_failed else [])


def n(row: SummaryRow) -> str:
    """'84 (52 questions, 4 failed)'."""
    more = counts(row)
    return f"{row.n_prompts:,} ({', '.join(more)})" if more else f"{row.n_prompts:,}"


def notes(rows: Sequence[SummaryRow], config: Mapping[str, Any]) -> list[str]:
    """What the marks and numbers mean that these rows bear. config: the manifest's."""
    marks, repeats = {speedup(row)[0] for row in rows}, int(config["repeats"])
    said = {
        "≈ not distinguishable from the reference: the interval covers 1": "≈" in marks,
        f"? no interval, since there are fewer than {FEWEST} questions: how far off the value may be is not known": (
            "?" in marks
        ),
        "n counts prompts, which are turns of fewer questions: intervals resample questions, quality is a mean over "
        "questions": any(row.n_questions != row.n_prompts for row in rows),
        f"every method answered every prompt {repeats} times; a prompt counts once in n, with its mean": repeats > 1,
    }
    return [text for text, here in said.items() if here]
