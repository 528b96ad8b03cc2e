"""Simple science explained to a given person, then an example, a comparison or a use."""

from __future__ import annotations

import random

from lab.example import Example, load
from lab.language import names
from lab.language.fields import two_of_a_field
from lab.language.stem_facts import CONCEPTS
from lab.language.words import Turn, conversation, key_of

JOBS = load("stem.jobs", tuple[str, ...])

_TO_SOMEONE = load("stem.to_someone", str)
EXPLAIN = load("stem.explain", Turn)
WHY = load("stem.why", Turn)
FOLLOW_UPS = load("stem.follow_ups", tuple[Turn, ...])


def _verb(name: str) -> dict[str, str]:
    return {"be": "are" if name in ("the tides", "the seasons") else "is"}


def generate(rng: random.Random) -> Example:
    """A concept told to someone; the key is the concept, the listener and the question."""
    slots = two_of_a_field(rng, CONCEPTS, _verb)
    who, job = names.full_name(rng), rng.choice(JOBS)
    kind, first = rng.choice((("explain", EXPLAIN), ("explain", EXPLAIN), ("why", WHY)))
    slots |= {"who": who, "job": job}
    key = key_of(kind, slots["name"], who, job)
    return conversation(rng, "stem", "rouge_l", key, slots, (first, rng.choice(FOLLOW_UPS)))
