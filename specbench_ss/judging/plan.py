"""Which answers of a run are to be judged, and which of them have a verdict already. Sends nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from specbench_ss.errors import UserError, known_words
from specbench_ss.judging.prompts import WITH_REFERENCE, Asked, Message, Prompts
from specbench_ss.runs.rows import JudgeVerdict, Key, Row, Run
from specbench_ss.runs.suite import Question

CHARS_PER_TOKEN = 4  # of English text: what an estimate goes by


@dataclass(frozen=True, slots=True)
class Judge:
    """A judging model. host: where it is asked, without a key. max_tokens: the longest answer that it may give."""

    name: str
    host: str = ""
    max_tokens: int | None = None

    @classmethod
    def at(cls, name: str, base_url: str, max_tokens: int) -> Judge:
        """Return the judge behind an endpoint. Raises UserError for what is no address."""
        try:
            parts = urlsplit(base_url)
            port = f":{parts.port}" if parts.port else ""
        except ValueError as error:
            raise UserError(f"--base-url {base_url} is not an address: {error}") from None
        return cls(name, f"{parts.hostname or ''}{port}", max_tokens)


@dataclass(slots=True)
class Plan:
    """What there is to judge.

    answers: of how many samples. messages: what is to be sent, by digest. keys: the samples of each digest that have no
    verdict yet. texts: of each sample, what is rated. known: digests with a verdict already. left_out: answers that the
    prompts are not made for. damaged: answers whose question, or an answer before them, is lost.
    """

    judge: Judge
    prompts: str
    answers: int = 0
    messages: dict[str, list[Message]] = field(default_factory=dict)
    keys: dict[str, list[Key]] = field(default_factory=dict)
    known: dict[str, JudgeVerdict] = field(default_factory=dict)
    left_out: int = 0
    damaged: int = 0
    texts: dict[Key, str] = field(default_factory=dict)

    @property
    def to_send(self) -> list[str]:
        """Return the digests without a verdict, in order."""
        return [digest for digest in self.keys if digest not in self.known]

    @property
    def input_tokens(self) -> int:
        """Return about how many tokens would be sent."""
        texts = [message["content"] for digest in self.to_send for message in self.messages[digest]]
        return sum(map(len, texts)) // CHARS_PER_TOKEN


def plan(run: Run, judge: Judge, prompts: Prompts, methods: Sequence[str] = ()) -> Plan:
    """Return what is to be judged. methods: labels; none means all. Raises UserError for one that is not there."""
    for label in methods:
        if label not in run.labels:
            raise UserError(f"{run.path} has no method {label!r}{known_words(label, run.labels)}")
    questions = {question.id: question for question in run.questions}
    rows = {row.key: row for row in run.rows}
    own = run.manifest["config"].get("history") == "own"
    found = Plan(judge, prompts.label)
    by = (judge.name, prompts.label, judge.host, judge.max_tokens)
    same = [v for v in run.judged if v.by == by and v.score is not None]
    found.known = {verdict.digest: verdict for verdict in same}
    have = {(verdict.key, verdict.digest) for verdict in same}
    for row in run.rows:
        if row.text is None or (methods and row.method not in methods):
            continue
        source = (row.method, row.repeat) if own else (run.baseline, 0)
        asked = _asked(row, questions.get(row.question_id), rows, source)
        if asked is None:
            found.damaged += 1
            continue
        messages = prompts.messages(asked)
        if messages is None:
            found.left_out += 1
            continue
        found.answers += 1
        digest = hashlib.sha256(json.dumps([*by, messages]).encode()).hexdigest()
        found.messages[digest], found.texts[row.key] = messages, row.text
        if (row.key, digest) not in have:
            found.keys.setdefault(digest, []).append(row.key)
    return found


def _asked(row: Row, question: Question | None, rows: Mapping[Key, Row], source: tuple[str, int]) -> Asked | None:
    """Return the conversation as the method saw it. source: method and repeat that the earlier answers are of.

    None where a part of it is lost.
    """
    if question is None or row.turn >= len(question.turns):
        return None
    earlier = [rows.get((question.id, turn, *source)) for turn in range(row.turn)]
    if None in earlier:
        return None
    upto = question.references[: row.turn + 1] if question.category in WITH_REFERENCE else ()
    references = tuple(texts[0] for texts in upto if texts)
    whole = len(references) == row.turn + 1
    turns, before = question.turns[: row.turn + 1], [one.text or "" for one in earlier if one]
    history = tuple((message.role, message.content) for message in question.history)
    return Asked(question.category, turns, (*before, row.text or ""), references if whole else (), history)
