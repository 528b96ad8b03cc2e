"""Template language, names and pairs of facts of the language tasks."""

from __future__ import annotations

import random
import re
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lab.example import Example, load

# The template language all language categories share.

Slots = Mapping[str, str]

# Five references let a right answer in another wording score well, and stay cheap to draw.
REFERENCES = 5

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_ARTICLE = re.compile(r"\b([Aa])\(n\) (\w+)")
_START = re.compile(r"(^|[.!?] |\n|: \"|^\")([a-zäöü])")
_SOUNDS_VOWEL = ("hour", "honest", "heir")
_SOUNDS_CONSONANT = ("uni", "use", "euro", "one")


@dataclass(frozen=True, slots=True)
class Turn:
    """The wordings of one exchange: any prompt may be answered by any answer."""

    prompts: Sequence[str]
    answers: Sequence[str]


def _article(match: re.Match[str]) -> str:
    letter, word = match.group(1), match.group(2)
    low = word.lower()
    vowel = low.startswith(_SOUNDS_VOWEL) or (low[0] in "aeiou" and not low.startswith(_SOUNDS_CONSONANT))
    return f"{letter}{'n' if vowel else ''} {word}"


def render(rng: random.Random, template: str, slots: Slots) -> str:
    """Return one wording of a template."""
    text = template.format_map(slots)
    while "[" in text:
        text, found = _CHOICE.subn(lambda m: rng.choice(m.group(1).split("|")), text)
        if not found:
            raise ValueError(f"unbalanced choice: {text}")
    if "a(n)" in text or "A(n)" in text:
        text = _ARTICLE.sub(_article, text)
    text = text.replace("  ", " ").replace(" ,", ",").replace(" .", ".").strip()
    return _START.sub(lambda m: m.group(1) + m.group(2).upper(), text)


def variants(rng: random.Random, templates: Sequence[str], slots: Slots, count: int = REFERENCES) -> tuple[str, ...]:
    """Return distinct wordings of an answer; the first is a uniform draw, so it is the one to train on."""
    return tuple(dict.fromkeys(render(rng, rng.choice(templates), slots) for _ in range(count)))


def conversation(
    rng: random.Random, category: str, metric: str, key: str, slots: Slots, turns: Sequence[Turn]
) -> Example:
    """Return an example of one or more turns that all draw on the same slots."""
    return Example(
        category=category,
        turns=tuple(render(rng, rng.choice(turn.prompts), slots) for turn in turns),
        answers=tuple(variants(rng, turn.answers, slots) for turn in turns),
        key=key,
        metric=metric,
    )


def key_of(*parts: str) -> str:
    """Return a key from the details that identify a prompt's content."""
    return "\x1f".join(parts)


# People, invented places and firms, days and numbers: details that prompts give and answers must copy.

# A kind is a list of values, or a template of other kinds.
Kinds = Mapping[str, str | list[str]]

_NAMES = load("names.kinds", dict[str, str | list[str]])
FIRST_NAMES = [*_NAMES["women"], *_NAMES["men"]]
KINDS: Kinds = {**_NAMES, "first_name": FIRST_NAMES}
_SLOT = re.compile(r"\{([^{}]+)\}")


def drawn(rng: random.Random, template: str, kinds: Kinds = KINDS) -> str:
    """Return the template with a value for each {kind}, {one|of|these} or number: {20-900}, or {20-900/10} in tens."""

    def value(match: re.Match[str]) -> str:
        name = str(match[1])
        if "|" in name:
            return rng.choice(name.split("|"))
        if name in kinds:
            kind = kinds[name]
            return drawn(rng, kind, kinds) if isinstance(kind, str) else rng.choice(kind)
        low, _, high = name.partition("-")
        high, _, step = high.partition("/")
        return str(rng.randrange(int(low), int(high) + 1, int(step or 1)))

    return _SLOT.sub(value, template)


def draw_slots(rng: random.Random, templates: Mapping[str, str], kinds: Kinds = KINDS) -> dict[str, str]:
    """Return a value for every slot; a template may name the slots before it, too."""
    slots: dict[str, str] = {}
    for name, template in templates.items():
        slots[name] = drawn(rng, template, ChainMap(slots, kinds))  # type: ignore[arg-type]
    return slots


def slot_values(slots: Slots, template: str) -> list[str]:
    """Return the values of the slots that the template names."""
    return [value for slot, value in slots.items() if f"{{{slot}}}" in template]


# A fact and another one of its field: the content of the explaining categories, stem and humanities.

Fact = Mapping[str, str]


def two_of_a_field(
    rng: random.Random, facts: Sequence[Fact], grammar: Callable[[str], dict[str, str]]
) -> dict[str, str]:
    """Return slots of a random fact, and those of another one behind `other_`; `other` is its name.

    facts: each with a `name` and a `field`, two or more in every field. grammar: the words that agree with a name.
    """
    fact = rng.choice(facts)
    # Comparing makes sense within one field only.
    other = rng.choice([each for each in facts if each["field"] == fact["field"] and each is not fact])
    slots, others = ({**each, **grammar(each["name"])} for each in (fact, other))
    return {**slots, "other": other["name"], **{f"other_{slot}": words for slot, words in others.items()}}
