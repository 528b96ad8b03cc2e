"""Small Python functions from a description, and a follow-up that changes, documents or explains them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from lab.example import Example, load
from lab.structured.coding_families import FAMILIES
from lab.structured.wording import key_of, pick, punctuated, say, wordings

_NUMBERS = load("coding.numbers", tuple[str, ...])
_STRINGS = load("coding.strings", tuple[str, ...])
_LOOPS = ("item", "value", "x", "element")
_ASKS = load("coding.asks", tuple[str, ...])
_INTROS = load("coding.intros", tuple[str, ...])


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of function."""

    kind: str
    names: tuple[str, ...]
    does: str
    code: str
    change: str
    changed: str


def _family(block: str) -> Family:
    head, _, body = block.strip("\n").partition("\n")
    kind, names, does = head.split(" | ")
    code, _, rest = body.partition("\n> ")
    change, _, changed = rest.partition("\n")
    return Family(kind, tuple(names.split(",")), does, code, change, changed)


_FAMILIES = tuple(_family(block) for block in FAMILIES.strip().removeprefix("# ").split("\n# "))
Slots = dict[str, object]
# A follow-up: what is asked, and a way to write one more wording of the answer.
FollowUp = tuple[str, Callable[[], str]]


def _block(name: object, slots: Slots, body: str, doc: str = "") -> str:
    lines = [f"def {name}({slots['p']}):"]
    if doc:
        lines.append(f'    """{doc}"""')
    return "```python\n" + "\n".join(lines) + "\n" + body.format_map(slots) + "\n```"


def _changed(rng: random.Random, family: Family, slots: Slots) -> FollowUp:
    change = family.change.format_map(slots)
    ask = say(rng, "[Now change|Change|Please change] [it|the function] to {c}.", {"c": change})
    intro = "[Here is the changed function|The changed version is|Now the function looks like this]:"
    return ask, lambda: f"{say(rng, intro, slots)}\n{_block(slots['f'], slots, family.changed)}"


def _renamed(rng: random.Random, family: Family, slots: Slots) -> FollowUp:
    name = f"{pick(rng, ('get', 'compute', 'make', 'find', 'run', 'my'))}_{slots['f']}"
    ask = say(rng, "[Rename|Now rename|Please rename] the function to `{name}`.", {"name": name})
    intro = "[Here is the function with its new name|It is now called `{name}`|The renamed function is]:"
    return ask, lambda: f"{say(rng, intro, {'name': name})}\n{_block(name, slots, family.code)}"


def _documented(rng: random.Random, family: Family, slots: Slots) -> FollowUp:
    ask = say(rng, "[Add a docstring|Now add a docstring|Please add a docstring] to [it|the function].", slots)
    intro = "[Here is the function with a docstring|Now it has a docstring|With a docstring it looks like this]:"
    doc = say(rng, "{d}.", slots)
    return ask, lambda: f"{say(rng, intro, slots)}\n{_block(slots['f'], slots, family.code, doc)}"


def _explained(rng: random.Random, family: Family, slots: Slots) -> FollowUp:
    ask = say(
        rng,
        "[What is the parameter, and what does the function do?|Explain what it does.|Explain the function.]",
        slots,
    )
    text = (
        "[The function `{f}`|`{f}`] [takes|gets] [a list|one list], `{p}`, and {d}. "
        "[It does not change the list itself|The list itself is not changed|The list stays as it is]."
    )
    return ask, lambda: say(rng, text, slots)


_FOLLOW_UPS = (_changed, _changed, _renamed, _documented, _explained)


def _slots(rng: random.Random, family: Family) -> Slots:
    word = pick(rng, _NUMBERS if family.kind == "numbers" else _STRINGS)
    parameter = word if rng.random() < 0.6 else pick(rng, ("data", "entries", "records", "series", "given"))
    name = pick(rng, family.names)
    slots: Slots = {"w": word, "p": parameter, "n": rng.randint(2, 20), "l": pick(rng, "abcdeghilmnoprst")}
    slots["s"] = pick(rng, (", ", " ", "-", "; ", "/", " and "))
    slots["i"] = pick(rng, _LOOPS)
    slots["f"] = f"{name}_{word}" if rng.random() < 0.6 else f"{word}_{name}"
    slots["d"] = family.does.format_map(slots)
    return slots


def generate(rng: random.Random) -> Example:
    """A function from its description, then a follow-up on it."""
    family = pick(rng, _FAMILIES)
    slots = _slots(rng, family)
    ask = punctuated(say(rng, pick(rng, _ASKS), slots))
    first = wordings(lambda: f"{say(rng, pick(rng, _INTROS), slots)}\n{_block(slots['f'], slots, family.code)}", 4)
    follow, make = pick(rng, _FOLLOW_UPS)(rng, family, slots)
    key = key_of(slots["f"], slots["p"], slots["d"])
    return Example("coding", (ask, follow), (first, wordings(make, 4)), key, "rouge_l")
