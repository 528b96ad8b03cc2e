"""Anybody's own prompts: JSON lines, in the forms in which conversations are kept. `--suite jsonl:FILE`."""

from __future__ import annotations

from pathlib import Path

from specbench_ss.files.user_files import Row
from specbench_ss.runs.suite import Question
from specbench_ss.suites.file_suite import FileSuite
from specbench_ss.suites.questions import question_of, questions_of

OWN_CATEGORY = "prompts"  # of rows that name none


class Prompts(FileSuite):
    """The suite `jsonl`."""

    name = "jsonl"
    title = "jsonl"
    summary = "prompts of your own: jsonl:FILE, one JSON object a line with `prompt`, `messages` or `turns`"
    categories = ()  # those of the file
    needs = "jsonl:FILE, a file with one JSON object a line that has `prompt`, `messages` or `turns`"
    max_new_tokens = 256

    def read(self, data: Path) -> tuple[Question, ...]:
        """Return the questions of a file; `id` (or `question_id`), `category`, `reference`, `metric` are optional."""
        return questions_of(data, _question)


def _question(place: str, number: int, row: Row) -> Question:
    name = next((row[key] for key in ("question_id", "id") if row.get(key) is not None), number)
    asked = {"question_id": name, "category": row.get("category") or OWN_CATEGORY, "turns": _turns(place, row)}
    return question_of(place, asked | {key: row.get(key) for key in ("reference", "metric")}, {})


def _turns(place: str, row: Row) -> list[str]:
    """Return what the user says, turn by turn; a system message stands before the first turn."""
    from specbench_ss.training.text.conversations import read_conversation

    said = read_conversation(place, row, prompts_only=True).questions
    turns = [message["content"] for message in said if message["role"] == "user"]
    system = [message["content"] for message in said if message["role"] == "system"]
    return ["\n\n".join([*system, *turns[:1]]), *turns[1:]] if turns else []
