"""Short reports to sum up: an event's details told over four to six sentences."""

from __future__ import annotations

import random

from lab.example import Example, load
from lab.language import names
from lab.language.report_events import EVENTS, FILLERS
from lab.language.words import key_of, say, variants

_PROMPTS = load("summarization.prompts", tuple[str, ...])


def generate(rng: random.Random) -> Example:
    """The key is the event with all its details; a remark that matters little is not to be summed up."""
    event = rng.choice(EVENTS)
    slots = {
        "town": names.town(rng),
        "day": rng.choice(names.WEEKDAYS),
        "who": names.full_name(rng),
        "other": names.full_name(rng),
        "n": str(rng.randrange(20, 900, 10)),
        "m": str(rng.randint(2, 19)),
        "k": str(rng.randint(3, 40)),
        "month": rng.choice(names.MONTHS),
        "year": str(rng.randint(1880, 2015)),
    }
    slots.update({slot: rng.choice(values) for slot, values in event.lists.items()})
    body = list(event.body)
    body.insert(rng.randint(1, len(body)), rng.choice(FILLERS))
    article = say(rng, " ".join((event.lead, *body)), slots)
    told = event.lead + " ".join(event.body)
    # Only details the article always tells tell prompts apart.
    key = key_of(event.name, *(value for slot, value in slots.items() if f"{{{slot}}}" in told))
    prompt = rng.choice(_PROMPTS).format(article=article)
    summaries = [f"{summary} {more}" for summary in event.summaries for more in event.more]
    return Example("summarization", (prompt,), (variants(rng, summaries, slots),), key, "rouge_l")
