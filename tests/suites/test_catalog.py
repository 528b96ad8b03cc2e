"""The lab's categories together: complete, repeatable, without repeated prompts, split as promised."""

from __future__ import annotations

import hashlib
from itertools import islice

import pytest

from lab import language, structured, text
from lab.example import SPLITS, Example, draw, split_of
from specbench_ss.errors import UserError
from specbench_ss.suites.scorers import METRICS, score

EVERY = (*text.SPECBENCH_CATEGORIES, *text.APP_CATEGORIES)
# sha256 of the first 60 training and 60 evaluation examples: the shipped weights learnt this text, and runs are told
# apart by the suite's content hash. Change a digest only together with the weights.
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


def test_every_category_has_one_generator() -> None:
    assert len(text.SPECBENCH_CATEGORIES) == 13
    assert sorted(EVERY) == sorted(text.GENERATORS)
    assert not set(structured.GENERATORS) & set(language.GENERATORS)


@pytest.mark.parametrize("category", EVERY)
def test_the_text_is_the_one_that_the_shipped_weights_learnt(category: str) -> None:
    drawn = [islice(draw(text.GENERATORS[category], split, 0), 60) for split in ("train", "eval")]
    text = "\x00".join(repr(example) for examples in drawn for example in examples)
    assert hashlib.sha256(text.encode()).hexdigest()[:12] == TEXT[category]


@pytest.mark.parametrize("category", EVERY)
def test_questions_of_a_category(category: str) -> None:
    size = 80
    questions = text.questions((category,), "eval", size)
    assert len(questions) == size
    assert [question.id for question in questions][:2] == [f"lab-{category}-0000", f"lab-{category}-0001"]
    assert len({question.turns[0] for question in questions}) == size
    assert {question.category for question in questions} == {category}
    assert text.questions((category,), "eval", 3) == questions[:3]
    for question in questions:
        assert len(question.references) == len(question.turns)
        assert question.metric is None or question.metric in METRICS


@pytest.mark.parametrize("category", EVERY)
def test_the_answer_to_train_on_scores_full_marks(category: str) -> None:
    for question in text.questions((category,), "eval", 5):
        for references in question.references:
            if question.metric is not None:
                assert score(question.metric, references[0], references) == pytest.approx(1.0), question


def test_the_seed_and_the_split_decide() -> None:
    asked = ("sql", "dialogue_summary")
    assert text.questions(asked, "eval", 4, seed=3) == text.questions(asked, "eval", 4, seed=3)
    assert text.questions(asked, "eval", 4, seed=3) != text.questions(asked, "eval", 4, seed=4)
    prompts = [{q.turns for q in text.questions(asked, split, 30)} for split in SPLITS]
    assert len(set.union(*prompts)) == sum(map(len, prompts))
    for example in islice(draw(text.GENERATORS["sql"], "eval", 0), 5):
        assert split_of("sql", example.key) == "eval"


def test_what_the_lab_does_not_have() -> None:
    with pytest.raises(UserError, match=r"no category 'sq1' \(did you mean sql\?\)"):
        text.questions(("sq1",), "eval", 1)


def test_a_category_that_runs_dry_is_an_error_and_no_endless_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    key = next(str(n) for n in range(100) if split_of("few", str(n)) == "eval")
    example = Example("few", ("the only prompt",), (("yes",),), key, "none")
    monkeypatch.setitem(text.GENERATORS, "few", lambda rng: example)
    assert text.questions(("few",), "eval", 1)[0].metric is None
    with pytest.raises(UserError, match="only 1 eval questions of category 'few', not 2"):
        text.questions(("few",), "eval", 2)
