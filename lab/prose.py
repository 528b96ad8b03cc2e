"""Generators of prose tasks: lessons, reports, writing, roleplay."""

from __future__ import annotations

import random
from dataclasses import dataclass

from lab.example import Example, load, records
from lab.phrases import (
    FIRST_NAMES,
    Turn,
    conversation,
    draw_slots,
    drawn,
    key_of,
    render,
    slot_values,
    two_of_a_field,
    variants,
)

# History, geography, arts and economics for a given purpose: explain, compare or list, then ask on.

TOPICS = records("facts.humanities")
_FORMATS = load("humanities.formats", tuple[str, ...])
_TOPIC_FIRST = load("humanities.first", dict[str, Turn])
_TOPIC_FOLLOW_UPS = load("humanities.follow_ups", tuple[Turn, ...])
# Past topics are described in the past tense.
_PAST, _PAIRS = load("humanities.past", tuple[str, ...]), load("humanities.plural", tuple[str, ...])
_VERBS = load("humanities.verbs", dict[str, dict[str, str]])


def _verbs(name: str) -> dict[str, str]:
    """Return the verbs and pronoun that go with a topic."""
    return _VERBS["past" if name in _PAST else "plural" if name in _PAIRS else "present"]


def generate_humanities(rng: random.Random) -> Example:
    """Return a topic explained for an occasion; a comparison's key includes the second topic."""
    slots = two_of_a_field(rng, TOPICS, _verbs)
    slots |= {"form": rng.choice(_FORMATS), "town": drawn(rng, "{town}")}
    kind = rng.choice(("explain", "compare", "list"))
    key = key_of(kind, slots["name"], slots["other"] if kind == "compare" else "", slots["form"], slots["town"])
    # A list is not requested twice in a row.
    follow_up = rng.choice(_TOPIC_FOLLOW_UPS[:-1] if kind == "list" else _TOPIC_FOLLOW_UPS)
    return conversation(rng, "humanities", "rouge_l", key, slots, (_TOPIC_FIRST[kind], follow_up))


# Simple science explained to a given person, then an example, a comparison or a use.

CONCEPTS = records("facts.stem")
_JOBS = load("stem.jobs", tuple[str, ...])
_CONCEPT_FIRST = load("stem.first", dict[str, Turn])
_CONCEPT_FOLLOW_UPS = load("stem.follow_ups", tuple[Turn, ...])
_SEVERAL = load("stem.plural", tuple[str, ...])


def generate_stem(rng: random.Random) -> Example:
    """Return a concept explained to someone; the key is the concept, the listener and the question."""
    slots = two_of_a_field(rng, CONCEPTS, lambda name: {"be": "are" if name in _SEVERAL else "is"})
    slots |= {"who": drawn(rng, "{full_name}"), "job": rng.choice(_JOBS)}
    kind = rng.choice(("explain", "explain", "why"))
    key = key_of(kind, slots["name"], slots["who"], slots["job"])
    follow_up = rng.choice(_CONCEPT_FOLLOW_UPS)
    return conversation(rng, "stem", "rouge_l", key, slots, (_CONCEPT_FIRST[kind], follow_up))


# Short reports to summarize: an event's details in four to six sentences.


@dataclass(frozen=True, slots=True)
class Event:
    """A kind of event: the lead, the sentences that follow, summaries, what a second sentence of a
    summary may add, and the event's own lists of details."""

    name: str
    lead: str
    body: tuple[str, ...]
    summaries: tuple[str, ...]
    more: tuple[str, ...]
    lists: dict[str, tuple[str, ...]]


_EVENTS = load("summarization.events", tuple[Event, ...])
_DETAILS = load("summarization.slots", dict[str, str])
# Remarks that may stand anywhere in a report and never belong in its summary.
_FILLERS = load("summarization.fillers", tuple[str, ...])
_PROMPTS = load("summarization.prompts", tuple[str, ...])


def generate_summarization(rng: random.Random) -> Example:
    """Return a report to summarize; the key is the event with all its details, without minor remarks."""
    event = rng.choice(_EVENTS)
    slots = draw_slots(rng, _DETAILS)
    slots |= {slot: rng.choice(values) for slot, values in event.lists.items()}
    body = list(event.body)
    body.insert(rng.randint(1, len(body)), rng.choice(_FILLERS))
    article = render(rng, " ".join((event.lead, *body)), slots)
    # Only details that the article always contains identify a prompt.
    key = key_of(event.name, *slot_values(slots, event.lead + " ".join(event.body)))
    prompt = rng.choice(_PROMPTS).format(article=article)
    summaries = [f"{summary} {more}" for summary in event.summaries for more in event.more]
    return Example("summarization", (prompt,), (variants(rng, summaries, slots),), key, "rouge_l")


# Short pieces of writing that must use given details, then a request to change the piece.


@dataclass(frozen=True, slots=True)
class Piece:
    """A kind of piece: its requests, texts and follow-up questions."""

    name: str
    first: Turn
    follow_ups: tuple[Turn, ...]


_PIECES = load("writing.pieces", tuple[Piece, ...])
_LISTS = load("writing.details", dict[str, tuple[str, ...]])


def _clock(rng: random.Random) -> str:
    """Return a time of day when people meet, on the half hour."""
    hour = rng.randint(9, 20)
    return f"{(hour - 1) % 12 + 1}{rng.choice((':00', ':30'))} {'am' if hour < 12 else 'pm'}"


def generate_writing(rng: random.Random) -> Example:
    """Return one piece and one follow-up; the key is the piece with the details its first prompt gives."""
    piece = rng.choice(_PIECES)
    to, me = rng.sample(FIRST_NAMES, 2)
    slots = {"to": to, "me": me, **draw_slots(rng, {"town": "{town}", "day": "{weekday}"}), "time": _clock(rng)}
    slots |= {"n": drawn(rng, "{5-95}"), **{slot: rng.choice(values) for slot, values in _LISTS.items()}}
    key = key_of(piece.name, *slot_values(slots, piece.first.prompts[0]))
    return conversation(rng, "writing", "rouge_l", key, slots, (piece.first, rng.choice(piece.follow_ups)))


# A visitor brings a trouble to someone whom the answer plays in the first person.


@dataclass(frozen=True, slots=True)
class Role:
    """Someone to speak as. problems: problem -> advice."""

    name: str
    place: str
    tool: str
    joy: str
    worry: str
    problems: dict[str, str]


_ROLES = load("roleplay.roles", tuple[Role, ...])
_VISIT = load("roleplay.first", Turn)
_VISIT_FOLLOW_UPS = load("roleplay.follow_ups", tuple[Turn, ...])
# How a listener turns the words of a speaker round.
_TURNED = {"I": "you", "am": "are", "my": "your", "me": "you"}


def generate_roleplay(rng: random.Random) -> Example:
    """Return a roleplay; the key is the role, its name and town, a visitor and a problem."""
    role = rng.choice(_ROLES)
    problem, advice = rng.choice(list(role.problems.items()))
    me, visitor = rng.sample(FIRST_NAMES, 2)
    slots = {
        "role": role.name,
        **{"place": role.place, "tool": role.tool, "joy": role.joy, "worry": role.worry},
        **{"problem": problem, "yours": " ".join(_TURNED.get(word, word) for word in problem.split())},
        **{"advice": advice, "me": me, "visitor": visitor},
        **draw_slots(rng, {"town": "{town}", "years": "{3-40}"}),
    }
    key = key_of(role.name, me, slots["town"], visitor, problem)
    return conversation(rng, "roleplay", "rouge_l", key, slots, (_VISIT, rng.choice(_VISIT_FOLLOW_UPS)))
