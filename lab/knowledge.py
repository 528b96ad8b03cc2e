"""Questions about facts, closed-book or with passages."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from itertools import product

from lab.example import Example, load, records
from lab.phrases import KINDS, draw_slots, key_of, render, slot_values, variants

# Facts of the world and of an invented one: towns, firms, artists and rivers.

Entity = dict[str, str]
_REAL = ("country", "element", "planet", "animal", "work", "month")

# Changing the seed changes every invented fact, which trained lab models have memorized.
_SEED = "gazetteer-1"
_PLACES = {**KINDS, **load("gazetteer.kinds", dict[str, list[str]])}
_ENTITIES = load("gazetteer.entities", dict[str, dict[str, str]])
_WORKS = load("gazetteer.works", list[tuple[str, str]])


def _invented(rng: random.Random, count: int, firsts: str, seconds: str, joint: str = "") -> list[str]:
    """Return distinct invented names, each of two parts."""
    return rng.sample([joint.join(parts) for parts in product(_PLACES[firsts], _PLACES[seconds])], count)


@cache
def world() -> dict[str, list[Entity]]:
    """Return every invented entity by kind."""
    rng = random.Random(_SEED)
    places = {**_PLACES, "river": _invented(rng, 40, "river_start", "river_end")}

    def entities(kind: str) -> list[Entity]:
        return [{"name": name, **draw_slots(rng, _ENTITIES[kind], places)} for name in places[kind]]

    places["town"] = _invented(rng, 120, "town_start", "town_end")
    towns = entities("town")
    places["firm"] = _invented(rng, 80, "firm_start", "firm_end", " ")
    firms = entities("firm")
    people = _invented(rng, 80, "first_name", "surname", " ")
    titles = _invented(rng, 80, "title_start", "title_end", " ")
    artists = []
    for name, title in zip(people, titles, strict=True):
        job, work = rng.choice(_WORKS)
        slots = draw_slots(rng, _ENTITIES["artist"], places)
        artists.append({"name": name, "job": job, "work": work, "title": f"The {title}", **slots})
    for artist in artists:
        artist["year"] = str(int(artist["born"]) + rng.randint(24, 60))
    return {"town": towns, "firm": firms, "artist": artists, "river": entities("river")}


# Closed-book questions over both worlds.


@dataclass(frozen=True, slots=True)
class Relation:
    """An attribute of a kind of entity. asked: its form in a question. facts: statements of it. more: related facts."""

    kind: str
    attribute: str
    asked: str
    facts: tuple[str, ...]
    more: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Relations:
    """Relations with the same questions: those in form of a noun phrase, or of a clause."""

    questions: tuple[str, ...]
    relations: tuple[Relation, ...]


_ASKED = (load("qa.phrase", Relations), load("qa.clause", Relations))


@cache
def facts() -> tuple[tuple[Relation, tuple[str, ...], Entity], ...]:
    """Return every fact: an attribute of an entity, and how to ask for it."""
    entities = {**{kind: records(f"facts.{kind}") for kind in _REAL}, **world()}
    return tuple(
        (relation, asked.questions, entity)
        for asked in _ASKED
        for relation in asked.relations
        for entity in entities[relation.kind]
    )


def generate_qa(rng: random.Random) -> Example:
    """Return a uniformly drawn fact in a uniformly drawn wording; an answer adds a related fact."""
    relation, questions, entity = rng.choice(facts())
    wording = rng.randrange(len(questions))
    question = render(rng, questions[wording].replace("{asked}", relation.asked), entity)
    answers = variants(rng, [" ".join(parts) for parts in product(relation.facts, relation.more)], entity)
    key = key_of(relation.kind, relation.attribute, entity["name"], str(wording))
    return Example("qa", (question,), (answers,), key, "token_f1")


# Questions over two or three numbered passages with fresh, invented details.


@dataclass(frozen=True, slots=True)
class Subject:
    """A kind of thing that passages describe. questions: question -> the answer as a clause."""

    slots: dict[str, str]
    passages: tuple[str, ...]
    questions: dict[str, str]


SUBJECTS = load("rag.subjects", tuple[Subject, ...])
_PROMPTS = load("rag.prompts", tuple[str, ...])
_CITED = load("rag.cited", tuple[str, ...])


def generate_rag(rng: random.Random) -> Example:
    """Return passages on different subjects; the key is their whole set of details with the question asked."""
    subjects = [(each, draw_slots(rng, each.slots)) for each in rng.sample(SUBJECTS, rng.choice((2, 3, 3)))]
    passages = " ".join(
        f"[{number}] {render(rng, rng.choice(each.passages), slots)}"
        for number, (each, slots) in enumerate(subjects, 1)
    )
    number = rng.randint(1, len(subjects))
    subject, slots = subjects[number - 1]
    index = rng.randrange(len(subject.questions))
    question, answer = list(subject.questions.items())[index]
    # Passage numbers are in square brackets, which `render` would expand.
    prompt = rng.choice(_PROMPTS).format(passages=passages, question=render(rng, question, slots))
    others = [other for other in subject.questions.values() if other != answer]
    wordings = [
        cited.replace("{number}", str(number)).replace("{answer}", answer).replace("{more}", other)
        for cited in _CITED
        for other in others
    ]
    details = [value for each, values in subjects for value in slot_values(values, each.passages[0])]
    key = key_of(*details, str(number), str(index))
    return Example("rag", (prompt,), (variants(rng, wordings, slots),), key, "token_f1")
