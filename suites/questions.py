"""Read question files: one JSON object a line, in the form of MT-Bench and Spec-Bench.

An object has `question_id`, `category` and `turns`. It may have `reference` (for each turn a text or a list of
acceptable texts) and `metric`. This module knows no suite.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import specbench_ss
from specbench_ss.errors import UserError, did_you_mean, known_words
from specbench_ss.suite import Question
from specbench_ss.suites.rows import read_data
from specbench_ss.suites.scorers import METRICS
from specbench_ss.user_files import Row

MT_BENCH_CATEGORIES = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
SPECBENCH_CATEGORIES = (*MT_BENCH_CATEGORIES, "translation", "summarization", "qa", "math_reasoning", "rag")
APP_CATEGORIES = ("sql", "meaning_representation", "dialogue_summary")

LAB_QUESTIONS = Path(specbench_ss.__file__).parent / "lab"  # beside the weights
LAB_SIZES = {name: 10 if name in MT_BENCH_CATEGORIES else 80 for name in (*SPECBENCH_CATEGORIES, *APP_CATEGORIES)}

Reader = Callable[[str, int, Row], Question]  # place, number from 0, row


def read_questions(path: Path, metrics: Mapping[str, str]) -> tuple[Question, ...]:
    """Return the questions in the order of the file. metrics: the metric of each category, for rows that name none."""
    return questions_of(path, lambda place, _, row: question_of(place, row, metrics))


def lab_questions(category: str, split: str, limit: int) -> tuple[Question, ...]:
    """Return the first questions of a category for the lab's models; 0 is all. split: "eval" or "calibration"."""
    return _frozen(split)[category][: limit or None]


@cache
def _frozen(split: str) -> dict[str, tuple[Question, ...]]:
    questions = read_questions(LAB_QUESTIONS / f"questions-{split}.jsonl.gz", {})
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


def text_of(place: str, row: Row, key: str) -> str:
    """Return a field of a row. Raises UserError where it is missing, empty or no text."""
    value = row.get(key)
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{place}: {key!r} must be a text")
    return value


def question_of(place: str, row: Row, metrics: Mapping[str, str]) -> Question:
    """Return the question of a row in the form of MT-Bench and Spec-Bench. Raises UserError for another form."""
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
