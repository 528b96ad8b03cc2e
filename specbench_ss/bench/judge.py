"""Ratings of a run's answers by a judge model.

The prompts are MT-Bench's, from its own file, where there is one; else the project's own short ones. Both ask for a
rating from 1 to 10 in double brackets.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from specbench_ss.errors import UserError, first_line, known_words
from specbench_ss.runs.records import JudgeVerdict, Key, Run, SampleRecord, answer_hash
from specbench_ss.runs.run_dir import judging
from specbench_ss.suite import Question
from specbench_ss.user_files import read_bytes, read_rows

WITH_REFERENCE = ("math", "reasoning", "coding")  # MT-Bench's categories whose answers are held against a reference
KINDS = ("single-v1", "single-math-v1", "single-v1-multi-turn", "single-math-v1-multi-turn")  # names in its file
Message = dict[str, str]

_RATING = re.compile(r"\[\[\s*(\d+(?:\.\d+)?)\s*\]\]")
_OWN_TASK = (
    "You rate the last answer of an assistant. Say first, in a few sentences, whether it is correct, complete, clear "
    "and to the point; its length and its place count for nothing. Then give a whole number from 1 (useless) to 10 "
    "(excellent) in double brackets, as in [[7]]."
)


@dataclass(frozen=True, slots=True)
class Asked:
    """One answer with all that was said before it. references: of each turn up to this one, or none at all.

    history: messages before the first turn, each with its role and content.
    """

    category: str
    turns: tuple[str, ...]
    answers: tuple[str, ...]
    references: tuple[str, ...] = ()
    history: tuple[tuple[str, str], ...] = ()


class Prompts:
    """The project's own prompts. label: what they are called in verdicts."""

    label = "own-1"

    def messages(self, asked: Asked) -> list[Message] | None:
        """Return what the judge is sent; None for an answer that these prompts are not made for."""
        parts = [f"<{role}>\n{content}\n</{role}>" for role, content in asked.history]
        for i, (turn, answer) in enumerate(zip(asked.turns, asked.answers, strict=True)):
            parts.append(f"<user>\n{turn}\n</user>")
            parts += [f"<reference>\n{asked.references[i]}\n</reference>"] if asked.references else []
            parts.append(f"<assistant>\n{answer}\n</assistant>")
        return [{"role": "system", "content": _OWN_TASK}, {"role": "user", "content": "\n\n".join(parts)}]


class FilePrompts(Prompts):
    """Prompts of a file in the form of MT-Bench's judge_prompts.jsonl, for one or two turns without history."""

    def __init__(self, path: Path) -> None:
        self.label = f"{path.stem}-{hashlib.sha256(read_bytes(path)).hexdigest()[:12]}"
        self._templates = {str(row.get("name")): (place, row) for place, row in read_rows(path)}
        missing = [kind for kind in KINDS if kind not in self._templates]
        if missing:
            raise UserError(f"{path} has no prompt {missing[0]!r}")

    def messages(self, asked: Asked) -> list[Message] | None:
        """Return what the judge is sent; None for a third turn, and where messages stand before the first one."""
        if len(asked.turns) > 2 or asked.history:
            return None
        place, row = self._templates[KINDS[bool(asked.references) + 2 * (len(asked.turns) - 1)]]
        values: dict[str, Any] = {"question": asked.turns[0], "answer": asked.answers[0]}
        for number, (turn, answer) in enumerate(zip(asked.turns, asked.answers, strict=True), start=1):
            values |= {f"question_{number}": turn, f"answer_{number}": answer}
        values |= {f"ref_answer_{number}": text for number, text in enumerate(asked.references, start=1)}
        try:
            user = str(row["prompt_template"]).format(**values)
            return [{"role": "system", "content": str(row["system_prompt"])}, {"role": "user", "content": user}]
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise UserError(f"{place}: cannot fill this prompt: {error}") from None


def rating(text: str) -> float | None:
    """Return the last rating in double brackets, over ten; None where there is none from 1 to 10."""
    found: Sequence[str] = _RATING.findall(text)
    value = float(found[-1]) if found else 0.0
    return value / 10 if 1 <= value <= 10 else None


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
    same = [v for v in run.judge_verdicts if v.by == by and v.score is not None]
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


