# ruff: noqa: E501 - a template or a word list is one line
"""The domains that meaning representations describe: their attributes, values and how each is said.

Every phrase of a fact follows the subject "it".
"""

from __future__ import annotations

from dataclasses import dataclass

from lab.example import load
from lab.structured.wording import several
from lab.structured.words import KINDS


@dataclass(frozen=True, slots=True)
class Domain:
    """One kind of thing.

    head: a noun phrase made of the first attributes. place: where it is, or empty. facts: for every
    further attribute, how a sentence that begins with "it" says it.
    """

    names: tuple[tuple[str, ...], tuple[str, ...]]
    values: dict[str, tuple[str, ...]]
    head: str
    place: str
    facts: dict[str, str]


_ADJECTIVES = load("description_words.adjectives", tuple[str, ...])
_NOUNS = load("description_words.nouns", tuple[str, ...])
_AREAS = several(
    "riverside area;city centre;old town;harbour;university quarter;market square;station district;north end"
)
_NEAR = tuple(
    f"the {name}" for name in several("town hall;central park;opera house;bus station;cathedral;library;stadium;zoo")
)
_CITIES = KINDS["city"]

RESTAURANT = load("description_words.restaurant", Domain)
HOTEL = load("description_words.hotel", Domain)
MUSEUM = load("description_words.museum", Domain)
PRODUCT = load("description_words.product", Domain)  # fmt: skip
FILM = load("description_words.film", Domain)  # fmt: skip
DOMAINS = {"restaurant": RESTAURANT, "hotel": HOTEL, "museum": MUSEUM, "product": PRODUCT, "film": FILM}
