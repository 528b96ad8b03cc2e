"""Simple science explained to a given person, then an example, a comparison or a use."""

from __future__ import annotations

import random

from lab.example import Example
from lab.language import names
from lab.language.fields import two_of_a_field
from lab.language.stem_facts import CONCEPTS
from lab.language.words import Turn, conversation, key_of

JOBS = (
    "baker",
    "farmer",
    "tailor",
    "dancer",
    "lawyer",
    "plumber",
    "painter",
    "driver",
    "florist",
    "cook",
    "clerk",
    "singer",
)

_TO_SOMEONE = (
    "[For a(n) {job} like {who}, I would put it like this: {name}|Tell {who} this: {name}|Here is a short "
    "version for {who}, the {job}: {name}|In simple words for {who}: {name}]"
)
EXPLAIN = Turn(
    (
        "Explain {name} to {who}, a(n) {job}.",
        "{who} is a(n) {job} and asks what {name} is. What should I say?",
        "How would you explain {name} to a(n) {job} called {who}?",
        "My friend {who}, a(n) {job}, wants to understand {name}. Please explain.",
    ),
    (
        _TO_SOMEONE
        + " {be} {is}. [This is so because {because}.|The reason is that {because}.|The point is that {because}.] "
        "[An example is|You can see it in|Think of] {example}.",
        _TO_SOMEONE
        + " {be} {is}. It is [a little|a bit|somewhat] like {like}. [The reason is that|The main point is that] "
        "{because}.",
    ),
)
WHY = Turn(
    (
        "{who}, a(n) {job}, asks what lies behind {name}. Answer briefly.",
        "What is the main fact behind {name}? Answer for {who}, who is a(n) {job}.",
        "In {field}, what is the key to {name}? My listener is {who}, a(n) {job}.",
    ),
    (
        "[The short answer for {who} is that|A(n) {job} like {who} may like to hear that|{who} should know that] "
        "{because}. [In {field}, this is the key to|This is the main fact behind] {name}, which {be} {is}. [An "
        "example is|Think of] {example}.",
    ),
)
FOLLOW_UPS = (
    Turn(
        ("Give an example.", "Can you give {who} an example?", "What is an example of that?"),
        (
            "[A good example is|One example is|{who} could think of] {example}. [There, {because}.|It shows that "
            "{because}.|You can see how {because}.]",
        ),
    ),
    Turn(
        ("Make a comparison with everyday life.", "What can {who} compare it to?", "Is there a picture for it?"),
        (
            "[It is a little like|You can compare it to|{who} can imagine] {like}. [In the same way, {because}.|The "
            "likeness is that {because}.|Keep in mind that {name} {be} {is}.]",
        ),
    ),
    Turn(
        ("What is it good for?", "Why does it matter?", "What use is it?"),
        (
            "[It helps us to|Knowing about it helps us to|Thanks to it, people can] {use}. [Even a(n) {job} profits "
            "from this.|For {who}, this may be the most useful part.|That is why {field} cares about it.]",
        ),
    ),
    Turn(
        ("How does it differ from {other}?", "Compare it with {other}.", "And what is the difference from {other}?"),
        (
            "[{name} {be} {is}, while {other} {other_be} {other_is}.|While {name} {be} {is}, {other} {other_be} "
            "{other_is}.|{other} {other_be} {other_is}, but {name} {be} {is}.]",
        ),
    ),
)


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
