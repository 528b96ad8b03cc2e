"""Questions and training text of all categories."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

from lab import applications, knowledge, mathematics, prose, tasks, translation
from lab.example import Example, Generator, draw
from specbench_ss.suite import Question
from specbench_ss.suites.base import APP_CATEGORIES, SPECBENCH_CATEGORIES

__all__ = ["APP_CATEGORIES", "GENERATORS", "SPECBENCH_CATEGORIES", "questions"]

GENERATORS: dict[str, Generator] = {
    "sql": applications.generate_sql,
    "meaning_representation": applications.generate_meaning_representation,
    "dialogue_summary": applications.generate_dialogue_summary,
    "math_reasoning": mathematics.generate_math_reasoning,
    "math": mathematics.generate_math,
    "coding": tasks.generate_coding,
    "reasoning": tasks.generate_reasoning,
    "extraction": tasks.generate_extraction,
    "translation": translation.generate_translation,
    "summarization": prose.generate_summarization,
    "qa": knowledge.generate_qa,
    "rag": knowledge.generate_rag,
    "writing": prose.generate_writing,
    "roleplay": prose.generate_roleplay,
    "stem": prose.generate_stem,
    "humanities": prose.generate_humanities,
}


def questions(categories: Sequence[str], split: str, per_category: int, seed: int = 0) -> tuple[Question, ...]:
    """Return questions of each category in turn; for a smaller `per_category` the first ones of the same."""
    return tuple(question for name in categories for question in _of_category(name, split, per_category, seed))


def _of_category(category: str, split: str, count: int, seed: int) -> Iterator[Question]:
    found: dict[str, Example] = {}
    examples = draw(GENERATORS[category], split, seed)
    while len(found) < count:
        example = next(examples)
        found.setdefault(example.turns[0], example)
    for i, example in enumerate(found.values()):
        metric = None if example.metric == "none" else example.metric
        yield Question(f"lab-{category}-{i:04d}", category, example.turns, example.answers, metric)


# The lab's training text: conversations of every category, mixed, tokenized and packed into rows.

# share of conversations; tasks with computed answers need more of them than tasks of wording
WEIGHTS = {"sql": 2.0, "math_reasoning": 2.5, "math": 1.5, "meaning_representation": 0.8, "writing": 0.8, "qa": 1.6}


# the last part of the base's training: what computes is drilled, the rest is kept alive
POLISH_WEIGHTS = {**WEIGHTS, "arithmetic": 8.0, "math_reasoning": 4.0, "math": 4.0}
APP_WEIGHTS = {name: float(name in APP_CATEGORIES) for name in GENERATORS}  # the applications and nothing else


def conversations(split: str, seed: int, weighting: Mapping[str, float] = WEIGHTS) -> Iterator[Example]:
    """Yield an endless mixture of all categories; drills only where they are given a weight."""
    makers = {**GENERATORS, "arithmetic": mathematics.generate_drill} if "arithmetic" in weighting else GENERATORS
    names = sorted(makers)
    streams = {name: draw(makers[name], split, seed) for name in names}
    weights = [weighting.get(name, 1.0) for name in names]
    rng = random.Random(f"mixture:{split}:{seed}")
    while True:
        yield next(streams[rng.choices(names, weights)[0]])
