"""Questions about facts, asked from memory or with a text beside them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from lab import phrases
from lab.example import Example, load, rows, table
from lab.phrases import key_of, say, terms, variants

# An invented world for closed-book questions: towns, firms, people and rivers with fixed attributes.

Entity_gazetteer = dict[str, str]
World = dict[str, list[Entity_gazetteer]]

# Changing the seed changes every fact, and so what trained lab models know.
_SEED = "gazetteer-1"
REGIONS = load("gazetteer.regions", tuple[str, ...])
_PRODUCTS = load("gazetteer.products", list[str])
_FESTIVALS = terms("lantern, harvest, kite, bread, boat, music, snow, apple, puppet, river, candle, flower")
_GOODS = load("gazetteer.goods", list[str])
_GAZETTEER_WORKS = load("gazetteer.works", tuple[tuple[str, ...], ...])
_TITLES_FIRST = terms("Silent, Golden, Broken, Distant, Winter, Hidden, Last, Blue, Second, Burning, Quiet, Northern")
_TITLES_SECOND = terms("Garden, Harbour, Mirror, Road, Orchard, Window, Letter, Island, Season, Bell, Forest, Lamp")
_RIVER_STARTS = terms(
    "Al, Bre, Cor, Dru, Esk, Fen, Gal, Hul, Ist, Jor, Kar, Lim, Mol, Nev, Or, Pras, Rue, Sav, Tem, Ul"
)
_RIVER_ENDS = terms("a, en, is, or, une, ava")


def _distinct(rng: random.Random, firsts: list[str], seconds: list[str], joint: str, count: int) -> list[str]:
    """Invented names, none twice."""
    return rng.sample([f"{first}{joint}{second}" for first in firsts for second in seconds], count)


def _towns(rng: random.Random, rivers: list[str]) -> list[Entity_gazetteer]:
    towns = _distinct(rng, phrases.TOWN_STARTS, phrases.TOWN_ENDS, "", 120)
    return [
        {
            "name": town,
            "river": rng.choice(rivers),
            "region": rng.choice(REGIONS),
            "founded": str(rng.randint(1050, 1890)),
            "product": rng.choice(_PRODUCTS),
            "festival": rng.choice(_FESTIVALS),
            "month": rng.choice(phrases.MONTHS),
            "mayor": phrases.full_name(rng),
        }
        for town in towns
    ]


def _firms(rng: random.Random, towns: list[Entity_gazetteer]) -> list[Entity_gazetteer]:
    firms = _distinct(rng, phrases.FIRM_STARTS, phrases.FIRM_ENDS, " ", 80)
    return [
        {
            "name": firm,
            "town": rng.choice(towns)["name"],
            "goods": rng.choice(_GOODS),
            "founder": phrases.full_name(rng),
            "founded": str(rng.randint(1890, 2015)),
            "staff": str(rng.randint(2, 90) * 10),
        }
        for firm in firms
    ]


def _people(rng: random.Random, towns: list[Entity_gazetteer]) -> list[Entity_gazetteer]:
    people = _distinct(rng, [*phrases.WOMEN, *phrases.MEN], phrases.SURNAMES, " ", 80)
    titles = _distinct(rng, _TITLES_FIRST, _TITLES_SECOND, " ", 80)
    made = []
    for person, title in zip(people, titles, strict=True):
        job, work = rng.choice(_GAZETTEER_WORKS)
        made.append(
            {
                "name": person,
                "job": job,
                "work": work,
                "title": f"The {title}",
                "town": rng.choice(towns)["name"],
                "born": str(rng.randint(1790, 1960)),
                "year": "",
            }
        )
    for entity in made:
        entity["year"] = str(int(entity["born"]) + rng.randint(24, 60))
    return made


def _rivers(rng: random.Random, rivers: list[str]) -> list[Entity_gazetteer]:
    return [
        {
            "name": river,
            "length": str(rng.randint(6, 90) * 10),
            "source": rng.choice(REGIONS),
            "end": rng.choice(("the Pale Sea", "the Bay of Orm", "Lake Tessel", "the Amber Sea")),
            "fish": rng.choice(("trout", "salmon", "perch", "pike", "eels")),
        }
        for river in rivers
    ]


@cache
def world() -> World:
    """Every invented entity by kind."""
    rng = random.Random(_SEED)
    rivers = _distinct(rng, _RIVER_STARTS, _RIVER_ENDS, "", 40)
    towns = _towns(rng, rivers)
    return {"town": towns, "firm": _firms(rng, towns), "artist": _people(rng, towns), "river": _rivers(rng, rivers)}


# Real facts for closed-book questions: countries, elements, planets, animals, works and months.

Entity_real_facts = dict[str, str]

_COUNTRIES = (
    "name|capital|currency|continent|language",
    load("real_facts.countries_0", str),
)
_ELEMENTS = (
    "name|symbol|number|state|use",
    load("real_facts.elements_0", str),
)
_PLANETS = (
    "name|position|moons|feature",
    load("real_facts.planets_0", str),
)
_ANIMALS = (
    "name|group|young|food|home",
    load("real_facts.animals_0", str),
)
_REAL_FACTS_WORKS = (
    "name|maker|verb|kind|country",
    load("real_facts.works_0", str),
)
_MONTHS = (
    "name|position|days|after|before",
    load("real_facts.months_0", str),
)


def _entities(table: tuple[str, str]) -> list[Entity_real_facts]:
    header = table[0].split("|")
    return [dict(zip(header, row, strict=True)) for row in rows(table[1])]


@cache
def real_world() -> dict[str, list[Entity_real_facts]]:
    """Every real entity by kind."""
    return {
        "country": _entities(_COUNTRIES),
        "element": _entities(_ELEMENTS),
        "planet": _entities(_PLANETS),
        "animal": _entities(_ANIMALS),
        "work": _entities(_REAL_FACTS_WORKS),
        "month": _entities(_MONTHS),
    }


# How to ask for each attribute of each kind of entity, and how to answer.


@dataclass(frozen=True, slots=True)
class Relation:
    """An attribute of a kind of entity: six or more questions, and answers that add a related fact."""

    kind: str
    attribute: str
    questions: tuple[str, ...]
    answers: tuple[str, ...]


# Wordings that fit any attribute told as a noun phrase ("the capital of {name}").
_PHRASE_QUESTIONS = (
    "What is {phrase}?",
    "Tell me {phrase}.",
    "Can you name {phrase}?",
    "I need to know {phrase}.",
    "Do you know {phrase}?",
    "Please tell me {phrase}.",
    "I forgot {phrase}. What is it?",
    "Question: what is {phrase}?",
)
# Wordings that fit any attribute told as a clause ("which river {name} lies on").
_CLAUSE_QUESTIONS = (
    "Tell me {clause}.",
    "Do you know {clause}?",
    "Can you say {clause}?",
    "I would like to know {clause}.",
    "Please tell me {clause}.",
    "Could you explain {clause}?",
    "I wonder {clause}.",
)


def _answers(fact: str, more: str) -> tuple[str, ...]:
    """Every way to state the fact with every related fact."""
    return tuple(f"{first.strip()} {second.strip()}" for first in fact.split(" / ") for second in more.split(" / "))


def _relations(name: str, wordings: tuple[str, ...], slot: str) -> list[Relation]:
    return [
        Relation(
            kind, attribute, tuple(wording.replace(f"{{{slot}}}", asked) for wording in wordings), _answers(fact, more)
        )
        for kind, attribute, asked, fact, more in table(name)
    ]


RELATIONS = (
    *_relations("qa_by_phrase", _PHRASE_QUESTIONS, "phrase"),
    *_relations("qa_by_clause", _CLAUSE_QUESTIONS, "clause"),
)


# Closed-book questions over real facts and the invented gazetteer.


@cache
def facts() -> tuple[tuple[Relation, Entity_real_facts], ...]:
    """Every fact: an attribute of an entity."""
    entities = {**real_world(), **world()}
    return tuple((relation, entity) for relation in RELATIONS for entity in entities[relation.kind])


def generate_qa(rng: random.Random) -> Example:
    """A uniformly drawn fact in a uniformly drawn wording."""
    relation, entity = rng.choice(facts())
    wording = rng.randrange(len(relation.questions))
    return Example(
        category="qa",
        turns=(say(rng, relation.questions[wording], entity),),
        answers=(variants(rng, relation.answers, entity),),
        key=key_of(relation.kind, relation.attribute, entity["name"], str(wording)),
        metric="token_f1",
    )


# Questions over two or three numbered passages with fresh, invented details.


@dataclass(frozen=True, slots=True)
class Subject:
    """A kind of thing passages tell of: how to draw one, to tell it, and to ask and answer about it."""

    slots: Callable[[random.Random], dict[str, str]]
    passages: tuple[str, ...]
    # Each: question, and the answer as a clause.
    questions: tuple[tuple[str, str], ...]


def _number(rng: random.Random, low: int, high: int, step: int = 1) -> str:
    return str(rng.randrange(low, high, step))


def _place(rng: random.Random) -> dict[str, str]:
    town = phrases.town(rng)
    kind = rng.choice(("Museum", "Library", "Theatre", "Bridge", "Tower", "Market Hall", "Mill"))
    return {
        "name": f"the {town} {kind}",
        "year": _number(rng, 1780, 2020),
        "who": phrases.full_name(rng),
        "count": _number(rng, 20, 990, 10),
        "day": rng.choice(phrases.WEEKDAYS),
    }


def _firm(rng: random.Random) -> dict[str, str]:
    return {
        "name": phrases.firm(rng),
        "town": phrases.town(rng),
        "year": _number(rng, 1890, 2020),
        "who": phrases.full_name(rng),
        "count": _number(rng, 20, 990, 10),
        "goods": rng.choice(
            ("bicycles", "lamps", "chairs", "tents", "boats", "clocks", "paints", "pumps", "shoes", "toys")
        ),
    }


def _person(rng: random.Random) -> dict[str, str]:
    return {
        "name": phrases.full_name(rng),
        "town": phrases.town(rng),
        "year": _number(rng, 1800, 1990),
        "job": rng.choice(("painter", "engineer", "chemist", "poet", "explorer", "botanist", "composer")),
        "teacher": phrases.full_name(rng),
        "count": _number(rng, 3, 60),
    }


def _festival(rng: random.Random) -> dict[str, str]:
    kind = rng.choice(("Lantern", "Bread", "Kite", "Jazz", "Film", "Apple", "Boat", "Puppet"))
    return {
        "name": f"the {phrases.town(rng)} {kind} Festival",
        "month": rng.choice(phrases.MONTHS),
        "year": _number(rng, 1890, 2018),
        "who": phrases.full_name(rng),
        "count": _number(rng, 200, 9900, 100),
    }


def _river(rng: random.Random) -> dict[str, str]:
    return {
        "name": f"the {phrases.town(rng)} Canal",
        "count": _number(rng, 5, 180),
        "town": phrases.town(rng),
        "year": _number(rng, 1750, 1930),
        "who": phrases.full_name(rng),
        "locks": _number(rng, 2, 40),
    }


SUBJECTS = (
    Subject(
        _place,
        (
            "{name} opened in {year} and was designed by {who}. It welcomes {count} visitors a day and is closed on "
            "{day}.",
            "{who} designed {name}, which opened in {year}. About {count} people visit it each day, but never on "
            "{day}, when it is closed.",
        ),
        (
            ("[when did {name} open|in which year did {name} open]?", "{name} [opened|first opened] in {year}"),
            ("who designed {name}?", "{name} was designed by {who}"),
            ("on which day is {name} closed?", "{name} is closed on {day}"),
            (
                "how many [people visit|visitors come to] {name} each day?",
                "{count} [visitors come to|people visit] {name} each day",
            ),
        ),
    ),
    Subject(
        _firm,
        (
            "{name} makes {goods} in {town}. The company was founded in {year} by {who} and has {count} workers.",
            "The company {name} was founded by {who} in {year}. Its {count} workers make {goods} in {town}.",
        ),
        (
            ("who founded {name}?", "{name} was founded by {who}"),
            ("[when was {name} founded|in which year was {name} founded]?", "{name} was founded in {year}"),
            ("what does {name} make?", "{name} makes {goods}"),
            ("where does {name} work?", "{name} works in {town}"),
            ("how many workers does {name} have?", "{name} has {count} workers"),
        ),
    ),
    Subject(
        _person,
        (
            "{name} was a(n) {job} who was born in {town} in {year}. After lessons with {teacher}, the {job} left "
            "{count} notebooks.",
            "The {job} {name}, born in {year} in {town}, studied with {teacher}. Today {count} notebooks of the "
            "{job} are kept.",
        ),
        (
            ("where was {name} born?", "{name} was born in {town}"),
            ("[when was {name} born|in which year was {name} born]?", "{name} was born in {year}"),
            ("who taught {name}?", "{name} was taught by {teacher}"),
            ("what was the profession of {name}?", "{name} was a(n) {job}"),
            ("how many notebooks did {name} leave?", "{name} left {count} notebooks"),
        ),
    ),
    Subject(
        _festival,
        (
            "{name} is held every {month}. It was started in {year} by {who} and now draws {count} guests.",
            "Every {month}, {name} draws {count} guests. {who} started it in {year}.",
        ),
        (
            ("in which month is {name} held?", "{name} is held in {month}"),
            ("who started {name}?", "{name} was started by {who}"),
            ("[when was {name} started|in which year did {name} begin]?", "{name} was started in {year}"),
            ("how many guests come to {name}?", "{name} draws {count} guests"),
        ),
    ),
    Subject(
        _river,
        (
            "{name} is {count} kilometres long and ends in {town}. {who} built it with {locks} locks in {year}.",
            "In {year}, {who} finished {name}. It has {locks} locks, is {count} kilometres long and leads to {town}.",
        ),
        (
            ("how long is {name}?", "{name} is {count} kilometres long"),
            ("where does {name} lead?", "{name} leads to {town}"),
            ("who built {name}?", "{name} was built by {who}"),
            ("how many locks does {name} have?", "{name} has {locks} locks"),
            ("[when was {name} finished|in which year was {name} finished]?", "{name} was finished in {year}"),
        ),
    ),
)
_PROMPTS = load("rag.prompts", tuple[str, ...])
_CITED = load("rag.cited", tuple[str, ...])


def generate_rag(rng: random.Random) -> Example:
    """Passages on different subjects; the key is their whole set of details with the question asked."""
    told = [(subject, subject.slots(rng)) for subject in rng.sample(SUBJECTS, rng.choice((2, 3, 3)))]
    passages = " ".join(
        f"[{number}] {say(rng, rng.choice(subject.passages), slots)}" for number, (subject, slots) in enumerate(told, 1)
    )
    number = rng.randint(1, len(told))
    subject, slots = told[number - 1]
    index = rng.randrange(len(subject.questions))
    question, answer = subject.questions[index]
    # Passage numbers stand in square brackets, so the prompt is filled in plainly rather than by `say`.
    prompt = rng.choice(_PROMPTS).format(passages=passages, question=say(rng, question, slots))
    others = [other for place, (_, other) in enumerate(subject.questions) if place != index]
    wordings = [
        cited.replace("{number}", str(number)).replace("{answer}", answer).replace("{more}", other)
        for cited in _CITED
        for other in others
    ]
    key = key_of(*(value for _, entity in told for value in entity.values()), str(number), str(index))
    return Example("rag", (prompt,), (variants(rng, wordings, slots),), key, "token_f1")
