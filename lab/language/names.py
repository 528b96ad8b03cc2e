"""People, invented places and firms, days and numbers: details that prompts give and answers must copy."""

from __future__ import annotations

import random

from lab.example import load
from lab.language.words import terms

WOMEN = load("names.women", list[str])
MEN = load("names.men", list[str])
_FIRST_NAMES = WOMEN + MEN
SURNAMES = terms(load("names.surnames", str))
TOWN_STARTS = load("names.town_starts", list[str])
TOWN_ENDS = load("names.town_ends", list[str])
FIRM_STARTS = load("names.firm_starts", list[str])
FIRM_ENDS = load("names.firm_ends", list[str])
WEEKDAYS = terms("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday")
MONTHS = terms("January, February, March, April, May, June, July, August, September, October, November, December")


def town(rng: random.Random) -> str:
    """An invented town."""
    return rng.choice(TOWN_STARTS) + rng.choice(TOWN_ENDS)


def firm(rng: random.Random) -> str:
    """An invented company."""
    return f"{rng.choice(FIRM_STARTS)} {rng.choice(FIRM_ENDS)}"


def first_name(rng: random.Random) -> str:
    """A first name of either sex."""
    return rng.choice(_FIRST_NAMES)


def two_first_names(rng: random.Random) -> tuple[str, str]:
    """Different first names, for two people in one text."""
    one, other = rng.sample(_FIRST_NAMES, 2)
    return one, other


def full_name(rng: random.Random) -> str:
    """First name and surname."""
    return f"{first_name(rng)} {rng.choice(SURNAMES)}"


def clock(rng: random.Random) -> str:
    """A time of day when people meet, on the half hour."""
    hour = rng.randint(9, 20)
    return f"{(hour - 1) % 12 + 1}{rng.choice((':00', ':30'))} {'am' if hour < 12 else 'pm'}"
