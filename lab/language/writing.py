"""Short pieces of writing that must use given details, then a request to change the piece."""

from __future__ import annotations

import random

from lab.example import Example
from lab.language import names
from lab.language.words import conversation, key_of
from lab.language.writing_pieces import DETAILS, PIECES


def generate(rng: random.Random) -> Example:
    """One piece and one follow-up; the key is the piece with the details its first prompt gives."""
    piece = rng.choice(PIECES)
    to, me = names.two_first_names(rng)
    slots = {
        "to": to,
        "me": me,
        "town": names.town(rng),
        "day": rng.choice(names.WEEKDAYS),
        "time": names.clock(rng),
        "n": str(rng.randint(5, 95)),
        **{slot: rng.choice(values) for slot, values in DETAILS.items()},
    }
    asked = piece.first.prompts[0]
    key = key_of(piece.name, *(value for slot, value in slots.items() if f"{{{slot}}}" in asked))
    return conversation(rng, "writing", "rouge_l", key, slots, (piece.first, rng.choice(piece.follow_ups)))
