"""Suite interface: questions with references, and a scorer."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from specbench_ss.errors import UserError

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")  # categories


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation. role: system, developer, user, assistant or tool. content: None of tool calls."""

    role: str
    content: str | None
    tool_calls: list[Any] = field(default_factory=list)  # as published
    tool_call_id: str = ""
    name: str = ""

    @property
    def text(self) -> str:
        """Return the content, and tool calls as JSON, for readers."""
        return "\n".join([*([self.content] if self.content else []), *map(json.dumps, self.tool_calls)])

    def as_dict(self) -> dict[str, Any]:
        """Return the message as a chat template and a server take it, without empty fields of tools."""
        return {key: value for key, value in asdict(self).items() if value or key in ("role", "content")}


OPTIONAL = ("history", "tools")  # fields of a question that its content may lack


@dataclass(frozen=True, slots=True)
class Question:
    """One conversation that is answered turn by turn.

    references: the acceptable answers of each turn; there may be none. metric: name of the quality metric of this
    question; None where it has no reference-based one. history: messages before the first turn, as they were given.
    tools: definitions of tools, as published. place: of its row in a file, for messages.
    """

    id: str
    category: str
    turns: tuple[str, ...]
    references: tuple[tuple[str, ...], ...] = ()
    metric: str | None = None
    history: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    place: str = field(default="", compare=False)

    @property
    def mark(self) -> str:
        """Return twelve characters that identify its first prompt, whatever the question's id is."""
        asked = json.dumps(self.messages()) if self.history else self.turns[0]
        return hashlib.sha256(asked.encode()).hexdigest()[:12]

    def messages(self, answers: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Return the messages of the turn after these answers, as a chat template and a server take them."""
        messages = [message.as_dict() for message in self.history]
        for turn, answer in zip(self.turns, answers, strict=False):
            messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
        return [*messages, {"role": "user", "content": self.turns[len(answers)]}]

    def content(self) -> dict[str, Any]:
        """Return all fields but the place and an empty history or tools: suites without them keep their hash."""
        values = asdict(self) | {"history": [message.as_dict() for message in self.history]}
        return {name: value for name, value in values.items() if name != "place" and (value or name not in OPTIONAL)}


@dataclass(frozen=True, slots=True)
class SuiteRequest:
    """The request of a user to a suite.

    limit: questions per category; 0 means all, None means the suite's default. data: a file or folder, or `hub:` with a
    data set of the Hugging Face hub. context_length, count_tokens: of the model, where it is known. columns: names of
    the format's columns, and those of the data in their place.
    """

    categories: tuple[str, ...] = ()
    limit: int | None = None
    data: Path | None = None
    lab: bool = False  # the target is one of the project's own lab models
    context_length: int | None = None
    count_tokens: Callable[[str], int] | None = None
    columns: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class SuiteData:
    """A suite as it was loaded: the questions that were asked for, in order."""

    name: str
    edition: str
    questions: tuple[Question, ...]
    max_new_tokens: int = 256
    notes: tuple[str, ...] = field(default=())

    @cached_property
    def content_hash(self) -> str:
        """Return a sha256 over the questions in order. Every row of a run records it."""
        text = json.dumps([q.content() for q in self.questions], sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()


class Suite(ABC):
    """A named set of tasks. Suites are found through the entry-point group `specbench_ss.suites`.

    run_code: `score` may execute code of the outputs; a run sets it before `load`, by `--run-code`.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    categories: ClassVar[tuple[str, ...]]
    run_code: bool = False

    @abstractmethod
    def load(self, request: SuiteRequest) -> SuiteData:
        """Return the questions. Raises UserError for an unknown category, missing data or a wrong hash."""

    def calibration(self, request: SuiteRequest) -> SuiteData:
        """Return questions to choose a method's options on. Raises UserError as `load` does.

        A suite that has other questions than those it evaluates overrides this. By default these are the last questions
        of each category (a limited run asks the first ones), and a note states it.
        """
        data = self.load(replace(request, limit=0))
        by_category: dict[str, list[Question]] = {}
        for question in data.questions:
            by_category.setdefault(question.category, []).append(question)
        chosen = [q for of_one in by_category.values() for q in of_one[-(request.limit or 0) :]]
        if request.data is None:
            share = f"the last {request.limit} questions of each category" if request.limit else "all questions"
            data = replace(data, notes=(*data.notes, f"{share} of the suite, which it evaluates too"))
        return replace(data, questions=tuple(chosen))

    def score(self, question: Question, turn: int, answer: str) -> float | None:
        """Return the quality of one answer in [0, 1]; None where the question has no metric.

        Code of the answer must not be executed unless `run_code` is set.
        """
        return None

    def judge_prompts(self, data: Path | None) -> Path | None:
        """Return the file with the suite's own prompts for a judge, where it has one; `ssbench judge` reads it.

        data: what the run's questions were read from, None where that was the suite's own data.
        """
        return None

    def fetch(self, source: str | None = None) -> Path:
        """Download the suite's data. Raises UserError where there is nothing to download."""
        raise UserError(f"suite {self.name!r} needs no download")
