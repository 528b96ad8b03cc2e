"""The vocabulary the structured categories share, and how a value of a kind is drawn.

A slot specification such as `item=food price=10-90 who=person` names a kind or a range for each slot.
"""

from __future__ import annotations

import random
from functools import cache

from lab.example import load
from lab.structured.wording import pick, several

WOMEN = load("words.women", tuple[str, ...])
MEN = load("words.men", tuple[str, ...])
PEOPLE = WOMEN + MEN
SURNAMES = load("words.surnames", tuple[str, ...])
_FEMALE = frozenset(WOMEN)

KINDS = load("words.kinds", dict[str, tuple[str, ...]])


def person_forms(name: str) -> tuple[str, str, str]:
    """The pronouns of a first name: subject, possessive, object."""
    return ("she", "her", "her") if name in _FEMALE else ("he", "his", "him")


def full_name(rng: random.Random) -> str:
    """A first name and a surname."""
    return f"{pick(rng, PEOPLE)} {pick(rng, SURNAMES)}"


def people(rng: random.Random, count: int) -> list[str]:
    """Different first names."""
    return rng.sample(PEOPLE, count)


@cache
def _spec(text: str) -> tuple[tuple[str, str, int, int], ...]:
    found = []
    for entry in text.split():
        name, kind = entry.split("=")
        low, dash, high = kind.partition("-")
        found.append((name, "", int(low), int(high)) if dash else (name, kind, 0, 0))
    return tuple(found)


def draw_slots(rng: random.Random, spec: str, kinds: dict[str, tuple[str, ...]] = KINDS) -> dict[str, object]:
    """A value for every slot of the specification."""
    slots: dict[str, object] = {}
    for name, kind, low, high in _spec(spec):
        if not kind:
            slots[name] = low + int(rng.random() * (high - low + 1))
            continue
        value = pick(rng, kinds[kind])
        while value in slots.values():  # two cities of one text are two different cities
            value = pick(rng, kinds[kind])
        slots[name] = value
    return slots


def more_kinds(text: str) -> dict[str, tuple[str, ...]]:
    """Kinds written as lines of `kind: value;value`."""
    pairs = (line.split(": ") for line in text.strip().split("\n"))
    return {name: several(values) for name, values in pairs}
