"""Ratings of a run's answers by a judge model.

The prompts are MT-Bench's if their file exists, else short ones of this project. Both request a rating from 1 to 10 in
double brackets.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from specbench_ss.bench.build_config import address
from specbench_ss.bench.history import HistorySource
from specbench_ss.bench.server_client import Answer, AnswerError, Server
from specbench_ss.errors import UserError, known_words
from specbench_ss.prompt_files import read_rows
from specbench_ss.runs.records import JudgeVerdict, Key, Run, SampleRecord, answer_hash
from specbench_ss.runs.run_dir import judging
from specbench_ss.suite import Question, SuiteData
from specbench_ss.user_files import read_bytes

WITH_REFERENCE = ("math", "reasoning", "coding")  # MT-Bench's categories that are judged with a reference
KINDS = ("single-v1", "single-math-v1", "single-v1-multi-turn", "single-math-v1-multi-turn")  # names in its file
Message = dict[str, str]

_RATING = re.compile(r"\[\[\s*(\d+(?:\.\d+)?)\s*\]\]")
_OWN_TASK = (
    "You rate the last answer of an assistant. First state in a few sentences whether it is correct, complete, clear "
    "and to the point; its length and its place count for nothing. Then give a whole number from 1 (useless) to 10 "
    "(excellent) in double brackets, as in [[7]]."
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """One answer with the conversation before it. references: of each turn up to this one, or none at all.

    history: messages before the first turn, each with its role and content.
    """

    category: str
    turns: tuple[str, ...]
    answers: tuple[str, ...]
    references: tuple[str, ...] = ()
    history: tuple[tuple[str, str], ...] = ()


class Prompts:
    """Judge prompts of this project. label: their name in verdicts."""

    label = "own-2"

    def messages(self, conversation: Conversation) -> list[Message] | None:
        """Return the messages for the judge; None for an unsupported conversation."""
        parts = [f"<{role}>\n{content}\n</{role}>" for role, content in conversation.history]
        for i, (turn, answer) in enumerate(zip(conversation.turns, conversation.answers, strict=True)):
            parts.append(f"<user>\n{turn}\n</user>")
            parts += [f"<reference>\n{conversation.references[i]}\n</reference>"] if conversation.references else []
            parts.append(f"<assistant>\n{answer}\n</assistant>")
        return [{"role": "system", "content": _OWN_TASK}, {"role": "user", "content": "\n\n".join(parts)}]


class FilePrompts(Prompts):
    """Prompts of a file in the format of MT-Bench's judge_prompts.jsonl, for one or two turns without history."""

    def __init__(self, path: Path) -> None:
        self.label = f"{path.stem}-{hashlib.sha256(read_bytes(path)).hexdigest()[:12]}"
        self._templates = {str(row.get("name")): (place, row) for place, row in read_rows(path)}
        missing = [kind for kind in KINDS if kind not in self._templates]
        if missing:
            raise UserError(f"{path} has no prompt {missing[0]!r}")

    def messages(self, conversation: Conversation) -> list[Message] | None:
        """Return the messages for the judge; None for a third turn, and for a history before the first one."""
        if len(conversation.turns) > 2 or conversation.history:
            return None
        place, row = self._templates[KINDS[bool(conversation.references) + 2 * (len(conversation.turns) - 1)]]
        values: dict[str, Any] = {"question": conversation.turns[0], "answer": conversation.answers[0]}
        for number, (turn, answer) in enumerate(zip(conversation.turns, conversation.answers, strict=True), start=1):
            values |= {f"question_{number}": turn, f"answer_{number}": answer}
        values |= {f"ref_answer_{number}": text for number, text in enumerate(conversation.references, start=1)}
        try:
            user = str(row["prompt_template"]).format(**values)
            return [{"role": "system", "content": str(row["system_prompt"])}, {"role": "user", "content": user}]
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise UserError(f"{place}: cannot fill this prompt: {error}") from None


