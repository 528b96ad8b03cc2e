"""Facts to be extracted from a short text as JSON or as a list, and a follow-up question on the text."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from lab.example import Example
from lab.structured.extraction_words import MORE, TEXTS
from lab.structured.wording import key_of, listing, pick, say, wordings
from lab.structured.words import (
    KINDS,
    PEOPLE,
    SURNAMES,
    draw_slots,
    more_kinds,
    person_forms,
)

_KINDS = {
    **KINDS,
    **more_kinds(MORE),
    "person": tuple(f"{first} {last}" for first in PEOPLE for last in SURNAMES),
    "code": tuple(
        f"{letters}{number}" for letters in ("AX", "BK", "LT", "QR", "NV", "SF") for number in range(101, 990, 7)
    ),
}
_ASKS = (
    "[Extract|Find|Read the text and extract] {fields}[ from the text|] as {shape}:\n{text}",
    "{text}\n[List|Extract|Give me] {fields} as {shape}.",
)
_INTRO = "[Here are the facts|These are the facts|The text says]:"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of text: its slots, the fields to extract (label and slot), its wordings, its follow-ups."""

    name: str
    spec: str
    fields: tuple[tuple[str, str], ...]
    texts: tuple[str, ...]
    follow_ups: tuple[tuple[str, str], ...]


def _kind(block: str) -> Kind:
    head, *lines = block.strip().split("\n")
    name, spec, fields = head.split(" | ")
    pairs = tuple((label, slot) for label, _, slot in (field.partition("=") for field in fields.split()))
    texts = tuple(line[3:] for line in lines if line.startswith("T: "))
    questions = (line[3:].partition(" => ") for line in lines if line.startswith("Q: "))
    return Kind(name, spec, pairs, texts, tuple((ask, answer) for ask, _, answer in questions))


_TEXTS = tuple(_kind(block) for block in TEXTS.strip().removeprefix("# ").split("\n# "))


def _slots(rng: random.Random, facts: dict[str, object]) -> dict[str, object]:
    """The drawn facts and what follows from them."""
    slots = dict(facts)
    if "who" in slots:
        he, his, him = person_forms(str(slots["who"]).split()[0])
        slots.update(he=he, his=his, him=him, He=he.title())
    if "date" in slots:
        slots["when"] = f"{slots['date']} {slots['month']}"
        slots["n2"] = rng.randint(2, 5)
        slots["price2"] = int(str(slots["n2"])) * int(str(slots["price"]))
    if "min" in slots:
        slots["yes"] = "Yes" if int(str(slots["min"])) > 120 else "No"
    for name in ("km", "price"):
        slots[f"{name}000"] = f"{slots.get(name, '')}000"
    return slots


def _json(fields: list[tuple[str, object]]) -> str:
    return json.dumps(dict(fields), indent=1)


def _lines(rng: random.Random, fields: list[tuple[str, object]]) -> str:
    return "\n".join([say(rng, _INTRO, {}), *(f"- {label}: {value}" for label, value in fields)])


def _value(value: object) -> object:
    """Numbers stay numbers in JSON, also those written with zeros."""
    return int(value) if isinstance(value, str) and value.isdigit() else value


def generate(rng: random.Random) -> Example:
    """A text with facts to extract, then a question on it."""
    kind = pick(rng, _TEXTS)
    facts = draw_slots(rng, kind.spec, _KINDS)
    slots = _slots(rng, facts)
    chosen = rng.sample(kind.fields, pick(rng, (3, 4, 5)))
    fields = [(label, _value(slots[slot])) for label, slot in chosen]
    as_json = rng.random() < 0.5
    text = say(rng, pick(rng, kind.texts), slots)
    shape = "JSON" if as_json else pick(rng, ("a list", "a short list", "a bullet list"))
    names = listing([f"the {label}" for label, _ in fields])
    ask = say(rng, pick(rng, _ASKS), {"text": text, "fields": names, "shape": shape})
    first = (_json(fields),) if as_json else wordings(lambda: _lines(rng, fields), 3)
    follow, answer = pick(rng, kind.follow_ups)
    second = wordings(lambda: say(rng, answer, slots), 4)
    return Example(
        "extraction", (ask, say(rng, follow, slots)), (first, second), key_of(kind.name, *facts.values()), "rouge_l"
    )
