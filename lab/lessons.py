"""Explanations in the humanities and the sciences."""

from __future__ import annotations

import random

from lab import phrases
from lab.example import Example, load, table
from lab.phrases import Turn, conversation, key_of, two_of_a_field

# History, geography, arts and economics: topics told in clauses that follow fixed words.

_HUMANITIES_FACTS_HEADER = ("name", "field", "is", "cause", "effect", "example", "one", "two", "three")

TOPICS = [dict(zip(_HUMANITIES_FACTS_HEADER, row, strict=True)) for row in table("humanities_facts")]


# History, geography, arts and economics for a given purpose: explain, compare or list, then ask on.

FORMATS = load("humanities.formats", tuple[str, ...])

_OPENING = load("humanities.opening", str)
HUMANITIES_EXPLAIN = load("humanities.explain", Turn)
COMPARE = load("humanities.compare", Turn)
LIST = load("humanities.list", Turn)
HUMANITIES_FOLLOW_UPS = load("humanities.follow_ups", tuple[Turn, ...])
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


def generate_humanities(rng: random.Random) -> Example:
    """A topic told for an occasion; a comparison's key holds the second topic too."""
    slots = two_of_a_field(rng, TOPICS, _verbs)
    form, town = rng.choice(FORMATS), phrases.town(rng)
    kind, first = rng.choice((("explain", HUMANITIES_EXPLAIN), ("compare", COMPARE), ("list", LIST)))
    slots |= {"form": form, "town": town}
    key = key_of(kind, slots["name"], slots["other"] if kind == "compare" else "", form, town)
    # Who has just had a list is not asked for the same list again.
    follow_ups = HUMANITIES_FOLLOW_UPS[:-1] if kind == "list" else HUMANITIES_FOLLOW_UPS
    return conversation(rng, "humanities", "rouge_l", key, slots, (first, rng.choice(follow_ups)))


# Simple science: what a thing is, why it happens, an example, a use and a picture for it.

_STEM_FACTS_HEADER = ("name", "field", "is", "because", "example", "use", "like")

CONCEPTS = [dict(zip(_STEM_FACTS_HEADER, row, strict=True)) for row in table("stem_facts")]


# Simple science explained to a given person, then an example, a comparison or a use.

JOBS = load("stem.jobs", tuple[str, ...])

_TO_SOMEONE = load("stem.to_someone", str)
STEM_EXPLAIN = load("stem.explain", Turn)
WHY = load("stem.why", Turn)
STEM_FOLLOW_UPS = load("stem.follow_ups", tuple[Turn, ...])


def _verb(name: str) -> dict[str, str]:
    return {"be": "are" if name in ("the tides", "the seasons") else "is"}


def generate_stem(rng: random.Random) -> Example:
    """A concept told to someone; the key is the concept, the listener and the question."""
    slots = two_of_a_field(rng, CONCEPTS, _verb)
    who, job = phrases.full_name(rng), rng.choice(JOBS)
    kind, first = rng.choice((("explain", STEM_EXPLAIN), ("explain", STEM_EXPLAIN), ("why", WHY)))
    slots |= {"who": who, "job": job}
    key = key_of(kind, slots["name"], who, job)
    return conversation(rng, "stem", "rouge_l", key, slots, (first, rng.choice(STEM_FOLLOW_UPS)))
