"""Template language and word lists of the structured tasks."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TypeVar

from lab.example import load

# Rendering of templates: alternatives, slots and articles.

T = TypeVar("T")
Slots = Mapping[str, object]

_ARTICLE = re.compile(r"\b([aA])\(n\) (?=(.{0,3}))")


@cache
def _parts(template: str) -> tuple[tuple[str, ...], ...]:
    pieces = re.split(r"\[([^\]]*)\]", template)
    return tuple(tuple(piece.split("|")) if index % 2 else (piece,) for index, piece in enumerate(pieces))


def _article(match: re.Match[str]) -> str:
    after = match.group(2)
    # "a unit", "a European": a vowel that is read with a consonant in front
    vowel = (
        after[:1] in "aeiouAEIOU8" and after.lower() not in ("uni", "use", "eur", "one") or after[:2] in ("11", "18")
    )
    return match.group(1) + ("n " if vowel else " ")


def pick(rng: random.Random, options: Sequence[T]) -> T:
    """Return one of the options. Faster than rng.choice and as even for short lists."""
    return options[int(rng.random() * len(options))]


def render(rng: random.Random, template: str, slots: Slots) -> str:
    """Return one wording of the template, with a capital first letter."""
    text = "".join(part[0] if len(part) == 1 else pick(rng, part) for part in _parts(template))
    text = text.format_map(slots)
    if "(n)" in text:
        text = _ARTICLE.sub(_article, text)
    return text[:1].upper() + text[1:]


def wordings(make: Callable[[], str], limit: int = 6) -> tuple[str, ...]:
    """Return up to `limit` distinct wordings; the first is a uniform draw, so training has every wording."""
    found: dict[str, None] = {}
    for _ in range(limit + 2):
        found.setdefault(make())
        if len(found) == limit:
            break
    return tuple(found)


def render_all(rng: random.Random, templates: Sequence[str], slots: Slots, limit: int = 6) -> tuple[str, ...]:
    """Return wordings of several templates in turn from a random one, so that each template is included."""
    start = int(rng.random() * len(templates))
    turn = iter(range(start, start + limit + 2))
    return wordings(lambda: render(rng, templates[next(turn) % len(templates)], slots), limit)


def punctuated(text: str) -> str:
    """Return the text with a question mark exactly if its last sentence asks."""
    start = max(text.rfind(mark) for mark in (". ", "? ", ": ")) + 1
    asks = text[start:].lstrip().startswith(("What", "How", "And", "Who", "Which", "Is ", "When", "Where"))
    return text.rstrip("?. ") + ("?" if asks else ".")


def listing(items: Sequence[str], word: str = "and") -> str:
    """Join items as in `a`, `a and b`, `a, b and c`."""
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} {word} {items[-1]}"


def key_of(*parts: object) -> str:
    """Return a content key from its parts."""
    return "|".join(str(part) for part in parts)


# The vocabulary the structured categories share, and how a value of a kind is drawn.

WOMEN = load("words.women", tuple[str, ...])
MEN = load("words.men", tuple[str, ...])
PEOPLE = WOMEN + MEN
SURNAMES = load("words.surnames", tuple[str, ...])
_FEMALE = frozenset(WOMEN)

KINDS = load("words.kinds", dict[str, tuple[str, ...]])


def person_forms(name: str) -> tuple[str, str, str]:
    """Return the pronouns of a first name: subject, possessive, object."""
    return ("she", "her", "her") if name in _FEMALE else ("he", "his", "him")


def people(rng: random.Random, count: int) -> list[str]:
    """Return different first names."""
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
    """Return a value for every slot of the specification."""
    slots: dict[str, object] = {}
    for name, kind, low, high in _spec(spec):
        if not kind:
            slots[name] = low + int(rng.random() * (high - low + 1))
            continue
        value = pick(rng, kinds[kind])
        while value in slots.values():  # cities of one text are distinct
            value = pick(rng, kinds[kind])
        slots[name] = value
    return slots
