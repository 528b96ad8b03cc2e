"""Coding, extraction and reasoning puzzles."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import partial

from lab.example import Example, load
from lab.wording import (
    KINDS,
    MEN,
    PEOPLE,
    SURNAMES,
    WOMEN,
    Slots,
    draw_slots,
    key_of,
    listing,
    people,
    person_forms,
    pick,
    punctuated,
    render,
    wordings,
)

# Small Python functions from a description, and a follow-up that changes, renames, documents or explains them.


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of function. kind: what is in its list. change: what a follow-up asks for; changed: the code then."""

    kind: str
    names: tuple[str, ...]
    does: str
    code: str
    change: str
    changed: str


FAMILIES = load("coding.families", tuple[Family, ...])
_CODING = {
    name: load(f"coding.{name}", tuple[str, ...])
    for name in ("numbers", "strings", "loops", "parameters", "separators", "prefixes", "asks", "intros")
}
_FOLLOW_UPS = load("coding.follow_ups", dict[str, dict[str, str]])


def _block(name: object, slots: Slots, body: str, doc: str = "") -> str:
    lines = [f"def {name}({slots['p']}):", *([f'    """{doc}"""'] if doc else []), body.format_map(slots)]
    return "\n".join(["```python", *lines, "```"])


def _coding_slots(rng: random.Random, family: Family) -> dict[str, object]:
    word = pick(rng, _CODING[family.kind])
    parameter = word if rng.random() < 0.6 else pick(rng, _CODING["parameters"])
    name = pick(rng, family.names)
    slots: dict[str, object] = {
        "w": word, "p": parameter, "n": rng.randint(2, 20), "l": pick(rng, "abcdeghilmnoprst"),
        "s": pick(rng, _CODING["separators"]), "i": pick(rng, _CODING["loops"]),
        "f": f"{name}_{word}" if rng.random() < 0.6 else f"{word}_{name}",
    }  # fmt: skip
    return {**slots, "d": family.does.format_map(slots)}


def _follow_up(rng: random.Random, family: Family, slots: Slots) -> tuple[str, tuple[str, ...]]:
    kind = pick(rng, ("changed", "changed", "renamed", "documented", "explained"))
    name = f"{pick(rng, _CODING['prefixes'])}_{slots['f']}" if kind == "renamed" else slots["f"]
    words = {**slots, "name": name, "change": family.change.format_map(slots)}
    asked = render(rng, _FOLLOW_UPS[kind]["ask"], words)
    doc = render(rng, "{d}.", slots) if kind == "documented" else ""
    code = f"\n{_block(name, slots, family.changed if kind == 'changed' else family.code, doc)}"
    template = _FOLLOW_UPS[kind]["statement"]
    return asked, wordings(lambda: render(rng, template, words) + (code if kind != "explained" else ""), 4)


def generate_coding(rng: random.Random) -> Example:
    """Return a function from its description, then a follow-up on it."""
    family = pick(rng, FAMILIES)
    slots = _coding_slots(rng, family)
    ask = punctuated(render(rng, pick(rng, _CODING["asks"]), slots))
    code = _block(slots["f"], slots, family.code)
    first = wordings(lambda: f"{render(rng, pick(rng, _CODING['intros']), slots)}\n{code}", 4)
    follow, second = _follow_up(rng, family, slots)
    return Example("coding", (ask, follow), (first, second), key_of(slots["f"], slots["p"], slots["d"]), "rouge_l")


# Facts to be extracted from a short text as JSON or as a list, and a follow-up question on the text.


@dataclass(frozen=True, slots=True)
class Facts:
    """A kind of text. fields: label -> slot. follow_ups: question -> answer."""

    name: str
    slots: str
    fields: dict[str, str]
    texts: tuple[str, ...]
    follow_ups: dict[str, str]


_FACTS = load("extraction.texts", tuple[Facts, ...])
_FACT_KINDS = {
    **KINDS,
    **load("extraction.kinds", dict[str, tuple[str, ...]]),
    "person": tuple(f"{first} {last}" for first in PEOPLE for last in SURNAMES),
    "code": tuple(
        f"{letters}{number}" for letters in ("AX", "BK", "LT", "QR", "NV", "SF") for number in range(101, 990, 7)
    ),
}
_EXTRACTION_ASKS, _EXTRACTION_INTRO = load("extraction.asks", tuple[str, ...]), load("extraction.intro", str)


