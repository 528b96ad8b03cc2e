"""Recorded drafts for a run that was made up: every step drafts two tokens and keeps as many as its record has."""

from __future__ import annotations

from pathlib import Path

from specbench_ss import storage
from specbench_ss.runs.run_dir import DRAFTS, Drafts, DraftStep, read_run


def record(run_dir: Path, question: str, text: str = " word") -> None:
    """Write the drafts of every method's answer to a question; `ar` drafts nothing."""
    run = read_run(run_dir)
    made = []
    for row in run.rows:
        if row.question_id == question and row.repeat == 0:
            steps = [_step(tokens, text, row.method != "ar") for tokens in run.steps.of(row.key).tokens.tolist()]
            made.append(Drafts(*row.key, same_answer=True, steps=steps))
    with (run_dir / DRAFTS).open("ab", buffering=0) as file:
        storage.append(file, made)


def _step(tokens: int, text: str, drafts: bool) -> DraftStep:
    """A chain of as many nodes as were kept, and a rejected sibling of the first."""
    kept = list(range(tokens)) if drafts else [0]
    nodes = [*kept, tokens] if drafts else [0]
    parents = [*range(-1, tokens - 1), 0] if drafts else [-1]
    p: list[float | None] = [None, *(0.5 for _ in nodes[1:])]
    return DraftStep(nodes, parents, [text for _ in nodes], kept, 7, ".", [], p)
