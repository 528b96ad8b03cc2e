"""The lab's text: right in what it says, split without overlap, and equal to the frozen questions."""

from __future__ import annotations

import hashlib
import json
import random
import re
import sqlite3
import string
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from lab import text
from lab.__main__ import frozen
from lab.example import Example, draw, split_of
from lab.knowledge import SUBJECTS, facts, real_world, world
from lab.phrases import say
from lab.prose import PIECES
from lab.text import GENERATORS
from specbench_ss.suites.base import LAB_QUESTIONS, read_questions
from specbench_ss.suites.scorers import METRICS, score
from specbench_ss.training.data import conversations

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


@cache
def sample(name: str, split: str = "train") -> list[Example]:
    # an evaluation example costs sixteen draws
    return list(islice(draw(GENERATORS[name], split, 11), 600 if split == "train" else 150))


@pytest.mark.parametrize("category", EVERY)
def test_the_text_is_the_one_that_the_shipped_weights_learnt(category: str) -> None:
    drawn = [islice(draw(GENERATORS[category], split, 0), 60) for split in ("train", "eval")]
    shown = "\x00".join(repr(example) for examples in drawn for example in examples)
    assert hashlib.sha256(shown.encode()).hexdigest()[:12] == TEXT[category]


def test_the_package_does_not_import_the_lab() -> None:
    root = Path(__file__).parents[2]
    files = [file for name in ("specbench_ss", "methods", "suites", "reports") for file in (root / name).rglob("*.py")]
    assert not [file for file in files if re.search(r"^\s*(from|import) lab\b", file.read_text(), re.MULTILINE)]


@pytest.mark.parametrize("split", ["eval", "calibration"])
def test_frozen_questions_are_those_of_the_generators(split: str) -> None:
    """After a change of the generators: `python -m lab freeze`."""
    assert list(read_questions(LAB_QUESTIONS / f"questions-{split}.jsonl.gz", {})) == frozen(split)


def test_conversations_of_the_other_process_are_those_of_the_generators() -> None:
    made = [(each.turns, each.answers) for each in islice(text.conversations("train", 3), 40)]
    assert [(each.turns, each.answers) for each in islice(conversations("train", 3), 40)] == made


def test_frozen_questions_have_one_prompt_each_and_full_marks_for_the_first_reference() -> None:
    questions = [question for split in ("eval", "calibration") for question in frozen(split)]
    assert len({question.turns[0] for question in questions}) == len(questions) == 2 * (8 * 10 + 8 * 80)
    for question in questions[::5]:
        assert len(question.references) == len(question.turns)
        if question.metric is not None:
            assert question.metric in METRICS
            assert all(score(question.metric, each[0], each) == pytest.approx(1.0) for each in question.references)


@pytest.mark.parametrize("name", EVERY)
def test_no_evaluation_prompt_is_trained_on(name: str) -> None:
    train, held_out = sample(name), sample(name, "eval")
    assert {split_of(name, example.key) for example in held_out} == {"eval"}
    assert not {example.turns[0] for example in train} & {example.turns[0] for example in held_out}
    keys: dict[str, str] = {}
    for example in (*train, *held_out):
        assert keys.setdefault(example.turns[0], example.key) == example.key


