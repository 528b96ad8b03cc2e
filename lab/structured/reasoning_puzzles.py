# ruff: noqa: E501 - a template or a word list is one line
"""The puzzles of the reasoning category: comparing, excluding, families, rules, days, places and classes.

Each puzzle draws its content and gives the two questions, a way to word each answer, and its key.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from lab.example import load
from lab.structured.wording import Slots, key_of, listing, pick, say
from lab.structured.words import KINDS, MEN, PEOPLE, WOMEN, people


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
