"""Attributes of a thing (a restaurant, a hotel, a film, ...) to be put into a fluent description."""

from __future__ import annotations

import random

from lab.example import Example, load
from lab.structured.description_words import DOMAINS, Domain
from lab.structured.wording import key_of, pick, say, wordings

_FRAMES = load("meaning_representation.frames", tuple[str, ...])
_OPENINGS = load("meaning_representation.openings", tuple[str, ...])


def _head_names(domain: Domain) -> list[str]:
    """The attributes that the first sentence says."""
    said = domain.head + domain.place
    return [name for name in domain.values if f"{{{name}}}" in said]


def _template(rng: random.Random, domain: Domain, values: dict[str, str], shown: list[str]) -> str:
    """One wording, with its slots still open: an opening, then one or two sentences of facts."""
    opening = pick(rng, _OPENINGS).replace("{head}", domain.head).replace("{place}", domain.place)
    phrases = [domain.facts.get(name) or domain.facts[f"{name}={values[name]}"] for name in shown]
    if len(phrases) == 1:
        return f"{opening}. It {phrases[0]}."
    if len(phrases) == 2:
        return f"{opening}. It {phrases[0]} and [|it ]{phrases[1]}."
    if len(phrases) == 3:
        return f"{opening}. It {phrases[0]}, {phrases[1]} and {phrases[2]}."
    return (
        f"{opening}. It {phrases[0]} and {phrases[1]}. [It|In addition, it|Besides, it] {phrases[2]} and {phrases[3]}."
    )


def generate(rng: random.Random) -> Example:
    """A list of attributes; the answer describes the thing in two or three sentences."""
    kind = pick(rng, tuple(DOMAINS))
    domain = DOMAINS[kind]
    values = {name: pick(rng, options) for name, options in domain.values.items()}
    head = _head_names(domain)
    facts = [name for name in domain.values if name not in head]
    shown = sorted(rng.sample(facts, min(len(facts), pick(rng, (2, 3, 3, 4)))), key=facts.index)
    values = {name: values[name] for name in (*head, *shown)}
    name = " ".join(pick(rng, part) for part in domain.names)
    data = ", ".join([f"name[{name}]", *(f"{attribute}[{value}]" for attribute, value in values.items())])
    slots = {"name": name, "data": data, "kind": kind, **values}
    prompt = say(rng, pick(rng, _FRAMES), slots)
    answers = wordings(lambda: say(rng, _template(rng, domain, values, shown), slots))
    return Example("meaning_representation", (prompt,), (answers,), key_of(kind, data), "rouge_l")