def _extraction_slots(rng: random.Random, facts: Slots) -> dict[str, object]:
    """Return the drawn facts and what follows from them."""
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


def _value(value: object) -> object:
    """Convert numeric texts to numbers for JSON, including those with leading zeros."""
    return int(value) if isinstance(value, str) and value.isdigit() else value


def generate_extraction(rng: random.Random) -> Example:
    """Return a text with facts to extract, then a question on it."""
    kind = pick(rng, _FACTS)
    facts = draw_slots(rng, kind.slots, _FACT_KINDS)
    slots = _extraction_slots(rng, facts)
    chosen = rng.sample(tuple(kind.fields), pick(rng, (3, 4, 5)))
    fields = {label: _value(slots[kind.fields[label]]) for label in chosen}
    as_json = rng.random() < 0.5
    text = render(rng, pick(rng, kind.texts), slots)
    shape = "JSON" if as_json else pick(rng, ("a list", "a short list", "a bullet list"))
    names = listing([f"the {label}" for label in fields])
    ask = render(rng, pick(rng, _EXTRACTION_ASKS), {"text": text, "fields": names, "shape": shape})
    lines = "".join(f"\n- {label}: {value}" for label, value in fields.items())
    first = (
        (json.dumps(fields, indent=1),) if as_json else wordings(lambda: render(rng, _EXTRACTION_INTRO, {}) + lines, 3)
    )
    follow, answer = pick(rng, tuple(kind.follow_ups.items()))
    second = wordings(lambda: render(rng, answer, slots), 4)
    key = key_of(kind.name, *facts.values())
    return Example("extraction", (ask, render(rng, follow, slots)), (first, second), key, "rouge_l")


# Puzzles with worked reasoning, each with a follow-up question: comparing, excluding, families, rules, days, ...


@dataclass(frozen=True, slots=True)
class Puzzle:
    """Templates of a kind of puzzle. facts: parts of the question in any order. then: follow-up -> its answer."""

    ask: str
    statement: str
    then: dict[str, str]
    facts: tuple[str, ...] = ()


# Slots of a puzzle's templates, index of the follow-up, and the identity of the puzzle within its kind.
Drawn = tuple[dict[str, object], int, tuple[object, ...]]

PUZZLES = load("reasoning.puzzles", dict[str, Puzzle])
_FRAMES = load("reasoning.frames", tuple[str, ...])
_SCALES = load("reasoning.scales", tuple[tuple[str, ...], ...])
_SETS = load("reasoning.sets", tuple[tuple[str, str, tuple[str, ...]], ...])  # has, have, things
_EVENTS = load("reasoning.events", tuple[tuple[str, str], ...])
_ACTS, _DAY_ACTS = load("reasoning.acts", tuple[str, ...]), load("reasoning.day_acts", tuple[str, ...])
_NOT_DOING = load("reasoning.not_doing", dict[str, str])
_PLACES, _THINGS = load("reasoning.places", tuple[str, ...]), load("reasoning.things", tuple[str, ...])
_STARTS, _ENDS = load("reasoning.starts", tuple[str, ...]), load("reasoning.ends", tuple[str, ...])


def _facts(rng: random.Random, kind: str, slots: Slots) -> str:
    """Return the facts of a puzzle in any order."""
    facts = PUZZLES[kind].facts
    return " ".join(rng.sample(facts, len(facts))).format_map(slots)


def compare(rng: random.Random) -> Drawn:
    """Return three or four people in an order of size, age, speed, ..."""
    order = people(rng, pick(rng, (3, 4, 4)))
    more, *ends = pick(rng, _SCALES)
    clues = [f"{first} is {more} than {second}." for first, second in zip(order, order[1:], strict=False)]
    asked, other = rng.sample((0, 1), 2)  # which end the first and the second question are about
    text = " ".join(rng.sample(clues, len(clues)))
    slots: dict[str, object] = {
        "clues": text, "chain": listing([clue[:-1] for clue in clues]), "order": ", ".join(order), "most": ends[0],
        "end": ends[asked], "who": order[-asked],
    }  # fmt: skip
    by_rank = rng.random() >= 0.4
    if by_rank:
        place = rng.randint(1, len(order) - 2)
        slots.update(rank=("first", "second", "third")[place], other=order[place])
    else:
        slots.update(last=ends[other], other=order[-other])
    return slots, int(by_rank), (more, text)


