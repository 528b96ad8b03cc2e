"""Base of the suites: questions from files or from the lab's frozen ones, limits, categories and editions.

A row is a prompt or conversation in a format of `conversations.FORMS`. It may have an id, `category`, `reference` (for
each turn a text or a list of acceptable texts) and `metric`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import specbench_ss
from specbench_ss.conversations import read_tools, read_turns, renamed, text_in
from specbench_ss.errors import UserError, did_you_mean, known_words
from specbench_ss.prompt_files import HUB, Row, open_source, usable
from specbench_ss.storage import cache_folder, file_sha256
from specbench_ss.suite import MT_BENCH, Message, Question, Suite, SuiteData, SuiteRequest
from specbench_ss.suites.download import download
from specbench_ss.suites.scorers import METRICS, score_turn


def is_hub(data: Path) -> bool:
    """Return True if this names a data set of the hub, not a file."""
    return str(data).startswith(HUB)


SPECBENCH_CATEGORIES = (*MT_BENCH, "translation", "summarization", "qa", "math_reasoning", "rag")
APP_CATEGORIES = ("sql", "meaning_representation", "dialogue_summary")

LAB_QUESTIONS = Path(specbench_ss.__file__).parent / "lab"  # next to the weights
LAB_SIZES = {name: 10 if name in MT_BENCH else 80 for name in (*SPECBENCH_CATEGORIES, *APP_CATEGORIES)}

Reader = Callable[[str, int, Row], Question]  # location, number from 0, row
Note = Callable[[str], None]


IDS = ("question_id", "prompt_id", "id", "task_id", "custom_id")  # columns of a question's id
OWN_CATEGORY = "prompts"  # of rows without one


@cache
def lab_questions(split: str) -> dict[str, tuple[Question, ...]]:
    """Return the questions for the lab's models, by category. split: "eval" or "calibration"."""
    questions = questions_of(LAB_QUESTIONS / f"questions-{split}.jsonl.xz", question_of)
    return {name: tuple(q for q in questions if q.category == name) for name in LAB_SIZES}


def questions_of(
    path: Path, read: Reader, note: Note = lambda _: None, columns: Mapping[str, str] = MappingProxyType({})
) -> tuple[Question, ...]:
    """Return the questions that a function reads from the rows of a file, folder or hub data set, in order.

    note: gets a line on rows that cannot be used. columns: as `conversations.renamed` takes them. Raise UserError if
    these rows are too many, and for an empty file.
    """
    numbers, ids = count(), set[str]()

    def question(place: str, row: Row) -> Question:
        found = replace(read(place, next(numbers), renamed(place, row, columns)), place=place)
        if found.id in ids:
            raise UserError(f"{place}: the id {found.id!r} occurs twice")
        ids.add(found.id)
        return found

    questions = tuple(usable(open_source(path, "test").rows(), question, note))
    if not questions:
        raise UserError(f"{path} has no questions; docs/suites.md lists the formats")
    return questions


def text_of(place: str, row: Any, key: str) -> str:
    """Return a text field of a row. Raise UserError if it is missing, empty or no text."""
    text = text_in(place, row, key)
    if not text.strip():
        raise UserError(f"{place}: {key!r} is empty")
    return text


def question_of(
    place: str, number: int, row: Row, metrics: Mapping[str, str] = MappingProxyType({}), task: str = OWN_CATEGORY
) -> Question:
    """Return the question of a row in any known format. Raise UserError for another row.

    metrics: the default metric of each category. task: the category of a row without one.
    """
    history, turns, answers = read_turns(place, row)
    name = next((row[key] for key in IDS if row.get(key) not in (None, "")), number)
    if not isinstance(name, int | str):
        raise UserError(f"{place}: 'question_id' must be a number or a text")
    category = row.get("category") or task
    if not isinstance(category, str) or not f"{category}{name}".isprintable():
        raise UserError(f"{place}: 'category' must be a text, and like the id without control characters")
    references = _references(place, row.get("reference"), len(turns))
    if not references and answers and len(turns) == 1:
        references = (tuple(answers),)
    metric = _metric(place, row.get("metric") or metrics.get(category))
    messages, tools = tuple(Message(**message) for message in history), read_tools(place, row)
    return Question(str(name), category, tuple(turns), references, metric if any(references) else None, messages, tools)


