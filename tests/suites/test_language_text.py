"""The language generators: reproducible, split by content, of bounded length, varied and right."""

from __future__ import annotations

import random
import re
import string
from collections.abc import Sequence
from functools import cache

import pytest

from lab.example import SPLITS, Example, draw, split_of
from lab.knowledge import RELATIONS, SUBJECTS, facts, real_world, world
from lab.language import GENERATORS
from lab.phrases import say
from lab.prose import PIECES

CATEGORIES = sorted(GENERATORS)
TWO_TURNS = {"writing", "roleplay", "stem", "humanities"}
METRICS = {"translation": "bleu", "qa": "token_f1", "rag": "token_f1"}
DRAWS = 2000


@cache
def sample(category: str) -> tuple[Example, ...]:
    rng = random.Random(f"test:{category}")
    return tuple(GENERATORS[category](rng) for _ in range(DRAWS))


def slots_of(template: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(template) if name}


def test_the_eight_categories_are_there() -> None:
    assert set(GENERATORS) == TWO_TURNS | {"translation", "summarization", "qa", "rag"}


@pytest.mark.parametrize("category", CATEGORIES)
def test_same_seed_same_examples(category: str) -> None:
    generate = GENERATORS[category]
    one, other = random.Random(5), random.Random(5)
    assert [generate(one) for _ in range(50)] == [generate(other) for _ in range(50)]


@pytest.mark.parametrize("category", CATEGORIES)
def test_example_shape(category: str) -> None:
    for example in sample(category):
        assert example.category == category
        assert example.metric == METRICS.get(category, "rouge_l")
        assert len(example.turns) == (2 if category in TWO_TURNS else 1)
        assert all(1 <= len(answers) <= 6 for answers in example.answers)
        assert all(len(set(answers)) == len(answers) for answers in example.answers)


@pytest.mark.parametrize("category", CATEGORIES)
def test_a_prompt_has_one_key_so_splits_share_no_prompt(category: str) -> None:
    keys: dict[str, str] = {}
    prompts: dict[str, set[str]] = {split: set() for split in SPLITS}
    for example in sample(category):
        assert keys.setdefault(example.turns[0], example.key) == example.key
        prompts[split_of(category, example.key)].add(example.turns[0])
    assert not prompts["eval"] & prompts["train"]
    assert not prompts["calibration"] & prompts["train"]
    assert all(prompts.values())


@pytest.mark.parametrize("category", CATEGORIES)
def test_eval_stream_is_not_in_train_stream(category: str) -> None:
    streams = {split: draw(GENERATORS[category], split, 0) for split in ("eval", "train")}
    prompts = {
        split: {next(stream).turns[0] for _ in range(40 if split == "eval" else DRAWS // 4)}
        for split, stream in streams.items()
    }
    assert not prompts["eval"] & prompts["train"]


@pytest.mark.parametrize("category", CATEGORIES)
def test_lengths(category: str) -> None:
    lengths = [
        sum(map(len, each.turns)) + sum(len(answers[0]) for answers in each.answers) for each in sample(category)
    ]
    assert max(lengths) <= 1500
    assert sorted(lengths)[int(0.95 * DRAWS)] < 900


@pytest.mark.parametrize("category", CATEGORIES)
def test_variety(category: str) -> None:
    prompts = {example.turns[0] for example in sample(category)}
    # Questions about a closed world come back; everything else is nearly always new.
    assert len(prompts) > 0.9 * DRAWS
    assert len({example.answers for example in sample(category)}) > 0.9 * DRAWS


@pytest.mark.parametrize("category", CATEGORIES)
def test_text_is_clean(category: str) -> None:
    for example in sample(category)[:600]:
        for text in (*example.turns, *(answer for answers in example.answers for answer in answers)):
            bare = re.sub(r"\[\d\] ?", "", text)
            assert not re.search(r"[{}|\[\]]|  | [.,;]|\.\.|a\(n\)| $", bare), text
            assert text[0].isupper() or not text[0].isalpha(), text
            assert not re.search(r"\b[Aa] [aeio]\w|\b[Aa]n [bcdfgjklmnpqrstvwxyz]", bare), text


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


def test_qa_facts_can_be_learned_in_other_wordings() -> None:
    assert len(facts()) > 2000
    for relation in RELATIONS:
        assert len(set(relation.questions)) >= 6
    seen = 0
    for relation, entity in facts():
        keys = (
            "\x1f".join((relation.kind, relation.attribute, entity["name"], str(w)))
            for w in range(len(relation.questions))
        )
        seen += any(split_of("qa", key) == "train" for key in keys)
    assert seen == len(facts())


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
