"""Questions over two or three numbered passages with fresh, invented details.

Every value is drawn anew, so an answer can only be looked up in its passage and copied.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from lab.example import Example, load
from lab.language import names
from lab.language.words import key_of, say, variants


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
    town = names.town(rng)
    kind = rng.choice(("Museum", "Library", "Theatre", "Bridge", "Tower", "Market Hall", "Mill"))
    return {
        "name": f"the {town} {kind}",
        "year": _number(rng, 1780, 2020),
        "who": names.full_name(rng),
        "count": _number(rng, 20, 990, 10),
        "day": rng.choice(names.WEEKDAYS),
    }


def _firm(rng: random.Random) -> dict[str, str]:
    return {
        "name": names.firm(rng),
        "town": names.town(rng),
        "year": _number(rng, 1890, 2020),
        "who": names.full_name(rng),
        "count": _number(rng, 20, 990, 10),
        "goods": rng.choice(
            ("bicycles", "lamps", "chairs", "tents", "boats", "clocks", "paints", "pumps", "shoes", "toys")
        ),
    }


def _person(rng: random.Random) -> dict[str, str]:
    return {
        "name": names.full_name(rng),
        "town": names.town(rng),
        "year": _number(rng, 1800, 1990),
        "job": rng.choice(("painter", "engineer", "chemist", "poet", "explorer", "botanist", "composer")),
        "teacher": names.full_name(rng),
        "count": _number(rng, 3, 60),
    }


def _festival(rng: random.Random) -> dict[str, str]:
    kind = rng.choice(("Lantern", "Bread", "Kite", "Jazz", "Film", "Apple", "Boat", "Puppet"))
    return {
        "name": f"the {names.town(rng)} {kind} Festival",
        "month": rng.choice(names.MONTHS),
        "year": _number(rng, 1890, 2018),
        "who": names.full_name(rng),
        "count": _number(rng, 200, 9900, 100),
    }


def _river(rng: random.Random) -> dict[str, str]:
    return {
        "name": f"the {names.town(rng)} Canal",
        "count": _number(rng, 5, 180),
        "town": names.town(rng),
        "year": _number(rng, 1750, 1930),
        "who": names.full_name(rng),
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


def generate(rng: random.Random) -> Example:
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