def exclude(rng: random.Random) -> Drawn:
    """Return three people with one thing each; two clues determine who has what."""
    who = people(rng, 3)
    does, do, options = pick(rng, _SETS)
    things = rng.sample(options, 3)
    shown = listing([things[place] for place in rng.sample(range(3), 3)])
    names = listing(rng.sample(who, 3))
    slots = dict(zip("abcxyz", (*who, *things), strict=True))
    slots |= {"does": does, "do": do, "names": names, "things": shown}
    return {**slots}, 0, (names, shown, *who, *things)


def family(rng: random.Random) -> Drawn:
    """Return a puzzle on parents, children and grandchildren."""
    names: list[str] = []
    while len(names) < 4:
        name = pick(rng, PEOPLE)
        if name not in names:
            names.append(name)
    woman, mother, girl, sister = (name in WOMEN for name in names)
    slots: dict[str, object] = {
        **dict(zip(("old", "parent", "child", "other"), names, strict=True)),
        "up": "mother" if woman else "father", "mid": "mother" if mother else "father",
        "grand": "grandmother" if woman else "grandfather", "sib": "sister" if sister else "brother",
        "down": "daughter" if sister else "son", "grandchild": "granddaughter" if girl else "grandson",
        "own": "daughter" if mother else "son",
    }  # fmt: skip
    then = pick(rng, range(3))
    return {**slots, "facts": _facts(rng, "family", slots)}, then, tuple(names[:3])


def _negated(act: str) -> str:
    verb, _, rest = act.partition(" ")
    return f"{_NOT_DOING[verb]} {rest}"


def rules(rng: random.Random) -> Drawn:
    """Return two rules, one leading to the other."""
    (event, no_event), (first, second) = pick(rng, _EVENTS), people(rng, 2)
    act, result = rng.sample(_ACTS, 2)
    slots = {
        "a": first, "b": second, "event": event, "no_event": no_event, "act": act, "result": result,
        "do": _negated(result), "no_result": f"does not {_negated(result)}",
    }  # fmt: skip
    return {**slots, "facts": _facts(rng, "rules", slots)}, 0, (event, first, act, second, result)


def days(rng: random.Random) -> Drawn:
    """Return a puzzle on days of the week."""
    start, ahead, back = rng.randrange(7), rng.randint(2, 6), rng.randint(1, 3)
    who, act, city = pick(rng, PEOPLE), pick(rng, _DAY_ACTS), pick(rng, KINDS["city"])
    week = [KINDS["weekday"][(start + day) % 7] for day in range(ahead + 1)]
    walk_back = [KINDS["weekday"][(start + ahead - day) % 7] for day in range(1, back + 1)]
    slots: dict[str, object] = {
        "today": week[0], "n": ahead, "k": back, "d": "day" if back == 1 else "days", "a": who, "act": act,
        "city": city, "walk": ", ".join(week[1:]), "there": week[-1], "before": walk_back[-1],
        "walk_back": ", ".join(walk_back),
    }  # fmt: skip
    return slots, 0, (week[0], ahead, who, act, city)


def places(rng: random.Random) -> Drawn:
    """Return a thing that is moved from place to place."""
    words = (*people(rng, 3), *rng.sample(_PLACES, 3), pick(rng, _THINGS))
    return dict(zip("abcxyzt", words, strict=True)), pick(rng, range(3)), words


def classes(rng: random.Random) -> Drawn:
    """Return a puzzle on nested invented kinds of things."""
    kinds = [start + pick(rng, _ENDS) for start in rng.sample(_STARTS, 3)]
    slots = dict(zip("xyza", (*kinds, pick(rng, WOMEN + MEN)), strict=True))
    return {**slots, "facts": _facts(rng, "classes", slots)}, 0, tuple(slots.values())


_DRAW = (compare, compare, exclude, exclude, family, rules, days, places, classes)


def generate_reasoning(rng: random.Random) -> Example:
    """Return a puzzle and a follow-up; each answer explains its solution."""
    draw = pick(rng, _DRAW)
    slots, then, key = draw(rng)
    puzzle = PUZZLES[draw.__name__]
    follow, answer = tuple(puzzle.then.items())[then]
    question, follow = render(rng, puzzle.ask, slots), render(rng, follow, slots)
    answers = tuple(wordings(partial(render, rng, template, slots), 5) for template in (puzzle.statement, answer))
    prompt = render(rng, pick(rng, _FRAMES), {"question": question})
    return Example("reasoning", (prompt, follow), answers, key_of(draw.__name__, *key), "rouge_l")
