"""Prompts of one's own: JSON lines in the common forms of conversations. `--suite jsonl:FILE`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specbench_ss.conversations import COLUMNS, FORMS, SYSTEM, read_messages, unread_keys
from specbench_ss.errors import UserError
from specbench_ss.suite import Message, Question
from specbench_ss.suites.file_suite import FileSuite
from specbench_ss.suites.questions import question_of, questions_of
from specbench_ss.user_files import Row

OWN_CATEGORY = "prompts"  # of rows that name none
OWN_COLUMNS = {SYSTEM, "id", "question_id", "category", "reference", "metric"}
MOST_NAMED = 6  # keys that one note lists


class Prompts(FileSuite):
    """The suite `jsonl`."""

    name = "jsonl"
    title = "jsonl"
    summary = "prompts of your own: jsonl:FILE, one JSON object a line with `prompt`, `messages` or `turns`"
    categories = ()  # those of the file
    needs = "jsonl:FILE, a file with one JSON object a line that has `prompt`, `messages` or `turns`"
    max_new_tokens = 256

    def __init__(self) -> None:
        self.unread: dict[str, list[str]] = {}

    def read(self, data: Path) -> tuple[Question, ...]:
        """Return the questions of a file; `id` (or `question_id`), `category`, `reference`, `metric` are optional."""
        self.unread = {"columns": [], "keys of messages": []}
        return questions_of(data, self._question)

    def notes(self) -> tuple[str, ...]:
        """Name what the rows hold besides and the model is not given."""
        return tuple(f"{kind} that are not read: {_listed(names)}" for kind, names in self.unread.items() if names)

    def _question(self, place: str, number: int, row: Row) -> Question:
        form = _form(place, row)
        self.unread["columns"] += [key for key in row if key not in {*COLUMNS[form], *OWN_COLUMNS} and row[key]]
        self.unread["keys of messages"] += unread_keys({form: row[form]})
        name = next((row[key] for key in ("question_id", "id") if row.get(key) is not None), number)
        common = {key: row.get(key) for key in ("reference", "metric")}
        asked = {**common, "question_id": name, "category": row.get("category") or OWN_CATEGORY}
        return _by_turns(place, row, asked) if form == "turns" else _by_messages(place, form, row, asked)


def _form(place: str, row: Row) -> str:
    """Return the form of a row. Raises UserError for two forms, unless `prompt` repeats a message of the first."""
    forms = [key for key in COLUMNS if row.get(key) is not None]
    if not forms:
        raise UserError(f"{place}: none of the known columns: {FORMS}; there are {', '.join(row) or 'none'}")
    if len(forms) == 1 or (forms[1:] == ["prompt"] and _repeats(row[forms[0]], row["prompt"])):
        return forms[0]
    raise UserError(f"{place}: both {forms[0]!r} and {forms[1]!r}; keep one")


def _repeats(entries: Any, prompt: object) -> bool:
    contents = [entry.get("content", entry.get("value")) for entry in entries if isinstance(entry, dict)]
    return prompt in contents


def _by_turns(place: str, row: Row, asked: Row) -> Question:
    """Return the question whose turns the model answers one after the other."""
    messages = read_messages(place, row, prompts_only=True)
    history = messages[:1] if row.get(SYSTEM) else []
    turns = [message["content"] for message in messages[len(history) :]]
    if not turns or not all(turn.strip() for turn in turns):
        raise UserError(f"{place}: 'turns' must be a list of texts, none of them empty")
    return _with_history(question_of(place, asked | {"turns": turns}, {}), history)


def _by_messages(place: str, form: str, row: Row, asked: Row) -> Question:
    """Return the question that the user's last message asks; an answer after it is its reference."""
    messages = read_messages(place, row, prompts_only=True)
    ending = ", ".join(message["role"] for message in messages[-2:])
    answer = messages.pop()["content"] if messages and messages[-1]["role"] == "assistant" else ""
    if not any(message["role"] == "user" for message in messages):
        raise UserError(f"{place}: {form!r} holds no message of the user")
    *history, last = messages
    if last["role"] != "user":
        raise UserError(f"{place}: {form!r} ends with {ending}; it must end with user, or with user, assistant")
    if not last["content"].strip():
        raise UserError(f"{place}: {form!r}: the user's last message is empty")
    if answer.strip():
        if asked["reference"] is not None:
            raise UserError(f"{place}: both 'reference' and an answer at the end of {form!r}; keep one")
        asked = asked | {"reference": [answer]}
    return _with_history(question_of(place, asked | {"turns": [last["content"]]}, {}), history)


def _with_history(question: Question, history: Sequence[dict[str, str]]) -> Question:
    return replace(question, history=tuple(Message(**message) for message in history))


def _listed(names: Sequence[str]) -> str:
    different = sorted(set(names))
    more = [f"{len(different) - MOST_NAMED} more"] if len(different) > MOST_NAMED else []
    return ", ".join([*different[:MOST_NAMED], *more])