def _metric(place: str, name: object) -> str | None:
    if name is not None and (not isinstance(name, str) or name not in METRICS):
        raise UserError(f"{place}: unknown metric {name!r}{did_you_mean(str(name), METRICS)}")
    return name


def _references(place: str, value: object, turns: int) -> tuple[tuple[str, ...], ...]:
    """Return the acceptable answers of each turn. An empty text means that there is none."""
    if not value:
        return ()
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list) or len(given) != turns:
        raise UserError(f"{place}: 'reference' must be a list with one entry for each of the {turns} turn(s)")
    entries = [entry if isinstance(entry, list) else [entry] for entry in given]
    if not all(isinstance(text, str) for entry in entries for text in entry):
        raise UserError(f"{place}: 'reference' must contain texts or lists of texts")
    return tuple(tuple(text for text in entry if text.strip()) for entry in entries)


def select(questions: Sequence[Question], categories: Sequence[str], limit: int | None) -> tuple[Question, ...]:
    """Return the first `limit` questions of each requested category, in order.

    A limit of 0 or None takes all questions; an empty list of categories takes every category.
    """
    check_limit(limit)
    present = list(dict.fromkeys(question.category for question in questions))
    check_categories(categories, present, "the data")
    counts: Counter[str] = Counter()
    chosen = []
    for question in questions:
        if question.category in (categories or present) and not (limit and counts[question.category] >= limit):
            counts[question.category] += 1
            chosen.append(question)
    return tuple(chosen)


def check_categories(requested: Sequence[str], known: Sequence[str], owner: str) -> None:
    """Raise UserError for an unknown category. owner: whose categories they are, 'suite X' or 'the data'."""
    for name in requested:
        if name not in known:
            raise UserError(f"{owner} has no task {name!r}{known_words(name, known)}")


def check_limit(limit: int | None) -> None:
    """Raise UserError for a negative limit."""
    if limit is not None and limit < 0:
        raise UserError(f"the limit must be 0 (all) or more, not {limit}")


@dataclass(frozen=True, slots=True)
class Published:
    """A published file with its hash. url: at a fixed commit. saved_as: its local name, if different."""

    url: str
    sha256: str
    saved_as: str = ""

    @property
    def name(self) -> str:
        """Return the file's local name."""
        return self.saved_as or self.url.rpartition("/")[2]

    def is_whole(self, path: Path) -> bool:
        """Return True if the file exists unchanged."""
        return path.is_file() and file_sha256(path) == self.sha256


