"""Template language, names and pairs of facts of the language tasks."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lab.example import Example, load

# The template language all language categories share.

Slots = Mapping[str, str]

# Five references let a right answer in another wording score well, and stay cheap to draw.
REFERENCES = 5

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_ARTICLE = re.compile(r"\b([Aa])\(n\) (\w+)")
_START = re.compile(r"(^|[.!?] |\n|: \"|^\")([a-zäöü])")
_SOUNDS_VOWEL = ("hour", "honest", "heir")
_SOUNDS_CONSONANT = ("uni", "use", "euro", "one")


@dataclass(frozen=True, slots=True)
class Turn:
    """The wordings of one exchange: any prompt may be answered by any answer."""

    prompts: Sequence[str]
    answers: Sequence[str]


def _article(match: re.Match[str]) -> str:
    letter, word = match.group(1), match.group(2)
    low = word.lower()
    vowel = low.startswith(_SOUNDS_VOWEL) or (low[0] in "aeiou" and not low.startswith(_SOUNDS_CONSONANT))
    return f"{letter}{'n' if vowel else ''} {word}"


def say(rng: random.Random, template: str, slots: Slots) -> str:
    """One wording of a template."""
    text = template.format_map(slots)
    while "[" in text:
        text, found = _CHOICE.subn(lambda m: rng.choice(m.group(1).split("|")), text)
        if not found:
            raise ValueError(f"unbalanced choice: {text}")
    if "a(n)" in text or "A(n)" in text:
        text = _ARTICLE.sub(_article, text)
    text = text.replace("  ", " ").replace(" ,", ",").replace(" .", ".").strip()
    return _START.sub(lambda m: m.group(1) + m.group(2).upper(), text)


def variants(rng: random.Random, templates: Sequence[str], slots: Slots, count: int = REFERENCES) -> tuple[str, ...]:
    """Distinct wordings of an answer; the first is a uniform draw, so it is the one to train on."""
    return tuple(dict.fromkeys(say(rng, rng.choice(templates), slots) for _ in range(count)))


def conversation(
    rng: random.Random, category: str, metric: str, key: str, slots: Slots, turns: Sequence[Turn]
) -> Example:
    """An example of one or more turns that all draw on the same slots."""
    return Example(
        category=category,
        turns=tuple(say(rng, rng.choice(turn.prompts), slots) for turn in turns),
        answers=tuple(variants(rng, turn.answers, slots) for turn in turns),
        key=key,
        metric=metric,
    )


def key_of(*parts: str) -> str:
    """A key from the details that tell one prompt's content from another's."""
    return "\x1f".join(parts)


def terms(text: str) -> list[str]:
    """A list written as one text, parted by commas."""
    return [term.strip() for term in text.split(",")]


# People, invented places and firms, days and numbers: details that prompts give and answers must copy.

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


# A fact and another of its field beside it: what the explaining categories, stem and humanities, are told from.

Fact = Mapping[str, str]


def two_of_a_field(
    rng: random.Random, facts: Sequence[Fact], grammar: Callable[[str], dict[str, str]]
) -> dict[str, str]:
    """Slots of a random fact, and those of another one behind `other_`; `other` is its name.

    facts: each with a `name` and a `field`, two or more in every field. grammar: the words that agree with a name.
    """
    fact = rng.choice(facts)
    # Comparing makes sense within one field only.
    other = rng.choice([each for each in facts if each["field"] == fact["field"] and each is not fact])
    slots, others = ({**each, **grammar(each["name"])} for each in (fact, other))
    return {**slots, "other": other["name"], **{f"other_{slot}": words for slot, words in others.items()}}
