"""An invented world for closed-book questions: towns, firms, people and rivers with fixed attributes.

The world is the same in every process: it is drawn once from a fixed seed. Knows no question.
"""

from __future__ import annotations

import random
from functools import cache

from lab.example import load
from lab.language import names
from lab.language.words import terms

Entity = dict[str, str]
World = dict[str, list[Entity]]

# Changing the seed changes every fact, and so what trained lab models know.
_SEED = "gazetteer-1"
REGIONS = load("gazetteer.regions", tuple[str, ...])
_PRODUCTS = load("gazetteer.products", list[str])
_FESTIVALS = terms("lantern, harvest, kite, bread, boat, music, snow, apple, puppet, river, candle, flower")
_GOODS = load("gazetteer.goods", list[str])
_WORKS = load("gazetteer.works", tuple[tuple[str, ...], ...])
_TITLES_FIRST = terms("Silent, Golden, Broken, Distant, Winter, Hidden, Last, Blue, Second, Burning, Quiet, Northern")
_TITLES_SECOND = terms("Garden, Harbour, Mirror, Road, Orchard, Window, Letter, Island, Season, Bell, Forest, Lamp")
_RIVER_STARTS = terms(
    "Al, Bre, Cor, Dru, Esk, Fen, Gal, Hul, Ist, Jor, Kar, Lim, Mol, Nev, Or, Pras, Rue, Sav, Tem, Ul"
)
_RIVER_ENDS = terms("a, en, is, or, une, ava")


def _distinct(rng: random.Random, firsts: list[str], seconds: list[str], joint: str, count: int) -> list[str]:
    """Invented names, none twice."""
    return rng.sample([f"{first}{joint}{second}" for first in firsts for second in seconds], count)


def _towns(rng: random.Random, rivers: list[str]) -> list[Entity]:
    towns = _distinct(rng, names.TOWN_STARTS, names.TOWN_ENDS, "", 120)
    return [
        {
            "name": town,
            "river": rng.choice(rivers),
            "region": rng.choice(REGIONS),
            "founded": str(rng.randint(1050, 1890)),
            "product": rng.choice(_PRODUCTS),
            "festival": rng.choice(_FESTIVALS),
            "month": rng.choice(names.MONTHS),
            "mayor": names.full_name(rng),
        }
        for town in towns
    ]


def _firms(rng: random.Random, towns: list[Entity]) -> list[Entity]:
    firms = _distinct(rng, names.FIRM_STARTS, names.FIRM_ENDS, " ", 80)
    return [
        {
            "name": firm,
            "town": rng.choice(towns)["name"],
            "goods": rng.choice(_GOODS),
            "founder": names.full_name(rng),
            "founded": str(rng.randint(1890, 2015)),
            "staff": str(rng.randint(2, 90) * 10),
        }
        for firm in firms
    ]


def _people(rng: random.Random, towns: list[Entity]) -> list[Entity]:
    people = _distinct(rng, [*names.WOMEN, *names.MEN], names.SURNAMES, " ", 80)
    titles = _distinct(rng, _TITLES_FIRST, _TITLES_SECOND, " ", 80)
    made = []
    for person, title in zip(people, titles, strict=True):
        job, work = rng.choice(_WORKS)
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


def _rivers(rng: random.Random, rivers: list[str]) -> list[Entity]:
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
