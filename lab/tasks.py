# ruff: noqa: E501 - a template or a word list is one line
"""Coding, extraction and reasoning puzzles."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
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
    more_kinds,
    people,
    person_forms,
    pick,
    punctuated,
    say,
    wordings,
)

# Families of small Python functions: what each does, its code, and a variant that a follow-up asks for.

FAMILIES = load("coding_families.families", str)


# Small Python functions from a description, and a follow-up that changes, documents or explains them.

_NUMBERS = load("coding.numbers", tuple[str, ...])
_STRINGS = load("coding.strings", tuple[str, ...])
_LOOPS = ("item", "value", "x", "element")
_CODING_ASKS = load("coding.asks", tuple[str, ...])
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
CodeSlots = dict[str, object]
# A follow-up: what is asked, and a way to write one more wording of the answer.
FollowUp = tuple[str, Callable[[], str]]


def _block(name: object, slots: CodeSlots, body: str, doc: str = "") -> str:
    lines = [f"def {name}({slots['p']}):"]
    if doc:
        lines.append(f'    """{doc}"""')
    return "```python\n" + "\n".join(lines) + "\n" + body.format_map(slots) + "\n```"


def _changed(rng: random.Random, family: Family, slots: CodeSlots) -> FollowUp:
    change = family.change.format_map(slots)
    ask = say(rng, "[Now change|Change|Please change] [it|the function] to {c}.", {"c": change})
    intro = "[Here is the changed function|The changed version is|Now the function looks like this]:"
    return ask, lambda: f"{say(rng, intro, slots)}\n{_block(slots['f'], slots, family.changed)}"


def _renamed(rng: random.Random, family: Family, slots: CodeSlots) -> FollowUp:
    name = f"{pick(rng, ('get', 'compute', 'make', 'find', 'run', 'my'))}_{slots['f']}"
    ask = say(rng, "[Rename|Now rename|Please rename] the function to `{name}`.", {"name": name})
    intro = "[Here is the function with its new name|It is now called `{name}`|The renamed function is]:"
    return ask, lambda: f"{say(rng, intro, {'name': name})}\n{_block(name, slots, family.code)}"


def _documented(rng: random.Random, family: Family, slots: CodeSlots) -> FollowUp:
    ask = say(rng, "[Add a docstring|Now add a docstring|Please add a docstring] to [it|the function].", slots)
    intro = "[Here is the function with a docstring|Now it has a docstring|With a docstring it looks like this]:"
    doc = say(rng, "{d}.", slots)
    return ask, lambda: f"{say(rng, intro, slots)}\n{_block(slots['f'], slots, family.code, doc)}"


def _explained(rng: random.Random, family: Family, slots: CodeSlots) -> FollowUp:
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


def _coding_slots(rng: random.Random, family: Family) -> CodeSlots:
    word = pick(rng, _NUMBERS if family.kind == "numbers" else _STRINGS)
    parameter = word if rng.random() < 0.6 else pick(rng, ("data", "entries", "records", "series", "given"))
    name = pick(rng, family.names)
    slots: CodeSlots = {"w": word, "p": parameter, "n": rng.randint(2, 20), "l": pick(rng, "abcdeghilmnoprst")}
    slots["s"] = pick(rng, (", ", " ", "-", "; ", "/", " and "))
    slots["i"] = pick(rng, _LOOPS)
    slots["f"] = f"{name}_{word}" if rng.random() < 0.6 else f"{word}_{name}"
    slots["d"] = family.does.format_map(slots)
    return slots


def generate_coding(rng: random.Random) -> Example:
    """A function from its description, then a follow-up on it."""
    family = pick(rng, _FAMILIES)
    slots = _coding_slots(rng, family)
    ask = punctuated(say(rng, pick(rng, _CODING_ASKS), slots))
    first = wordings(lambda: f"{say(rng, pick(rng, _INTROS), slots)}\n{_block(slots['f'], slots, family.code)}", 4)
    follow, make = pick(rng, _FOLLOW_UPS)(rng, family, slots)
    key = key_of(slots["f"], slots["p"], slots["d"])
    return Example("coding", (ask, follow), (first, wordings(make, 4)), key, "rouge_l")


# Short texts with facts to extract: their slots, their wordings, their fields, and follow-up questions.

TEXTS = load("extraction_words.texts", str)
MORE = load("extraction_words.more", str)


# Facts to be extracted from a short text as JSON or as a list, and a follow-up question on the text.

_KINDS = {
    **KINDS,
    **more_kinds(MORE),
    "person": tuple(f"{first} {last}" for first in PEOPLE for last in SURNAMES),
    "code": tuple(
        f"{letters}{number}" for letters in ("AX", "BK", "LT", "QR", "NV", "SF") for number in range(101, 990, 7)
    ),
}
_EXTRACTION_ASKS = (
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


def _extraction_slots(rng: random.Random, facts: dict[str, object]) -> dict[str, object]:
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


def generate_extraction(rng: random.Random) -> Example:
    """A text with facts to extract, then a question on it."""
    kind = pick(rng, _TEXTS)
    facts = draw_slots(rng, kind.spec, _KINDS)
    slots = _extraction_slots(rng, facts)
    chosen = rng.sample(kind.fields, pick(rng, (3, 4, 5)))
    fields = [(label, _value(slots[slot])) for label, slot in chosen]
    as_json = rng.random() < 0.5
    text = say(rng, pick(rng, kind.texts), slots)
    shape = "JSON" if as_json else pick(rng, ("a list", "a short list", "a bullet list"))
    names = listing([f"the {label}" for label, _ in fields])
    ask = say(rng, pick(rng, _EXTRACTION_ASKS), {"text": text, "fields": names, "shape": shape})
    first = (_json(fields),) if as_json else wordings(lambda: _lines(rng, fields), 3)
    follow, answer = pick(rng, kind.follow_ups)
    second = wordings(lambda: say(rng, answer, slots), 4)
    return Example(
        "extraction", (ask, say(rng, follow, slots)), (first, second), key_of(kind.name, *facts.values()), "rouge_l"
    )


# The puzzles of the reasoning category: comparing, excluding, families, rules, days, places and classes.


@dataclass(frozen=True, slots=True)
class Puzzle:
    """Questions and answers as templates, and what fills them."""

    questions: tuple[str, str]
    answers: tuple[str, str]
    slots: Slots
    key: str


_SCALES = load("reasoning_puzzles.scales", tuple[tuple[str, ...], ...])  # fmt: skip


def compare(rng: random.Random) -> Puzzle:
    """Three or four people in an order of size, age, speed, ..."""
    order = people(rng, pick(rng, (3, 4, 4)))
    more, *ends = pick(rng, _SCALES)
    clues = [f"{first} is {more} than {second}." for first, second in zip(order, order[1:], strict=False)]
    asked, other = rng.sample((0, 1), 2)  # which end the first and the second question are about
    slots: dict[str, object] = {
        "clues": " ".join(rng.sample(clues, len(clues))), "chain": listing([clue[:-1] for clue in clues]),
        "order": ", ".join(order), "most": ends[0], "end": ends[asked], "who": order[-asked],
    }  # fmt: skip
    if rng.random() < 0.4:
        question, answer = "[And who|Who] is the {last}?", "{other} is the {last}"
        slots.update(last=ends[other], other=order[-other])
    else:
        question = "[And who|Who] comes {rank}, [counting|if we count] from the {most} [on|one]?"
        answer, place = "{other} comes {rank}", rng.randint(1, len(order) - 2)
        slots.update(rank=("first", "second", "third")[place], other=order[place])
    answers = (
        "[We know that|The clues say that|It is said that] {chain}. [So the order is|This gives the order] {order}. "
        "[Therefore|This means that] {who} is the {end}.",
        f"[The order is|We found the order] {{order}}, [so|which means that] {answer}.",
    )
    return Puzzle(("{clues} Who is the {end}?", question), answers, slots, key_of("compare", more, slots["clues"]))


_SETS = load("reasoning_puzzles.sets", tuple[tuple[str | tuple[str, ...], ...], ...])


def exclude(rng: random.Random) -> Puzzle:
    """Three people with one thing each; two clues say who has what."""
    who = people(rng, 3)
    kind, does, do, options = pick(rng, _SETS)
    article = "the " if kind == "pet" else ""
    things = [article + thing for thing in rng.sample(options, 3)]
    shown = [things[place] for place in rng.sample(range(3), 3)]
    slots = {
        "a": who[0], "b": who[1], "c": who[2], "x": things[0], "y": things[1], "z": things[2], "does": does, "do": do,
        "kind": kind, "names": listing(rng.sample(who, 3)), "things": listing(shown),
    }  # fmt: skip
    questions = (
        "{names} each {do} one [thing|of these]: {things}. {a} {does} {x}. {b} does not {do} {z}. What does {c} {do}?",
        "[And what|What] does {b} {do}?",
    )
    answers = (
        "{a} {does} {x}, so [only {y} and {z} are left|{y} and {z} remain]. {b} does not {do} {z}, "
        "so {b} {does} {y}. [Therefore|This means that] {c} {does} {z}.",
        "[We saw that {b} does not {do} {z}|{b} does not {do} {z}] and {a} {does} {x}, so {b} {does} {y}.",
    )
    return Puzzle(questions, answers, slots, key_of("exclude", slots["names"], slots["things"], *who, *things))


def _relative(rng: random.Random, used: list[str]) -> tuple[str, bool]:
    while True:
        name = pick(rng, PEOPLE)
        if name not in used:
            used.append(name)
            return name, name in WOMEN


def family(rng: random.Random) -> Puzzle:
    """Parents, children and grandchildren."""
    used: list[str] = []
    (old, woman), (parent, mother), (child, girl), (other, sister) = (_relative(rng, used) for _ in range(4))
    slots = {
        "old": old, "parent": parent, "child": child, "other": other,
        "up": "mother" if woman else "father", "mid": "mother" if mother else "father",
        "grand": "grandmother" if woman else "grandfather", "sib": "sister" if sister else "brother",
        "down": "daughter" if sister else "son", "grandchild": "granddaughter" if girl else "grandson",
        "own": "daughter" if mother else "son",
    }  # fmt: skip
    second = (
        ("{other} is the {sib} of {child}. [What is {other} to|How is {other} related to] {parent}?",
         "{other} is the {sib} of {child}, and {parent} is the {mid} of {child}. [So|This means that] {other} is the {down} of {parent}."),
        ("[And what is {child} to|How is {child} related to] {old}?",
         "{old} is the {grand} of {child}, [so|and so] {child} is the {grandchild} of {old}."),
        ("[And what is {parent} to|How is {parent} related to] {old}?",
         "{old} is the {up} of {parent}, [so|and so] {parent} is the {own} of {old}."),
    )  # fmt: skip
    question, answer = pick(rng, second)
    facts = ["{old} is the {up} of {parent}.", "{parent} is the {mid} of {child}."]
    questions = (
        f"{' '.join(rng.sample(facts, 2))} [What is {{old}} to|How is {{old}} related to] {{child}}?",
        question,
    )
    first = (
        "{old} is the {up} of {parent}, and {parent} is the {mid} of {child}. The {up} of a {mid} is a {grand}. "
        "[So|Therefore|This means that] {old} is the {grand} of {child}."
    )
    return Puzzle(questions, (first, answer), slots, key_of("family", old, parent, child))


_EVENTS = load("reasoning_puzzles.events", tuple[tuple[str, ...], ...])  # fmt: skip
_ACTS = load("reasoning_puzzles.acts", tuple[str, ...])  # fmt: skip
_NOT = {"goes": "go", "stays": "stay", "takes": "take", "cooks": "cook", "reads": "read", "calls": "call", "plays": "play",
        "visits": "visit", "cleans": "clean", "waters": "water", "buys": "buy"}  # fmt: skip


def _negated(act: str) -> str:
    verb, _, rest = act.partition(" ")
    return f"does not {_NOT[verb]} {rest}"


def rules(rng: random.Random) -> Puzzle:
    """Two rules, one leading to the other."""
    (event, no_event), (first, second) = pick(rng, _EVENTS), people(rng, 2)
    act, result = rng.sample(_ACTS, 2)
    slots = {
        "a": first, "b": second, "event": event, "no_event": no_event, "act": act, "result": result,
        "Event": event[0].upper() + event[1:], "no_act": _negated(act), "no_result": _negated(result),
        "do": _negated(result).removeprefix("does not "),
    }  # fmt: skip
    facts = rng.sample(["If {event}, {a} {act}.", "If {a} {act}, {b} {result}."], 2)
    questions = (
        f"{' '.join(facts)} [Today|This morning|Tonight] {{event}}. Does {{b}} {{do}}?",
        "[Now suppose|Suppose] that {b} {no_result}. [Can it be|Is it possible] that {event}?",
    )
    answers = (
        "[We know that {event}|It is given that {event}], so {a} {act}. If {a} {act}, {b} {result}. [So yes|So the answer is yes|Yes], {b} {result}.",
        "No. If {event}, {a} {act}, and then {b} {result}. [As|Because|Since] {b} {no_result}, {no_event}.",
    )
    return Puzzle(questions, answers, slots, key_of("rules", event, first, act, second, result))


def days(rng: random.Random) -> Puzzle:
    """Counting days of the week."""
    week = KINDS["weekday"]
    start, ahead, back = rng.randrange(7), rng.randint(2, 6), rng.randint(1, 3)
    who, act = (
        pick(rng, PEOPLE),
        pick(
            rng,
            (
                "has an exam",
                "moves house",
                "travels to the sea",
                "sees the dentist",
                "starts a new job",
                "gives a party",
            ),
        ),
    )
    city = pick(rng, KINDS["city"])
    there, before = week[(start + ahead) % 7], week[(start + ahead - back) % 7]
    slots = {
        "today": week[start], "n": ahead, "k": back, "d": "day" if back == 1 else "days", "a": who, "act": act, "city": city,
        "walk": ", ".join(week[(start + step) % 7] for step in range(1, ahead + 1)), "there": there, "before": before,
        "walk_back": ", ".join(week[(start + ahead - step) % 7] for step in range(1, back + 1)),
    }  # fmt: skip
    questions = (
        "[Today is|It is] {today}. In {n} days {a} {act} in {city}. [Which day of the week is that|What day will that be]?",
        "{a} has to [get ready|pack] {k} {d} before that. [Which day is that|What day is that]?",
    )
    answers = (
        "We count {n} days [on from|after] {today}: {walk}. [So|This means that] {a} {act} on {there}.",
        "We count {k} {d} back from {there}: {walk_back}. [So it is|That is] {before}.",
    )
    return Puzzle(questions, answers, slots, key_of("days", week[start], ahead, who, act, city))


_PLACES = ("box", "bag", "drawer", "basket", "cupboard", "bucket", "suitcase", "pocket", "cabinet", "chest")
_THINGS = load("reasoning_puzzles.things", tuple[str, ...])


def places(rng: random.Random) -> Puzzle:
    """A thing that is moved from place to place."""
    (first, second, third), (one, two, three) = people(rng, 3), rng.sample(_PLACES, 3)
    slots = {"a": first, "b": second, "c": third, "x": one, "y": two, "z": three, "t": pick(rng, _THINGS)}
    second_turn = (
        ("[Where was the {t} before {c} moved it|And where was it before that]?",
         "[Before that|Before {c} moved it], the {t} was in the {y}, [where {b} had put it|because {b} had put it there]."),
        ("[Who|And who] put the {t} into the {y}?", "{b} moved the {t} from the {x} into the {y}, [before {c} took it|and then {c} took it]."),
        ("{a} was away [all the time|after that]. Where [will|would] {a} look for the {t}?",
         "{a} put the {t} into the {x} and did not see the moves, so {a} [will look in the {x}|would look in the {x} first]."),
    )  # fmt: skip
    question, answer = pick(rng, second_turn)
    questions = (
        "{a} puts a(n) {t} into the {x}. {b} [moves|carries] it from the {x} to the {y}. [Later|Then] {c} [moves|carries] it "
        "from the {y} to the {z}. Where is the {t} now?",
        question,
    )
    answers = (
        "[First|At first] the {t} is in the {x}. [Then|Next] {b} moves it to the {y}, and [after that|then|later] {c} moves it "
        "to the {z}. [So the {t}|The {t}] is now in the {z}.",
        answer,
    )
    return Puzzle(questions, answers, slots, key_of("places", first, second, third, one, two, three, slots["t"]))


_STARTS, _ENDS = (
    ("bl", "dr", "gr", "kl", "pl", "sn", "tr", "v", "z", "m", "fl", "w"),
    ("imp", "orn", "ack", "ent", "ool", "ist", "urk", "ap", "ell"),
)


def classes(rng: random.Random) -> Puzzle:
    """Made-up kinds of things, one inside the other."""
    starts = rng.sample(_STARTS, 3)
    one, two, three = (start + pick(rng, _ENDS) for start in starts)
    name = pick(rng, WOMEN + MEN)
    slots = {"x": one, "y": two, "z": three, "a": name}
    facts = rng.sample(["Every {x} is a {y}.", "Every {y} is a {z}."], 2)
    questions = (
        f"{' '.join(facts)} {{a}} has a {{x}}. Does {{a}} [also |]have a {{z}}?",
        "[And is|Is] every {z} a {x}[, too|]?",
    )
    answers = (
        "Yes. {a} has a {x}, and every {x} is a {y}. [As|Since|Because] every {y} is a {z}, the {x} [of {a} |]is also a {z}.",
        "[No, not necessarily|Not necessarily]. Every {x} is a {z}, but there [may|can] be a {z} that is [not a {x}|no {x}].",
    )
    return Puzzle(questions, answers, slots, key_of("classes", one, two, three, name))


PUZZLES = (compare, compare, exclude, exclude, family, rules, days, places, classes)


def word(rng: random.Random, template: str, puzzle: Puzzle) -> str:
    """One wording of a template of the puzzle."""
    return say(rng, template, puzzle.slots)


# Puzzles with worked reasoning, each with a follow-up question.

_FRAMES = load("reasoning.frames", tuple[str, ...])


def generate_reasoning(rng: random.Random) -> Example:
    """A puzzle and a follow-up; each answer says how it is found."""
    puzzle = pick(rng, PUZZLES)(rng)
    question, follow = (word(rng, template, puzzle) for template in puzzle.questions)
    answers = tuple(wordings(partial(word, rng, template, puzzle), 5) for template in puzzle.answers)
    prompt = say(rng, pick(rng, _FRAMES), {"question": question})
    return Example("reasoning", (prompt, follow), answers, puzzle.key, "rouge_l")