def rating(text: str) -> float | None:
    """Return the last rating in double brackets divided by ten; None if there is none from 1 to 10."""
    found: Sequence[str] = _RATING.findall(text)
    value = float(found[-1]) if found else 0.0
    return value / 10 if 1 <= value <= 10 else None


CHARS_PER_TOKEN = 4  # of English text, for estimates


@dataclass(frozen=True, slots=True)
class Judge:
    """A judge model. host: of its endpoint, without a key. max_tokens: maximum length of its answers."""

    name: str
    host: str = ""
    max_tokens: int | None = None

    @classmethod
    def at(cls, name: str, base_url: str, max_tokens: int) -> Judge:
        """Return the judge at an endpoint. Raise UserError for an invalid address."""
        return cls(name, urlsplit(address(base_url, "--base-url")).netloc.lower(), max_tokens)


@dataclass(slots=True)
class Plan:
    """Answers to judge."""

    judge: Judge
    prompts: str
    answers: int = 0  # number of samples
    messages: dict[str, list[Message]] = field(default_factory=dict)  # requests, by digest
    keys: dict[str, list[Key]] = field(default_factory=dict)  # samples of each digest without a verdict
    judged: dict[str, JudgeVerdict] = field(default_factory=dict)  # digests with a verdict
    left_out: int = 0  # answers that the prompts do not support
    damaged: int = 0  # answers whose question or an earlier answer is lost
    texts: dict[Key, str] = field(default_factory=dict)  # the rated text of each sample

    @property
    def to_send(self) -> list[str]:
        """Return the digests without a verdict, in order."""
        return [digest for digest in self.keys if digest not in self.judged]

    @property
    def input_tokens(self) -> int:
        """Return an estimate of the tokens to send."""
        texts = [message["content"] for digest in self.to_send for message in self.messages[digest]]
        return sum(map(len, texts)) // CHARS_PER_TOKEN


def plan(run: Run, judge: Judge, prompts: Prompts, methods: Sequence[str] = ()) -> Plan:
    """Return the answers to judge. methods: labels; none means all. Raise UserError for an unknown one."""
    for label in methods:
        if label not in run.labels:
            raise UserError(f"{run.path} has no method {label!r}{known_words(label, run.labels)}")
    hidden = not any(question.references for question in run.questions)
    if hidden and SuiteData("", "", tuple(run.questions)).content_hash != run.manifest["suite"]["content_hash"]:
        raise UserError(f"{run.path} has no references until its end; finish the run by --resume first")
    questions = {question.id: question for question in run.questions}
    source = HistorySource.of(run)
    planned = Plan(judge, prompts.label)
    by = (judge.name, prompts.label, judge.host, judge.max_tokens)
    existing = [v for v in run.judge_verdicts if v.by == by and v.score is not None]
    planned.judged = {verdict.digest: verdict for verdict in existing}
    have = {(verdict.key, verdict.digest) for verdict in existing}
    for row in run.rows:
        if row.text is None or (methods and row.method not in methods):
            continue
        conversation = _conversation_of(row, questions.get(row.question_id), source)
        if conversation is None:
            planned.damaged += 1
            continue
        messages = prompts.messages(conversation)
        if messages is None:
            planned.left_out += 1
            continue
        planned.answers += 1
        digest = hashlib.sha256(json.dumps([*by, messages]).encode()).hexdigest()
        planned.messages[digest], planned.texts[row.key] = messages, row.text
        if (row.key, digest) not in have:
            planned.keys.setdefault(digest, []).append(row.key)
    return planned


def _conversation_of(row: SampleRecord, question: Question | None, source: HistorySource) -> Conversation | None:
    """Return the conversation of a sample; None if a part of it is lost."""
    if question is None or row.turn >= len(question.turns):
        return None
    try:
        before = source.answers(row.key, row.block)
    except LookupError:
        return None
    upto = question.references[: row.turn + 1] if question.category in WITH_REFERENCE else ()
    references = tuple(texts[0] for texts in upto if texts)
    complete = len(references) == row.turn + 1
    turns = question.turns[: row.turn + 1]
    history = tuple((message.role, message.text) for message in question.history)
    return Conversation(question.category, turns, (*before, row.text or ""), references if complete else (), history)


