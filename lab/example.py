"""Generated examples and their splits into training and evaluation text."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

DATA = Path(__file__).parent / "data"
SPLITS = ("train", "calibration", "eval")


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation.

    turns: the user's messages. answers: for each turn the acceptable answers, the one to train on
    first. key: what the example is *about*, free of wording; all examples of one key fall in one split.
    metric: how an answer is scored against `answers`: exact_sql, numeric, rouge_l, token_f1, bleu,
    contains or none.
    """

    category: str
    turns: tuple[str, ...]
    answers: tuple[tuple[str, ...], ...]
    key: str
    metric: str

    def __post_init__(self) -> None:
        if len(self.turns) != len(self.answers) or not all(self.answers):
            raise ValueError(f"{self.category}: every turn needs at least one answer")

    @property
    def messages(self) -> list[dict[str, str]]:
        """Return the conversation with the answers to train on, for chat templates."""
        pairs = zip(self.turns, self.answers, strict=True)
        roles = ((("user", turn), ("assistant", answers[0])) for turn, answers in pairs)
        return [{"role": role, "content": text} for pair in roles for role, text in pair]


Generator = Callable[[random.Random], Example]


def split_of(category: str, key: str) -> str:
    """Return the split a key belongs to: 1/16 evaluation, 1/16 calibration, the rest training."""
    bucket = hashlib.sha256(f"{category}\x00{key}".encode()).digest()[0] % 16
    return {0: "eval", 1: "calibration"}.get(bucket, "train")


def draw(generate: Generator, split: str, seed: int) -> Iterator[Example]:
    """Yield an endless stream of examples of one split; the same seed gives the same stream."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; one of {', '.join(SPLITS)}")
    rng = random.Random(f"{split}:{seed}")
    while True:
        example = generate(rng)
        if split_of(example.category, example.key) == split:
            yield example


T = TypeVar("T")


def load(name: str, kind: type[T]) -> T:
    """Return an entry of a data file. name: `FILE.ENTRY`."""
    file, _, entry = name.partition(".")
    return msgspec.convert(_data(file)[entry], kind)


def records(name: str) -> list[dict[str, str]]:
    """Return an entry that is a table: a list of rows, of which the first has the columns' names."""
    return _records(load(name, list[tuple[str, ...]]))


def tables(name: str) -> dict[str, list[dict[str, str]]]:
    """Return an entry that consists of tables."""
    return {key: _records(rows) for key, rows in load(name, dict[str, list[tuple[str, ...]]]).items()}


def _records(rows: list[tuple[str, ...]]) -> list[dict[str, str]]:
    columns, *others = rows
    return [dict(zip(columns, row, strict=True)) for row in others]


@cache
def _data(file: str) -> dict[str, Any]:
    data: dict[str, Any] = yaml.load((DATA / f"{file}.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)
    return data
