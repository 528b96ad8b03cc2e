"""Which answers of a run are to be judged, and which of them have a verdict already. Sends nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specbench_ss.errors import UserError, known_words
from specbench_ss.judging.prompts import WITH_REFERENCE, Asked, Message, Prompts
from specbench_ss.method_spec import REFERENCE
from specbench_ss.runs.rows import JudgeVerdict, Key, Row, Run
from specbench_ss.runs.suite import Question

CHARS_PER_TOKEN = 4  # of English text: what an estimate goes by


@dataclass(slots=True)
class Plan:
    """What there is to judge.

    answers: of how many samples. messages: what is to be sent, by digest. keys: the samples of each digest that have no
    verdict yet. known: digests with a verdict already. left_out: answers that the prompts are not made for.
    """

    judge: str
    prompts: str
    answers: int = 0
    messages: dict[str, list[Message]] = field(default_factory=dict)
    keys: dict[str, list[Key]] = field(default_factory=dict)
    known: dict[str, JudgeVerdict] = field(default_factory=dict)
    left_out: int = 0

    @property
    def to_send(self) -> list[str]:
        """Return the digests without a verdict, in order."""
        return [digest for digest in self.keys if digest not in self.known]

    @property
    def input_tokens(self) -> int:
        """Return about how many tokens would be sent."""
        texts = [message["content"] for digest in self.to_send for message in self.messages[digest]]
        return sum(map(len, texts)) // CHARS_PER_TOKEN


def plan(run: Run, judge: str, prompts: Prompts, methods: Sequence[str] = ()) -> Plan:
    """Return what is to be judged. methods: labels; none means all. Raises UserError for one that is not there."""
    for label in methods:
        if label not in run.labels:
            raise UserError(f"{run.path} has no method {label!r}{known_words(label, run.labels)}")
    questions = {question.id: question for question in run.questions}
    rows = {row.key: row for row in run.rows}
    own = run.manifest["config"].get("history") == "own"
    found = Plan(judge, prompts.label)
    same = [v for v in run.judged if (v.judge, v.prompts) == (judge, prompts.label) and v.score is not None]
    found.known = {verdict.digest: verdict for verdict in same}
    have = {(verdict.key, verdict.digest) for verdict in same}
    for row in run.rows:
        question = questions.get(row.question_id)
        if row.text is None or question is None or (methods and row.method not in methods):
            continue
        messages = prompts.messages(_asked(row, question, rows, own))
        if messages is None:
            found.left_out += 1
            continue
        found.answers += 1
        digest = hashlib.sha256(json.dumps([judge, prompts.label, messages]).encode()).hexdigest()
        found.messages[digest] = messages
        if (row.key, digest) not in have:
            found.keys.setdefault(digest, []).append(row.key)
    return found


def _asked(row: Row, question: Question, rows: Mapping[Key, Row], own: bool) -> Asked:
    """Return the conversation as the method saw it: with the reference's earlier answers, or with its own."""
    source = (row.method, row.repeat) if own else (REFERENCE, 0)
    earlier = [rows[question.id, turn, *source].text or "" for turn in range(row.turn)]
    upto = question.references[: row.turn + 1] if question.category in WITH_REFERENCE else ()
    references = tuple(texts[0] for texts in upto if texts)
    whole = len(references) == row.turn + 1
    turns = question.turns[: row.turn + 1]
    return Asked(question.category, turns, (*earlier, row.text or ""), references if whole else ())
