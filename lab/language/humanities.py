"""History, geography, arts and economics for a given purpose: explain, compare or list, then ask on."""

from __future__ import annotations

import random

from lab.example import Example
from lab.language import names
from lab.language.fields import two_of_a_field
from lab.language.humanities_facts import TOPICS
from lab.language.words import Turn, conversation, key_of

FORMATS = (
    "school talk",
    "podcast",
    "radio show",
    "museum guide",
    "newsletter",
    "poster",
    "quiz evening",
    "blog",
    "lecture",
)

_OPENING = (
    "[For the {form} in {town}, one could say:|Here is a text for the {form} in {town}:|People in {town} may "
    "hear this:]"
)
EXPLAIN = Turn(
    (
        "Explain {name} for a {form} in {town}.",
        "I prepare a {form} in {town}. What should I say about {name}?",
        "Write a few lines on {name} for the {form} in {town}.",
    ),
    (
        _OPENING + " {name} {was} {is}. [{it} {came} from|{it} {went} back to|{it} {was} due to] {cause}. "
        "[{it} {led} to|{it} {brought} about|The main effect {effect_was}] {effect}.",
    ),
)
COMPARE = Turn(
    (
        "Compare {name} with {other} for a {form} in {town}.",
        "For a {form} in {town}, I need a comparison of {name} and {other}.",
        "How does {name} differ from {other}? It is for a {form} in {town}.",
    ),
    (
        _OPENING
        + " {name} {was} {is}, [while|whereas] {other} {other_was} {other_is}. [An example of the first is|The "
        "first can be seen in] {example}; [an example of the second is|the second can be seen in] {other_example}.",
    ),
)
LIST = Turn(
    (
        "List three things to know about {name} for a {form} in {town}.",
        "Name three key words on {name}; it is for a {form} in {town}.",
        "Which three points on {name} belong in a {form} in {town}?",
    ),
    (
        "[Three points for the {form} in {town} are|For the {form} in {town}, I would choose|The {form} in {town} "
        "should mention] {one}, {two} and {three}. [All of them have to do with|Each of them is linked to|They help "
        "to explain] {name}, which {was} {is}.",
    ),
)
FOLLOW_UPS = (
    Turn(
        ("Can you give an example of {name}?", "What is a well-known example of {name}?"),
        (
            "[A well-known example of {name} is|One could name|Think of] {example}. [The main effect {effect_was} "
            "{effect}.|It fits the {form} well.|People in {town} may have heard of it.]",
        ),
    ),
    Turn(
        ("What is the cause of {name}?", "What is the origin of {name}?"),
        (
            "[The main cause {effect_was}|{it} {went} back to|Historians and teachers often name] {cause}. [This "
            "explains {effect}.|This lies behind {name}.|The {form} should mention this.]",
        ),
    ),
    Turn(
        ("What are the effects of {name}?", "What follows from {name}?"),
        (
            "[The main effect {effect_was}|{it} {led} to|An important result {effect_was}] {effect}. [The cause "
            "{effect_was} {cause}.|An example is {example}.|This matters in {town} as well.]",
        ),
    ),
    Turn(
        ("Name three key words on {name}.", "Sum up {name} in three words or phrases."),
        (
            "[Three good choices are|I would pick|The key words are] {one}, {two} and {three}. [They fit the {form} "
            "in {town}.|Together they describe {name}.|Each tells a part of the story.]",
        ),
    ),
)
# Topics that are over are told in the past tense.
_PAST = (
    "the Industrial Revolution",
    "the Renaissance",
    "the French Revolution",
    "the Silk Road",
    "the Roman Empire",
    "the Black Death",
    "the Cold War",
    "feudalism",
    "the age of exploration",
)


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
