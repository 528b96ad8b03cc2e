"""What a suite is to the core: questions with references, and a scorer. Knows no suite by name."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
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

    def score(self, question: Question, turn: int, answer: str) -> float | None:
        """Quality of one answer in [0, 1]; None where the question has no reference-based metric."""
        return None

    def fetch(self, source: str | None = None) -> Path:
        """Download the suite's data. Raises UserError where there is nothing to download."""
        from specbench_ss.errors import UserError

        raise UserError(f"suite {self.name!r} needs no download")