KEY = "OPENAI_API_KEY"


LONGEST_S = 60.0  # pause before the next request, at most

Ask = Callable[[list[Message]], Answer]
Commit = Callable[[JudgeVerdict], None]


def request_function(model: str, base_url: str, retries: int, max_tokens: int, timeout_s: float = 120.0) -> Ask:
    """Return a function that requests a rating of a judge model. It repeats requests after transient errors.

    It raises UserError if the endpoint refuses or is unreachable.
    """
    key = os.environ.get(KEY)  # local servers need none
    if key and not (key.isascii() and key.isprintable()):
        raise UserError(f"{KEY}: the key must be printable ASCII")
    server = Server("judge", base_url, key, timeout_s)
    server.model, server.key_hint = model, f"{KEY} is the variable with the key"

    def ask(messages: list[Message]) -> Answer:
        for attempt in count():
            try:
                return server.ask_whole(messages, {"max_tokens": max_tokens, "temperature": 0})
            except AnswerError as error:
                if attempt >= retries or not error.transient:
                    raise UserError(f"the judge at {server.shown_url} failed: {error}") from None
                time.sleep(min(LONGEST_S, max(error.wait_s, 0.5 * 2 ** min(attempt, 8))))
        raise AssertionError

    return ask


def judge(path: Path, plan: Plan, ask: Ask, workers: int, progress: Callable[[int, int], None]) -> int:
    """Store a verdict for every answer of the plan; return the number of replies without a rating.

    progress: called with the number of replies and the total. Raise UserError as `ask` does, after the end of running
    requests; all received verdicts are stored.
    """
    unrated = done = 0
    calls = len(plan.to_send)
    with judging(path) as commit:
        for digest in (digest for digest in plan.keys if digest in plan.judged):
            verdict = plan.judged[digest]
            _commit(plan, digest, verdict.score, Answer(text=verdict.text), commit)
        try:
            for digest, reply in _replies(plan, ask, workers):
                score, done = rating(reply.text), done + 1
                unrated += score is None
                _commit(plan, digest, score, reply, commit)
                progress(done, calls)
        except UserError as error:
            raise UserError(f"{error}; {done} of {calls} verdicts are stored; repeat the command to continue") from None
    return unrated


def _replies(plan: Plan, ask: Ask, workers: int) -> Iterator[tuple[str, Answer]]:
    """Yield digests with their replies in order of arrival. After the first error no more requests are sent."""
    with ThreadPoolExecutor(workers) as pool:
        conversation = {pool.submit(ask, plan.messages[digest]): digest for digest in plan.to_send}
        seen = set()
        try:
            for future in as_completed(conversation):
                seen.add(future)
                if error := future.exception():
                    pool.shutdown(cancel_futures=True)  # waits for running requests, which are paid for
                    rest = [f for f in conversation if f not in seen and not f.cancelled() and not f.exception()]
                    yield from ((conversation[other], other.result()) for other in rest)
                    raise error
                yield conversation[future], future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _commit(plan: Plan, digest: str, score: float | None, reply: Answer, commit: Commit) -> None:
    """Store one reply for every sample with this answer; its tokens are counted at the first of them."""
    for i, key in enumerate(plan.keys[digest]):
        tokens = (None, None) if i or not reply.tokens else (reply.prompt_tokens, reply.tokens)
        verdict = JudgeVerdict(*key, plan.judge.name, plan.prompts, digest, score, reply.text, *tokens)
        verdict.host, verdict.max_tokens = plan.judge.host, plan.judge.max_tokens
        verdict.answer = answer_hash(plan.texts[key])
        commit(verdict)
