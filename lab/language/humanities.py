"""History, geography, arts and economics for a given purpose: explain, compare or list, then ask on."""

from __future__ import annotations

import random

from lab.example import Example, load
from lab.language import names
from lab.language.fields import two_of_a_field
from lab.language.humanities_facts import TOPICS
from lab.language.words import Turn, conversation, key_of

FORMATS = load("humanities.formats", tuple[str, ...])

_OPENING = load("humanities.opening", str)
EXPLAIN = load("humanities.explain", Turn)
COMPARE = load("humanities.compare", Turn)
LIST = load("humanities.list", Turn)
FOLLOW_UPS = load("humanities.follow_ups", tuple[Turn, ...])
# Topics that are over are told in the past tense.
_PAST = load("humanities.past", tuple[str, ...])


_PLURAL = ("supply and demand",)


def _verbs(name: str) -> dict[str, str]:
    """The verbs and pronoun that go with a topic: past for what is over, plural for pairs."""
    if name in _PAST:
        forms = ("was", "it", "came", "went", "led", "brought", "was")
    elif name in _PLURAL:
        forms = ("are", "they", "come", "go", "lead", "bring", "is")
    else:
        forms = ("is", "it", "comes", "goes", "leads", "brings", "is")
    return dict(zip(("was", "it", "came", "went", "led", "brought", "effect_was"), forms, strict=True))


def generate(rng: random.Random) -> Example:
    """A topic told for an occasion; a comparison's key holds the second topic too."""
    slots = two_of_a_field(rng, TOPICS, _verbs)
    form, town = rng.choice(FORMATS), names.town(rng)
    kind, first = rng.choice((("explain", EXPLAIN), ("compare", COMPARE), ("list", LIST)))
    slots |= {"form": form, "town": town}
    key = key_of(kind, slots["name"], slots["other"] if kind == "compare" else "", form, town)
    # Who has just had a list is not asked for the same list again.
    follow_ups = FOLLOW_UPS[:-1] if kind == "list" else FOLLOW_UPS
    return conversation(rng, "humanities", "rouge_l", key, slots, (first, rng.choice(follow_ups)))
