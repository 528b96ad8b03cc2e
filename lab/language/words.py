"""The template language all language categories share.

A template has slots `{name}` and choices `[one|another]`, which may nest. Slots are filled first, so
a slot's value may itself hold choices. `a(n)` becomes the right article; sentences get their capital.
Knows nothing of any category or fact.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lab.example import Example

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


def say(rng: random.Random, template: str, slots: Slots) -> str:
    """One wording of a template."""
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
    """Distinct wordings of an answer; the first is a uniform draw, so it is the one to train on."""
    return tuple(dict.fromkeys(say(rng, rng.choice(templates), slots) for _ in range(count)))


def conversation(
    rng: random.Random, category: str, metric: str, key: str, slots: Slots, turns: Sequence[Turn]
) -> Example:
    """An example of one or more turns that all draw on the same slots."""
    return Example(
        category=category,
        turns=tuple(say(rng, rng.choice(turn.prompts), slots) for turn in turns),
        answers=tuple(variants(rng, turn.answers, slots) for turn in turns),
        key=key,
        metric=metric,
    )


def key_of(*parts: str) -> str:
    """A key from the details that tell one prompt's content from another's."""
    return "\x1f".join(parts)


def terms(text: str) -> list[str]:
    """A list written as one text, parted by commas."""
    return [term.strip() for term in text.split(",")]
