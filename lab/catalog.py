"""All categories of the lab's text under one roof, and the questions drawn from them. Knows no suite."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lab import language, structured
from lab.example import Example, Generator, draw
from specbench_ss.errors import UserError, did_you_mean
from specbench_ss.runs.suite import Question
from specbench_ss.suites.questions import APP_CATEGORIES, SPECBENCH_CATEGORIES

__all__ = ["APP_CATEGORIES", "GENERATORS", "SPECBENCH_CATEGORIES", "questions"]

GENERATORS: dict[str, Generator] = {**structured.GENERATORS, **language.GENERATORS}

_DRAWS_PER_QUESTION = 1000  # a category that needs more has too few distinct prompts


def questions(categories: Sequence[str], split: str, per_category: int, seed: int = 0) -> tuple[Question, ...]:
    """Questions of each category in turn; for a smaller `per_category` the first ones of the same."""
    return tuple(question for name in categories for question in _of_category(name, split, per_category, seed))


def _of_category(category: str, split: str, count: int, seed: int) -> Iterator[Question]:
    if category not in GENERATORS:
        raise UserError(f"the lab has no category {category!r}{did_you_mean(category, GENERATORS)}")
    prompts: set[str] = set()
    examples = draw(GENERATORS[category], split, seed)
    for _ in range(count * _DRAWS_PER_QUESTION):
        if len(prompts) == count:
            return
        example = next(examples)
        if example.turns[0] not in prompts:
            yield _question(example, len(prompts))
            prompts.add(example.turns[0])
    if len(prompts) < count:
        raise UserError(f"the lab has only {len(prompts)} {split} questions of category {category!r}, not {count}")


def _question(example: Example, index: int) -> Question:
    metric = None if example.metric == "none" else example.metric
    return Question(f"lab-{example.category}-{index:04d}", example.category, example.turns, example.answers, metric)
