"""Base of the suites: questions from files or from the lab's frozen ones, limits, categories and editions.

`hub:OWNER/NAME[:CONFIG[:SPLIT]][@REVISION]` names a data set of the hub; the split is `test` unless it is given. The
hub is asked for what is named so, and for nothing else.

An object has `question_id`, `category` and `turns`. It may have `reference` (for each turn a text or a list of
acceptable texts) and `metric`.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import specbench_ss
from specbench_ss.errors import UserError, did_you_mean, known_words
from specbench_ss.storage import cache_folder, file_sha256
from specbench_ss.suite import Question, Suite, SuiteData, SuiteRequest
from specbench_ss.suites.download import download
from specbench_ss.suites.scorers import METRICS, score_turn
from specbench_ss.user_files import Row, read_rows

HUB = "hub:"
_FORM = re.compile(r"hub:(?P<name>[^:@]+)(:(?P<config>[^:@]*))?(:(?P<split>[^:@]+))?(@(?P<revision>.+))?")


def is_hub(data: Path) -> bool:
    """Say whether this names a data set of the hub, and not a file."""
    return str(data).startswith(HUB)


def read_data(data: Path) -> Iterator[tuple[str, Row]]:
    """Yield every row with its place, of a JSONL file (which may be NAME.gz) or a hub data set. Raises UserError."""
    if not is_hub(data):
        yield from read_rows(data)
        return
    from specbench_ss.training.data import HubSource

    form = _FORM.fullmatch(str(data))
    if form is None:
        raise UserError(
            f"cannot read {str(data)!r}: expected hub:OWNER/NAME, hub:OWNER/NAME:CONFIG:SPLIT or ...@REVISION"
        )
    source = HubSource(form["name"], form["config"] or None, form["split"] or "test", form["revision"])
    for place, row in source.rows():
        yield place, dict(row)


MT_BENCH_CATEGORIES = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
SPECBENCH_CATEGORIES = (*MT_BENCH_CATEGORIES, "translation", "summarization", "qa", "math_reasoning", "rag")
APP_CATEGORIES = ("sql", "meaning_representation", "dialogue_summary")

LAB_QUESTIONS = Path(specbench_ss.__file__).parent / "lab"  # beside the weights
LAB_SIZES = {name: 10 if name in MT_BENCH_CATEGORIES else 80 for name in (*SPECBENCH_CATEGORIES, *APP_CATEGORIES)}

Reader = Callable[[str, int, Row], Question]  # place, number from 0, row


def read_questions(path: Path) -> tuple[Question, ...]:
    """Return the questions of a file in the form of MT-Bench and Spec-Bench, in order."""
    return questions_of(path, lambda place, _, row: question_of(place, row))


@cache
def lab_questions(split: str) -> dict[str, tuple[Question, ...]]:
    """Return the questions for the lab's models, by category. split: "eval" or "calibration"."""
    questions = read_questions(LAB_QUESTIONS / f"questions-{split}.jsonl.gz")
    return {name: tuple(q for q in questions if q.category == name) for name in LAB_SIZES}


def questions_of(path: Path, read: Reader) -> tuple[Question, ...]:
    """Return the questions that a function makes of the rows of a file or hub data set, in order.

    Raises UserError for an id that occurs twice, and where there is no row.
    """
    questions: dict[str, Question] = {}
    for number, (place, row) in enumerate(read_data(path)):
        question = read(place, number, row)
        if question.id in questions:
            raise UserError(f"{place}: question_id {question.id!r} occurs twice")
        questions[question.id] = question
    if not questions:
        raise UserError(f"{path} holds no questions")
    return tuple(questions.values())


def text_of(place: str, row: Any, key: str) -> str:
    """Return a field of a row. Raises UserError where it is missing, empty or no text."""
    value = row.get(key) if isinstance(row, dict) else None
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{place}: {key!r} must be a text")
    return value


