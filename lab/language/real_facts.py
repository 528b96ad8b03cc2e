"""Real facts for closed-book questions: countries, elements, planets, animals, works and months."""

from __future__ import annotations

from functools import cache

from lab.example import load, rows

Entity = dict[str, str]

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
_WORKS = (
    "name|maker|verb|kind|country",
    load("real_facts.works_0", str),
)
_MONTHS = (
    "name|position|days|after|before",
    load("real_facts.months_0", str),
)


def _entities(table: tuple[str, str]) -> list[Entity]:
    header = table[0].split("|")
    return [dict(zip(header, row, strict=True)) for row in rows(table[1])]


@cache
def real_world() -> dict[str, list[Entity]]:
    """Every real entity by kind."""
    return {
        "country": _entities(_COUNTRIES),
        "element": _entities(_ELEMENTS),
        "planet": _entities(_PLANETS),
        "animal": _entities(_ANIMALS),
        "work": _entities(_WORKS),
        "month": _entities(_MONTHS),
    }
