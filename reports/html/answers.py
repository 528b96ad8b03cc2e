"""One question of each category with what every method answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specbench_ss.method_spec import REFERENCE
from specbench_ss.reports.html.palette import Style
from specbench_ss.results import verdict_text
from specbench_ss.results.number_text import number, title
from specbench_ss.results.summary import SummaryRow
from specbench_ss.runs.rows import Row, Run, Sameness

VERDICTS = {
    "identical": ("same output", "good"),
    "near-tie": ("near-tie", "note"),
    "length": ("other length", "note"),
    "mismatch": ("mismatch", "bad"),
    "not compared": ("not compared", ""),
}


@dataclass(frozen=True, slots=True)
class Answer:
    """One method's answer. verdict: (text, tag of its pill) against its reference; None for the run's reference."""

    label: str
    style: Style
    text: str
    meta: str
    verdict: tuple[str, str] | None


@dataclass(frozen=True, slots=True)
class Turn:
    """What was asked in one turn, and what came back."""

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


def examples(run: Run, overall: Mapping[str, SummaryRow], styles: Mapping[str, Style]) -> list[Example]:
    """Return the first question of each category, with the answers of the first repeat."""
    rows = {row.key: row for row in run.rows}
    verdicts = {verdict.key: verdict for verdict in run.sameness}
    found: dict[str, Example] = {}
    for question in run.questions:
        if question.category in found:
            continue
        turns = []
        for turn, prompt in enumerate(question.turns):
            keys = [(question.id, turn, label, 0) for label in styles]
            made = [rows[key] for key in keys if key in rows]
            pills = [_pill(row, verdicts.get(row.key), overall[row.method], run.manifest["config"]) for row in made]
            answers = [_answer(row, styles[row.method], pill) for row, pill in zip(made, pills, strict=True)]
            references = question.references[turn] if turn < len(question.references) else ()
            if answers:
                turns.append(Turn(turn + 1, prompt, references, answers))
        if turns:
            found[question.category] = Example(title(question.category), question.id, turns)
    return list(found.values())


def _answer(row: Row, style: Style, pill: tuple[str, str] | None) -> Answer:
    if not row.ok:
        return Answer(row.method, style, row.error or "", "failed", pill)
    rate = row.tokens / row.wall_s if row.tokens and row.wall_s else None
    tau = (row.tokens - (row.prefill_tokens or 0)) / row.steps if row.tokens and row.steps else None
    parts = [f"{row.tokens} tokens", f"{number(rate, 1)} tokens/s", f"τ {number(tau)}", f"ended by {row.finish}"]
    if row.quality is not None:
        parts.append(f"quality {number(row.quality)}")
    return Answer(row.method, style, row.text or "", " · ".join(parts), pill)


def _pill(row: Row, verdict: Sameness | None, summary: SummaryRow, config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return (text, tag) of how the answer compares with its reference's.

    The text names a reference that is not the run's own.
    """
    if not row.ok:
        return ("failed", "bad")
    if row.method == REFERENCE or verdict is None:
        return None
    if verdict.verdict == verdict_text.NOT_COMPARED:
        sampled = summary.lossless and config["temperature"]
        named = verdict_text.output(summary, config) if summary.reference_of else verdict_text.NOT_COMPARED
        return (verdict_text.SAMPLED if sampled else named, "")
    text, tag = VERDICTS[verdict.verdict]
    if summary.reference == REFERENCE:
        return (text, tag)
    return (f"{text} {'as' if verdict.verdict == 'identical' else 'against'} {summary.reference}", tag)