def question_of(place: str, row: Row, metrics: Mapping[str, str] = MappingProxyType({})) -> Question:
    """Return the question of a row in the form of MT-Bench and Spec-Bench. Raises UserError for another form.

    metrics: the metric of each category, for rows that name none.
    """
    category, turns = row.get("category"), row.get("turns")
    if not isinstance(row.get("question_id"), int | str):
        raise UserError(f"{place}: 'question_id' must be a number or a text")
    if not isinstance(category, str) or not category:
        raise UserError(f"{place}: 'category' must be a text")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise UserError(f"{place}: 'turns' must be a list of texts")
    references = _references(place, row.get("reference"), len(turns))
    metric = _metric(place, row.get("metric", metrics.get(category)))
    return Question(str(row["question_id"]), category, tuple(turns), references, metric if any(references) else None)


def _metric(place: str, name: object) -> str | None:
    if name is not None and (not isinstance(name, str) or name not in METRICS):
        raise UserError(f"{place}: unknown metric {name!r}{did_you_mean(str(name), METRICS)}")
    return name


def _references(place: str, value: object, turns: int) -> tuple[tuple[str, ...], ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) != turns:
        raise UserError(f"{place}: 'reference' must be a list with one entry for each of the {turns} turn(s)")
    return tuple(_acceptable(place, entry) for entry in value)


def _acceptable(place: str, entry: object) -> tuple[str, ...]:
    """Return the acceptable answers of one turn. An empty text means that there is none."""
    entries = entry if isinstance(entry, list) else [entry]
    texts = [text for text in entries if isinstance(text, str)]
    if len(texts) < len(entries):
        raise UserError(f"{place}: 'reference' must hold texts or lists of texts")
    return tuple(text for text in texts if text.strip())


def select(questions: Sequence[Question], categories: Sequence[str], limit: int | None) -> tuple[Question, ...]:
    """Return the first `limit` questions of each asked category, in order.

    A limit of 0 or None takes all questions; an empty list of categories takes every category.
    """
    check_limit(limit)
    present = list(dict.fromkeys(question.category for question in questions))
    check_categories(categories, present, "the data")
    taken: Counter[str] = Counter()
    chosen = []
    for question in questions:
        if question.category in (categories or present) and not (limit and taken[question.category] >= limit):
            taken[question.category] += 1
            chosen.append(question)
    return tuple(chosen)


def check_categories(asked: Sequence[str], known: Sequence[str], owner: str) -> None:
    """Raise UserError for an unknown category. owner: whose categories they are, 'suite X' or 'the data'."""
    for name in asked:
        if name not in known:
            raise UserError(f"{owner} has no category {name!r}{known_words(name, known)}")


def check_limit(limit: int | None) -> None:
    """Raise UserError for a negative limit."""
    if limit is not None and limit < 0:
        raise UserError(f"the limit must be 0 (all) or more, not {limit}")


@dataclass(frozen=True, slots=True)
class Published:
    """A published file whose content is known. url: at a fixed commit. saved_as: its name here, where it is another."""

    url: str
    sha256: str
    saved_as: str = ""

    @property
    def name(self) -> str:
        """Return the file's name here."""
        return self.saved_as or self.url.rpartition("/")[2]

    def is_whole(self, path: Path) -> bool:
        """Say whether this file is there, unchanged."""
        return path.is_file() and file_sha256(path) == self.sha256


