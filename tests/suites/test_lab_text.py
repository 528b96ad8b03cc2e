"""The lab's text: right in what it states, split without overlap, and equal to the frozen questions."""

from __future__ import annotations

import hashlib
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path

import pytest

import lab.__main__
from lab import text
from lab.example import Example, draw, split_of
from lab.phrases import render
from lab.text import GENERATORS
from specbench_ss.suites.base import LAB_QUESTIONS, question_of, questions_of
from specbench_ss.suites.scorers import METRICS, score
from specbench_ss.training.data import lab_conversations
from tests.tiny import THOROUGH, few, thorough

EVERY = (*text.SPECBENCH_CATEGORIES, *text.APP_CATEGORIES)
# sha256 of the first 60 training and 60 evaluation examples: the shipped weights learnt this text, and runs are
# distinguished by the suite's content hash. Change a digest only together with the weights.
TEXT = {
    "writing": "d11908585814",
    "roleplay": "9ae1bebb0353",
    "reasoning": "12247e9c1850",
    "math": "293746f46254",
    "coding": "ec1d7281432a",
    "extraction": "0ec67f6e2a88",
    "stem": "fac22e475210",
    "humanities": "19639b82a331",
    "translation": "6c46caf318f6",
    "summarization": "e5c1eee61faa",
    "qa": "5b373a9a0f4d",
    "math_reasoning": "c6fb4198ffaf",
    "rag": "5289bcc189ea",
    "sql": "12bfe11fe505",
    "meaning_representation": "72e9401dc425",
    "dialogue_summary": "db077844a97d",
}


frozen = cache(lab.__main__.frozen)


@cache
def sample(name: str, split: str = "train") -> list[Example]:
    # an evaluation example costs sixteen draws
    return list(islice(draw(GENERATORS[name], split, 11), 600 if split == "train" else 150))


@few(4)
@pytest.mark.parametrize("category", EVERY)
def test_the_text_is_the_one_that_the_shipped_weights_learnt(category: str) -> None:
    drawn = [islice(draw(GENERATORS[category], split, 0), 60) for split in ("train", "eval")]
    shown = "\x00".join(repr(example) for test_instances in drawn for example in test_instances)
    assert hashlib.sha256(shown.encode()).hexdigest()[:12] == TEXT[category]


def test_the_package_does_not_import_the_lab() -> None:
    root = Path(__file__).parents[2]
    files = [file for name in ("specbench_ss", "methods", "suites", "reports") for file in (root / name).rglob("*.py")]
    assert not [file for file in files if re.search(r"^\s*(from|import) lab\b", file.read_text(), re.MULTILINE)]


@thorough
@pytest.mark.parametrize("split", ["eval", "calibration"])
def test_frozen_questions_are_those_of_the_generators(split: str) -> None:
    """After a change of the generators: `python -m lab freeze`."""
    assert list(questions_of(LAB_QUESTIONS / f"questions-{split}.jsonl.xz", question_of)) == frozen(split)


@thorough
def test_conversations_of_the_other_process_are_those_of_the_generators() -> None:
    made = [example.messages for example in islice(text.conversations("train", 3), 40)]
    assert [*islice(lab_conversations("train", 3), 40)] == made
    code = "import sys, lab.__main__; sys.exit('torch' in sys.modules)"  # loading it takes longer than all the text
    assert not subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode


@thorough
def test_frozen_questions_have_one_prompt_each_and_full_marks_for_the_first_reference() -> None:
    questions = [question for split in ("eval", "calibration") for question in frozen(split)]
    assert len({question.turns[0] for question in questions}) == len(questions) == 2 * (8 * 10 + 8 * 80)
    for question in questions[::5]:
        assert len(question.references) == len(question.turns)
        if question.metric is not None:
            assert question.metric in METRICS
            assert all(score(question.metric, each[0], each) == pytest.approx(1.0) for each in question.references)


@few(2)
@pytest.mark.parametrize("name", EVERY if THOROUGH else EVERY[::3])
def test_no_evaluation_prompt_is_trained_on(name: str) -> None:
    train, kept_out = sample(name), sample(name, "eval")
    assert {split_of(name, example.key) for example in kept_out} == {"eval"}
    assert not {example.turns[0] for example in train} & {example.turns[0] for example in kept_out}
    keys: dict[str, str] = {}
    for example in (*train, *kept_out):
        assert keys.setdefault(example.turns[0], example.key) == example.key


def test_template_language() -> None:
    rng = random.Random(0)
    assert render(rng, "a(n) {thing} is a(n) unit.", {"thing": "apple"}) == "An apple is a unit."
    assert render(rng, "[[x|x]|x] a(n) hour", {}) == "X an hour"
    with pytest.raises(ValueError, match="unbalanced"):
        render(rng, "[a", {})


def all_answers(name: str) -> Iterator[tuple[str, str]]:
    """Every prompt of the sample with each of its acceptable answers."""
    for example in sample(name):
        for turn, answers in zip(example.turns, example.answers, strict=True):
            yield from ((turn, answer) for answer in answers)


@pytest.mark.parametrize("name", ["math", "math_reasoning"])
def test_every_calculation_is_right(name: str) -> None:
    for turn, answer in all_answers(name):
        worked = re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", answer)
        assert worked, turn
        for left, operation, right, result in worked:
            first, second = int(left), int(right)
            value = {"+": first + second, "-": first - second, "*": first * second, "/": first / second}[operation]
            assert value == int(result), answer
        closing = re.search(r"The answer is (\d+)\.$", answer)
        assert closing and closing.group(1) == worked[-1][3], answer