def _asked(
    row: SampleRecord, question: Question | None, rows: Mapping[Key, SampleRecord], source: tuple[str, int]
) -> Asked | None:
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


KEY = "OPENAI_API_KEY"


@dataclass(frozen=True, slots=True)
class Reply:
    """What the judge said. input_tokens, output_tokens: as the endpoint counts them, where it does."""

    text: str
    input_tokens: int | None
    output_tokens: int | None


class Endpoint:
    """One judging model. Requests that may pass by themselves are tried again by the package, with growing pauses.

    Raises UserError where the package is missing.
    """

    def __init__(self, model: str, base_url: str, retries: int, max_tokens: int, timeout: float = 120.0) -> None:
        try:
            import openai
        except ImportError:
            raise UserError("a judge needs the package openai: pip install -e '.[judge]'") from None
        self.model, self.base_url, self.max_tokens = model, base_url, max_tokens
        key = os.environ.get(KEY) or "none"  # a server of one's own asks for no key
        self._client = openai.OpenAI(api_key=key, base_url=base_url, max_retries=retries, timeout=timeout)
        self._failure: type[Exception] = openai.OpenAIError

    def ask(self, messages: list[Message]) -> Reply:
        """Return the judge's answer. Raises UserError where the endpoint refuses, or cannot be reached."""
        request: dict[str, Any] = {"model": self.model, "messages": messages, "max_tokens": self.max_tokens}
        try:
            done = self._client.chat.completions.create(**request, temperature=0)
        except self._failure as error:
            raise UserError(f"the judge at {self.base_url} failed: {first_line(error)}") from None
        if not getattr(done, "choices", None):  # a page of HTML comes as text
            raise UserError(f"the judge at {self.base_url} gave no answer of the kind that OpenAI endpoints give")
        usage = done.usage
        counted = (usage.prompt_tokens, usage.completion_tokens) if usage else (None, None)
        return Reply(done.choices[0].message.content or "", *counted)


Ask = Callable[[list[Message]], Reply]
Commit = Callable[[JudgeVerdict], None]


def judge(path: Path, plan: Plan, ask: Ask, workers: int, told: Callable[[int, int], None]) -> int:
    """Commit a verdict for every answer of the plan; return how many replies had no rating.

    told: is given how many replies there are, and of how many. Raises UserError as `ask` does, once the requests that
    were under way have ended; every verdict that came is kept.
    """
    unrated = done = 0
    calls = len(plan.to_send)
    with judging(path) as commit:
        for digest in (digest for digest in plan.keys if digest in plan.known):
            known = plan.known[digest]
            _commit(plan, digest, known.score, Reply(known.text, None, None), commit)
        try:
            for digest, reply in _replies(plan, ask, workers):
                score, done = rating(reply.text), done + 1
                unrated += score is None
                _commit(plan, digest, score, reply, commit)
                told(done, calls)
        except UserError as error:
            raise UserError(f"{error}; {done} of {calls} verdicts are kept: the same command goes on") from None
    return unrated


def _replies(plan: Plan, ask: Ask, workers: int) -> Iterator[tuple[str, Reply]]:
    """Yield digests with their replies as these come. After the first error nothing more is sent."""
    with ThreadPoolExecutor(workers) as pool:
        asked = {pool.submit(ask, plan.messages[digest]): digest for digest in plan.to_send}
        seen = set()
        try:
            for future in as_completed(asked):
                seen.add(future)
                if error := future.exception():
                    pool.shutdown(cancel_futures=True)  # waits for what is under way: it is paid for
                    rest = [f for f in asked if f not in seen and not f.cancelled() and not f.exception()]
                    yield from ((asked[other], other.result()) for other in rest)
                    raise error
                yield asked[future], future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _commit(plan: Plan, digest: str, score: float | None, reply: Reply, commit: Commit) -> None:
    """Commit one reply for every sample with this answer. Its tokens stand with the first of them."""
    for i, key in enumerate(plan.keys[digest]):
        tokens = (None, None) if i else (reply.input_tokens, reply.output_tokens)
        verdict = JudgeVerdict(*key, plan.judge.name, plan.prompts, digest, score, reply.text, *tokens)
        verdict.host, verdict.max_tokens = plan.judge.host, plan.judge.max_tokens
        verdict.answer = answer_hash(plan.texts[key])
        commit(verdict)