class FileSuite(Suite):
    """A suite whose questions come from a file: a given one, or a published one that was fetched.

    Those for lab models are the lab's, in as many splits as are asked for.

    title: its name in sentences. files: what `fetch` downloads; the first one holds the questions. needs: what --data
    must be, where there is nothing to fetch. default_limit: questions of each category; 0 is all. lab_categories:
    those of the questions for lab models, lab_limit each by default.
    """

    title: ClassVar[str]
    files: ClassVar[tuple[Published, ...]] = ()
    needs: ClassVar[str] = "a JSONL file"
    default_limit: ClassVar[int] = 0
    max_new_tokens: ClassVar[int] = 1024
    lab_categories: ClassVar[tuple[str, ...]] = ()
    lab_limit: ClassVar[int] = 4

    def read(self, data: Path) -> tuple[Question, ...]:
        """Return the questions of a file, a folder or a hub data set. Raises UserError."""
        return questions_of(self.question_file(data), self.question)

    def question(self, place: str, number: int, row: Row) -> Question:
        """Return the question of a row of the file. Raises UserError for another form."""
        return question_of(place, row)

    def notes(self) -> tuple[str, ...]:
        """Return what a reader of the results should know of questions from a file, a sentence each."""
        return ()

    def load(self, request: SuiteRequest) -> SuiteData:
        """Return the questions that are evaluated. For lab models they are the lab's unless a file is given."""
        return self._questions("eval", request)

    def calibration(self, request: SuiteRequest) -> SuiteData:
        """Return questions to choose options on. For lab models these are ones of the lab that no evaluation asks."""
        of_lab = request.lab and request.data is None
        return self._questions("calibration", request) if of_lab else super().calibration(request)

    def score(self, question: Question, turn: int, answer: str) -> float | None:
        """Score an answer with the question's metric, against the references of the turn."""
        return score_turn(question, turn, answer)

    def fetch(self, source: str | None = None) -> Path:
        """Return the published questions, which are downloaded unless they are there.

        source: another URL of the same file, or of the folder that holds the files where there are several.
        """
        if not self.files:
            raise UserError(f"suite {self.name!r} has no download: give --data, {self.needs}")
        for file in self.files:
            path = self._cached(file)
            if source is not None or not file.is_whole(path):
                download(self._address(file, source), file.sha256, path)
        return self._cached(self.files[0])

    def _address(self, file: Published, source: str | None) -> str:
        given = source or os.environ.get(f"SSBENCH_{self.name.upper()}_URL")
        if given and len(self.files) > 1:
            return f"{given.rstrip('/')}/{file.name}"
        return given or file.url

    def _cached(self, file: Published) -> Path:
        return cache_folder() / self.name / file.name

    def _questions(self, split: str, request: SuiteRequest) -> SuiteData:
        """Return the questions of given data, else those of the lab for its models and the published ones for others.

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
                    f"no {self.title} questions yet: run `ssbench suites fetch {self.name}`, or give --data FILE"
                )
            if not file.is_whole(path):
                raise UserError(f"{path} is damaged (wrong sha256): run `ssbench suites fetch {self.name}` again")
        return self._cached(self.files[0])

    def _from(self, data: Path, request: SuiteRequest) -> SuiteData:
        edition, notes = self.edition(data)
        limit = self.default_limit if request.limit is None else request.limit
        chosen = select(self.read(data), request.categories, limit)
        return SuiteData(self.name, edition, chosen, self.max_new_tokens, (*notes, *self.notes()))

    def edition(self, data: Path) -> tuple[str, tuple[str, ...]]:
        """Return what the edition is called, and what there is to say of it."""
        if is_hub(data):
            return "hub", (f"questions from {data}",)
        file = self.question_file(data)
        if any(published.is_whole(file) for published in self.files[:1]):
            return "official", ()
        return "custom", (f"{file.name} differs from the official {self.title} file",) if self.files else ()

    def question_file(self, data: Path) -> Path:
        """Return the file with the questions: the given one, or in a folder the one with the published name."""
        return data / self.files[0].name if self.files and data.is_dir() else data

    def _generated(self, request: SuiteRequest, split: str) -> SuiteData:
        """Return the lab's questions. They are the same whatever the seed of the run, so that runs can be compared."""
        limit = self.lab_limit if request.limit is None else request.limit
        asked = (name for name in self.lab_categories if name in (request.categories or self.lab_categories))
        questions = tuple(question for name in asked for question in lab_questions(split)[name][: limit or None])
        return SuiteData(
            self.name,
            "generated",
            questions,
            notes=(f"questions generated by the lab, in place of those of {self.title}",),
        )