@pytest.mark.parametrize("name", EVERY)
def test_text_is_of_moderate_length_and_varied(name: str) -> None:
    lengths = [sum(map(len, (*each.turns, *(answers[0] for answers in each.answers)))) for each in sample(name)]
    assert max(lengths) <= 1500
    assert sorted(lengths)[len(lengths) * 95 // 100] <= 900
    assert len({example.turns for example in sample(name)}) > 0.9 * len(lengths)


def test_generators_use_only_the_given_randomness() -> None:
    for name in EVERY:
        random.seed(1)
        first = GENERATORS[name](random.Random(5))
        random.seed(2)
        assert GENERATORS[name](random.Random(5)) == first


def slots_of(template: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(template) if name}


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


@pytest.mark.parametrize("category", ["rag", "summarization"])
def test_numbers_and_names_of_answers_are_copied_from_the_prompt(category: str) -> None:
    for example in sample(category):
        prompt = words(example.turns[0])
        for answer in example.answers[0]:
            inside = {word for word in words(re.sub(r"[Pp]assage \d", "", answer)) if word.isdigit()}
            capital = set(re.findall(r"(?<=[a-z,] )[A-Z]\w+", answer))
            assert inside | capital <= prompt, (answer, example.turns[0])


def test_rag_answers_cite_the_passage_that_holds_the_answer() -> None:
    for example in sample("rag"):
        passages = dict(re.findall(r"\[(\d)\] (.*?)(?= \[\d\]|\n|$)", example.turns[0]))
        for answer in example.answers[0]:
            (cited,) = set(re.findall(r"[Pp]assage (\d)", answer))
            numbers = {word for word in words(re.sub(r"[Pp]assage \d", "", answer)) if word.isdigit()}
            assert numbers <= words(passages[cited])


def test_writing_prompts_of_a_piece_give_the_same_details() -> None:
    for piece in PIECES:
        given = slots_of(piece.first.prompts[0])
        assert all(slots_of(prompt) == given for prompt in piece.first.prompts)
        assert all(slots_of(answer) <= given for answer in piece.first.answers)


def _details(example: Example) -> Sequence[str]:
    return example.key.split("\x1f")


@pytest.mark.parametrize("category", ["writing", "roleplay"])
def test_first_prompts_hold_every_detail_of_the_key(category: str) -> None:
    for example in sample(category):
        prompt = example.turns[0].lower()
        assert all(detail.lower() in prompt for detail in _details(example)[1:])


def test_qa_answers_agree_with_the_fact() -> None:
    known = {(relation.kind, relation.attribute, entity["name"]): entity for relation, entity in facts()}
    for example in sample("qa"):
        kind, attribute, name, _ = _details(example)
        entity = known[kind, attribute, name]
        asked = name if attribute == "inverse" else entity[attribute]
        for answer in example.answers[0]:
            assert asked.lower() in answer.lower()


def test_gazetteer_names_are_unique_and_refer_to_each_other() -> None:
    entities = world()
    for kind in entities.values():
        assert len({entity["name"] for entity in kind}) == len(kind)
    towns = {entity["name"] for entity in entities["town"]}
    rivers = {entity["name"] for entity in entities["river"]}
    assert {entity["town"] for kind in ("firm", "artist") for entity in entities[kind]} <= towns
    assert {entity["river"] for entity in entities["town"]} <= rivers
    assert all(int(entity["year"]) > int(entity["born"]) for entity in entities["artist"])


def test_real_facts_are_unique_where_questions_turn_them_round() -> None:
    entities = real_world()
    for kind, attribute in (
        ("country", "capital"),
        ("element", "symbol"),
        ("element", "number"),
        ("month", "position"),
    ):
        values = [entity[attribute] for entity in entities[kind]]
        assert len(set(values)) == len(values)
    months = entities["month"]
    assert all(months[index]["after"] == months[(index + 1) % 12]["name"] for index in range(12))
    assert all(months[index]["before"] == months[index - 1]["name"] for index in range(12))


def test_rag_questions_are_about_what_every_passage_tells() -> None:
    for subject in SUBJECTS:
        for passage in subject.passages:
            told = slots_of(passage)
            assert all(slots_of(question) | slots_of(answer) <= told for question, answer in subject.questions)


def test_template_language() -> None:
    rng = random.Random(0)
    assert say(rng, "a(n) {thing} is a(n) unit.", {"thing": "apple"}) == "An apple is a unit."
    assert say(rng, "[[x|x]|x] a(n) hour", {}) == "X an hour"
    with pytest.raises(ValueError, match="unbalanced"):
        say(rng, "[a", {})


def all_answers(name: str) -> Iterator[tuple[str, str]]:
    """Every prompt of the sample with each of its acceptable answers."""
    for example in sample(name):
        for turn, answers in zip(example.turns, example.answers, strict=True):
            yield from ((turn, answer) for answer in answers)


def test_sql_runs_on_its_schema_and_copies_values_from_the_question() -> None:
    for example in sample("sql"):
        prompt, ((query,),) = example.turns[0], example.answers
        tables = re.findall(r"CREATE TABLE .*?\);", prompt)
        with sqlite3.connect(":memory:") as database:
            database.executescript(" ".join(tables))
            database.execute(query).fetchall()
        question = prompt
        for table in tables:
            question = question.replace(table, "")
        for value in re.findall(r"'([^']*)'|(?<= )(\d+)", query):
            assert "".join(value) in question
        assert query.count(";") == 1


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


def test_functions_do_what_is_asked() -> None:
    checks: dict[str, Any] = {
        "larger than": lambda given, n: sum(value > n for value in given),
        "smallest of the": lambda given, _: max(given) - min(given),
        "adds up all": lambda given, _: sum(given),
        "divisible by": lambda given, n: [value for value in given if value % n == 0],
    }
    seen = set()
    for example in sample("coding"):
        prompt, code = example.turns[0], re.search(r"```python\n(.*)\n```", example.answers[0][0], re.DOTALL)
        for phrase, expected in checks.items():
            if phrase in prompt and code and "whether" not in prompt:
                scope: dict[str, object] = {}
                exec(code.group(1), scope)
                function = next(value for key, value in scope.items() if key != "__builtins__")
                number = re.search(r" (\d+)", prompt)
                given = list(range(1, 40))
                assert callable(function)
                assert function(given) == expected(given, int(number.group(1)) if number else 0)
                seen.add(phrase)
    assert seen == set(checks)


def test_orders_follow_from_the_clues() -> None:
    found = 0
    for example in sample("reasoning"):
        prompt, answer = example.turns[0], example.answers[0][0]
        pairs = re.findall(r"(\w+) is \w+er than (\w+)\.", prompt)
        order = re.search(r"order (?:is )?([\w, ]+)\.", answer)
        if pairs and order:
            names = order.group(1).split(", ")
            assert all(names.index(first) < names.index(second) for first, second in pairs)
            assert {name for pair in pairs for name in pair} == set(names)
            found += 1
    assert found > 30


def test_extracted_values_are_in_the_text() -> None:
    for example in sample("extraction"):
        prompt, answer = example.turns[0], example.answers[0][0]
        values = json.loads(answer).values() if answer.startswith("{") else re.findall(r"- \w+: (.+)", answer)
        assert 3 <= len(values) <= 5
        assert all(str(value) in prompt for value in values), (prompt, answer)


def test_attributes_are_all_said() -> None:
    for example in sample("meaning_representation"):
        values = re.findall(r"(\w+)\[([^\]]*)\]", example.turns[0])
        plain = [value for name, value in values if value not in ("yes", "no") and "allowed" not in value]
        plain = [value for value in plain if not re.fullmatch(r"(not )?(included|suitable)|free|paid", value)]
        for answer in example.answers[0]:
            assert all(value in answer for value in plain), answer