class FileSuite(Suite):
    """A suite with questions from a given file, a fetched published file, or for lab models from the lab."""

    title: ClassVar[str]  # name in sentences
    files: ClassVar[tuple[Published, ...]] = ()  # downloaded by `fetch`; the first has the questions
    needs: ClassVar[str] = "a JSONL file"  # description of --data for suites without a download
    metrics: ClassVar[Mapping[str, str]] = MappingProxyType({})  # the default metric of each category
    default_limit: ClassVar[int] = 0  # questions per category; 0 = all
    max_new_tokens: ClassVar[int] = 1024
    lab_categories: ClassVar[tuple[str, ...]] = ()  # categories for lab models
    lab_limit: ClassVar[int] = 4  # default number of lab questions per category

    def __init__(self) -> None:
        self.left_out: list[str] = []
        self.columns: Mapping[str, str] = {}  # of the request

    def read(self, data: Path) -> tuple[Question, ...]:
        """Return the questions of a file, a folder or a hub data set. Raise UserError."""
        self.left_out = []
        return questions_of(self.question_file(data), self.question, self.left_out.append, self.columns)

    def question(self, place: str, number: int, row: Row) -> Question:
        """Return the question of a row of the file. Raise UserError for another format."""
        task = self.categories[0] if len(self.categories) == 1 else OWN_CATEGORY
        return question_of(place, number, row, self.metrics, task)

    def notes(self) -> tuple[str, ...]:
        """Return notes on questions from a file for readers of the results, one sentence each."""
        return tuple(self.left_out)

    def load(self, request: SuiteRequest) -> SuiteData:
        """Return the evaluation questions: for lab models the lab's unless a file is given."""
        return self._questions("eval", request)

    def calibration(self, request: SuiteRequest) -> SuiteData:
        """Return questions for tuning; for lab models they are disjoint from the evaluation questions."""
        from_lab = request.lab and request.data is None
        return self._questions("calibration", request) if from_lab else super().calibration(request)

    def score(self, question: Question, turn: int, answer: str) -> float | None:
        """Score an answer with the question's metric, against the references of the turn."""
        return score_turn(question, turn, answer)

    def fetch(self, source: str | None = None) -> Path:
        """Return the published questions, downloaded if necessary.

        source: another URL of the file, or of the folder of several files.
        """
        if not self.files:
            raise UserError(f"suite {self.name!r} has no download; use --data with {self.needs}")
        for file in self.files:
            path = self._cached(file)
            if source is not None or not file.is_whole(path):
                download(self._address(file, source), file.sha256, path)
        return self._cached(self.files[0])

    def _address(self, file: Published, source: str | None) -> str:
        url = source or os.environ.get(f"SSBENCH_{self.name.upper()}_URL")
        if url and len(self.files) > 1:
            return f"{url.rstrip('/')}/{file.name}"
        return url or file.url

    def _cached(self, file: Published) -> Path:
        return cache_folder() / self.name / file.name

    def _questions(self, split: str, request: SuiteRequest) -> SuiteData:
        """Return the questions of the given data, else the lab's for lab models, else the published ones.

        split: of the lab's questions, "eval" or "calibration".
        """
        check_limit(request.limit)
        if request.data is not None:
            return self._from(request.data, request)
        check_categories(request.categories, self.categories, f"suite {self.name!r}")
        if request.lab and self.lab_categories:
            return self._generated(request, split)
        return self._from(self._fetched(), request)

    def _fetched(self) -> Path:
        if not self.files:
            raise UserError(f"suite {self.name!r} needs --data: {self.needs}")
        for file in self.files:
            path = self._cached(file)
            if not path.is_file():
                raise UserError(
                    f"{self.title} questions are missing; run `ssbench suites fetch {self.name}` or use --data FILE"
                )
            if not file.is_whole(path):
                raise UserError(f"{path} is damaged (wrong sha256); run `ssbench suites fetch {self.name}` again")
        return self._cached(self.files[0])

    def _from(self, data: Path, request: SuiteRequest) -> SuiteData:
        edition, notes = self.edition(data)
        limit, self.columns = self.default_limit if request.limit is None else request.limit, dict(request.columns)
        chosen = select(self.read(data), request.categories, limit)
        return SuiteData(self.name, edition, chosen, self.max_new_tokens, (*notes, *self.notes()))

    def edition(self, data: Path) -> tuple[str, tuple[str, ...]]:
        """Return the name of the edition and notes on it."""
        if is_hub(data):
            return "hub", (f"questions from {data}",)
        file = self.question_file(data)
        if any(published.is_whole(file) for published in self.files[:1]):
            return "official", ()
        return "custom", (f"{file.name} differs from the official {self.title} file",) if self.files else ()

    def question_file(self, data: Path) -> Path:
        """Return the file with the questions: the given one, or the one with the published name in a folder."""
        return data / self.files[0].name if self.files and data.is_dir() else data

    def _generated(self, request: SuiteRequest, split: str) -> SuiteData:
        """Return the lab's questions. They do not depend on the run's seed, so that runs can be compared."""
        limit = self.lab_limit if request.limit is None else request.limit
        categories = (name for name in self.lab_categories if name in (request.categories or self.lab_categories))
        questions = tuple(question for name in categories for question in lab_questions(split)[name][: limit or None])
        return SuiteData(
            self.name,
            "generated",
            questions,
            notes=(f"questions generated by the lab, in place of those of {self.title}",),
        )
