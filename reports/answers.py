"""One question of each category with what every method answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specbench_ss.config import REFERENCE
from specbench_ss.reports.palette import Style
from specbench_ss.rows import Key, Row, Run, Sameness
from specbench_ss.words import number, title

VERDICTS = {
    "identical": ("same output", "good"),
    "near-tie": ("near-tie", "note"),
    "length": ("other length", "note"),
    "mismatch": ("mismatch", "bad"),
    "not compared": ("not compared", ""),
}


@dataclass(frozen=True, slots=True)
class Answer:
    """One method's answer. verdict: (text, tag of its pill) against the reference; None for the reference."""

    label: str
    style: Style
    text: str
    meta: str
    verdict: tuple[str, str] | None


@dataclass(frozen=True, slots=True)
class Turn:
    """What was asked and what came back."""

    number: int
    prompt: str
    references: Sequence[str]
    answers: Sequence[Answer]


@dataclass(frozen=True, slots=True)
class Example:
    """A question with all its turns."""

    category: str
    question_id: str
    turns: Sequence[Turn]


def examples(run: Run, styles: Mapping[str, Style]) -> list[Example]:
    """The first question of each category, first repeat."""
    rows = {row.key: row for row in run.rows}
    verdicts = {verdict.key: verdict for verdict in run.sameness}
    found: dict[str, Example] = {}
    for question in run.questions:
        if question.category in found:
            continue
        turns = []
        for turn, prompt in enumerate(question.turns):
            keys = [(question.id, turn, label, 0) for label in styles]
            answers = [_answer(rows[key], styles[key[2]], verdicts) for key in keys if key in rows]
            references = question.references[turn] if turn < len(question.references) else ()
            if answers:
                turns.append(Turn(turn + 1, prompt, references, answers))
        if turns:
            found[question.category] = Example(title(question.category), question.id, turns)
    return list(found.values())


def _answer(row: Row, style: Style, verdicts: Mapping[Key, Sameness]) -> Answer:
    if not row.ok:
        return Answer(row.method, style, row.error or "", "failed", ("failed", "bad"))
    rate = row.tokens / row.wall_s if row.tokens and row.wall_s else None
    tau = (row.tokens - (row.prefill_tokens or 0)) / row.steps if row.tokens and row.steps else None
    parts = [f"{row.tokens} tokens", f"{number(rate, 1)} tokens/s", f"τ {number(tau)}", f"ended by {row.finish}"]
    if row.quality is not None:
        parts.append(f"quality {number(row.quality)}")
    verdict = verdicts.get(row.key)
    pill = None if row.method == REFERENCE or verdict is None else VERDICTS[verdict.verdict]
    return Answer(row.method, style, row.text or "", " · ".join(parts), pill)
