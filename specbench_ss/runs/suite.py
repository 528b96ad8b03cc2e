"""What a suite is to the core: questions with references, and a scorer. Knows no suite by name."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Question:
    """One conversation to be answered turn by turn.

    references: for each turn the acceptable answers (may be empty). metric: name of the quality metric
    of this question, None where there is no reference-based one.
    """

    id: str
    category: str
    turns: tuple[str, ...]
    references: tuple[tuple[str, ...], ...] = ()
    metric: str | None = None

    @property
    def mark(self) -> str:
        """Twelve characters that tell its first turn from others, whatever its id."""
        return hashlib.sha256(self.turns[0].encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class SuiteRequest:
    """What the user asked of a suite. limit: questions per category, 0 = all, None = the suite's default."""

    categories: tuple[str, ...] = ()
    limit: int | None = None
    data: Path | None = None
    lab: bool = False  # the target is one of the project's own lab models


@dataclass(frozen=True, slots=True)
class SuiteData:
    """A suite as loaded: what was asked, in order."""

    name: str
    edition: str
    questions: tuple[Question, ...]
    max_new_tokens: int = 256
    notes: tuple[str, ...] = field(default=())

    @property
    def content_hash(self) -> str:
        """sha256 over the questions in order; printed on every row."""
        text = json.dumps([asdict(q) for q in self.questions], sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()


class Suite(ABC):
    """A named set of tasks. Entry-point group `specbench_ss.suites`."""

    name: ClassVar[str]
    summary: ClassVar[str]
    categories: ClassVar[tuple[str, ...]]

    @abstractmethod
    def load(self, request: SuiteRequest) -> SuiteData:
        """The questions. Raises UserError for an unknown category, missing data or a wrong hash."""

    def calibration(self, request: SuiteRequest) -> SuiteData:
        """Questions to choose a method's options on. Raises UserError as `load` does.

        A suite that can give others than those it evaluates overrides this. Otherwise they are the last of each
        category (a limited run asks the first ones), and a note says so.
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
        """Quality of one answer in [0, 1]; None where the question has no reference-based metric."""
        return None

    def fetch(self, source: str | None = None) -> Path:
        """Download the suite's data. Raises UserError where there is nothing to download."""
        from specbench_ss.errors import UserError

        raise UserError(f"suite {self.name!r} needs no download")
