"""Spec-Bench's answer files, one a method: a JSON line for each question. This module only reads and writes them.

A line has question_id, category, model_id, tstamp and choices, one for each repeat. A choice has a list with an entry
for each turn of `turns` (texts), `decoding_steps`, `new_tokens` and `wall_time`, and `accept_lengths`, the tokens of
every step of all its turns, the bonus included.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from specbench_ss.errors import UserError
from specbench_ss.files.user_files import read_bytes
from specbench_ss.runs.rows import Row, Run

FAILED = "ERROR"  # what Spec-Bench writes as the text of a turn that failed, beside numbers of the turn before


class Choice(msgspec.Struct):
    """All turns of one question, answered once."""

    turns: list[str]
    decoding_steps: list[int]
    new_tokens: list[int]
    wall_time: list[float]
    accept_lengths: list[int] = []
    index: int = 0


class Answer(msgspec.Struct):
    """A line of an answer file."""

    question_id: int | str
    choices: list[Choice]
    category: str = ""
    model_id: str = ""
    tstamp: float | None = None


def read_answers(file: Path) -> list[Answer]:
    """Return the lines of an answer file; of several lines with the same question, the last one, as Spec-Bench does.

    Raises UserError for a line that is none.
    """
    lines = read_bytes(file).splitlines()
    answers = [_answer(f"{file}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not answers:
        raise UserError(f"{file} holds no answers")
    return list({str(answer.question_id): answer for answer in answers}.values())


def _answer(place: str, line: bytes) -> Answer:
    try:
        answer = msgspec.json.decode(line, type=Answer)
    except (msgspec.DecodeError, RecursionError) as e:
        raise UserError(f"{place}: not a line of a Spec-Bench answer file: {e}") from None
    for choice in answer.choices:
        lengths = {len(part) for part in (choice.turns, choice.decoding_steps, choice.new_tokens, choice.wall_time)}
        if len(lengths) > 1 or min([*choice.new_tokens, *choice.decoding_steps, *choice.accept_lengths], default=0) < 0:
            raise UserError(f"{place}: lists of different lengths, or a negative count")
    return answer


def write_answers(run: Run, folder: Path) -> list[str]:
    """Write an answer file for each method of a run into a folder; return what was left out, a sentence each.

    Only whole repeats of a question are written: a turn that failed has no numbers. Raises UserError for a run of
    served engines.
    """
    if run.manifest["config"].get("endpoints"):
        raise UserError("Spec-Bench's answer files hold the steps of an answer, which servers do not tell")
    told, names = [], file_names(run.labels)
    turns = {question.id: len(question.turns) for question in run.questions}
    for label in run.labels:
        lines, lacking = [], 0
        for answers in _by_question([row for row in run.rows if row.method == label]):
            whole = [rows for rows in answers if _whole(rows, turns.get(rows[0].question_id))]
            lacking += len(answers) - len(whole)
            if whole:
                lines.append(_line(run, label, whole))
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (folder / names[label]).write_bytes(text.encode("utf-8", "replace"))
        if lacking:
            told.append(f"{label}: {lacking} answers with failed or missing turns are left out")
    return told


def file_names(labels: Sequence[str]) -> dict[str, str]:
    """Return a file name for each label, none twice: what a file system may not take is replaced."""
    names: dict[str, str] = {}
    for label in labels:
        stem = plain = re.sub(r"[^\w.,=\[\]#-]+", "_", label)[:100]
        while f"{stem}.jsonl" in names.values():
            stem = f"{plain}-{len(names)}"
        names[label] = f"{stem}.jsonl"
    return names


def _by_question(rows: Sequence[Row]) -> Iterator[list[list[Row]]]:
    """Yield for each question its repeats, each a list of turns in order."""
    questions: dict[str, dict[int, list[Row]]] = {}
    for row in sorted(rows, key=lambda row: (row.repeat, row.turn)):
        questions.setdefault(row.question_id, {}).setdefault(row.repeat, []).append(row)
    for repeats in questions.values():
        yield list(repeats.values())


def _whole(rows: Sequence[Row], turns: int | None) -> bool:
    return all(row.ok for row in rows) and [row.turn for row in rows] == list(range(turns or len(rows)))


def _line(run: Run, label: str, answers: Sequence[Sequence[Row]]) -> dict[str, Any]:
    first, model = answers[0][0], run.manifest["model"]
    return {
        "question_id": int(first.question_id) if first.question_id.isdecimal() else first.question_id,
        "category": first.category,
        "model_id": f"{model['name']}-{label}-{model['dtype']}",
        "choices": [_choice(run, rows) for rows in answers],
        "tstamp": max(row.ended or 0.0 for rows in answers for row in rows),
    }


def _choice(run: Run, rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "index": rows[0].repeat,
        "turns": [row.text for row in rows],
        "decoding_steps": [row.steps for row in rows],
        "new_tokens": [row.tokens for row in rows],
        "wall_time": [row.wall_s for row in rows],
        "accept_lengths": [n for row in rows for n in run.steps.of(row.key).tokens.tolist()],
    }
