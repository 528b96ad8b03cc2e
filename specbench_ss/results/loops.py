"""How many of the reference's answers end in a repetition, where methods that copy have an easy task."""

from __future__ import annotations

from collections.abc import Sequence

from specbench_ss.runs.rows import Run

TAIL = 32  # tokens at the end of an answer that are looked at
LONGEST = 8  # tokens that repeat themselves, at most
MANY = 0.1  # of the answers: from here on it is said


def repeats_itself(ids: Sequence[int]) -> bool:
    """Say whether the last TAIL tokens are one n-gram of at most LONGEST tokens again and again: four times or more."""
    tail = list(ids[-TAIL:])
    return len(tail) == TAIL and any(tail[n:] == tail[:-n] for n in range(1, LONGEST + 1))


def loops(run: Run) -> str:
    """Say how many of the reference's answers end in a repetition; '' where these are less than a tenth."""
    answers = [row.token_ids for row in run.rows if row.ok and row.method == run.baseline and row.token_ids]
    looping = sum(map(repeats_itself, answers))
    if not answers or looping < MANY * len(answers):
        return ""
    return (
        f"{looping:,} of {len(answers):,} answers of {run.baseline} end in a repetition: methods that copy gain there."
    )
