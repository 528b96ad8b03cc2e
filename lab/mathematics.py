# ruff: noqa: E501 - a template or a word list is one line
"""Sums, word problems and short calculations."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from lab.example import Example, load
from lab.wording import KINDS, PEOPLE, draw_slots, key_of, people, person_forms, pick, punctuated, say, wordings

# Arithmetic drills: training text only, never asked in a suite. The word problems need sums that come out right.

ASKS = ("Drill", "Sums", "Practice", "Work these out")
LIMIT = 400  # products go no further


def equation(rng: random.Random) -> tuple[str, str]:
    """A calculation and its result, in the notation of the word problems."""
    kind = rng.choice("++--***//")
    if kind == "+":
        a, b = rng.randint(1, 200), rng.randint(1, rng.choice((20, 100, 200)))
        return f"{a} + {b}", str(a + b)
    if kind == "-":
        a = rng.randint(2, 250)
        b = rng.randint(1, a - 1)
        return f"{a} - {b}", str(a - b)
    a = rng.randint(2, 12)
    b = rng.randint(2, max(2, min(100, LIMIT // a)))
    if rng.random() < 0.5:
        a, b = b, a
    return (f"{a} * {b}", str(a * b)) if kind == "*" else (f"{a * b} / {a}", str(b))


def generate_drill(rng: random.Random) -> Example:
    """A row of calculations, asked together and answered one by one."""
    sums = [equation(rng) for _ in range(rng.randint(6, 12))]
    asked = ", ".join(left for left, _ in sums)
    answer = " ".join(f"{left} = {right}." for left, right in sums)
    return Example("arithmetic", (f"{rng.choice(ASKS)}: {asked}",), ((answer,),), asked, "none")


# Reads stories with numbers, draws their slots and writes the worked answers.

Numbers = dict[str, int]
_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
    # 0 marks a division that leaves a rest; no story allows a result of 0
    "/": lambda left, right: left // right if right and left % right == 0 else 0,
}
# Drawn for every story, so that its texts may name any of them.
_COMMON = "T=things F=fruit D=weekday E=weekday Z=weekday I=clothing S=subject P=city Q=city d=2-30"
_HIGHEST = 199
_LEADS = "[||Let us work it out. |We go step by step. ]"
_DERIVED = re.compile(r"(\w+)=(\w+)\*(\w+)(?:([+-])(\w+))?$")


@dataclass(frozen=True, slots=True)
class Step:
    """One calculation and the sentence that says it."""

    left: str
    operation: str
    right: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Story:
    """A story: its slots, the numbers made of other numbers, and for each turn its text and steps."""

    name: str
    spec: str
    derived: tuple[tuple[str | None, ...], ...]
    turns: tuple[tuple[str, tuple[Step, ...]], ...]


def _step(line: str) -> Step:
    calculation, _, sentence = line.partition(": ")
    left, operation, right = calculation.split()
    return Step(left, operation, right, sentence)


def _story(block: str) -> Story:
    head, *lines = block.strip().split("\n")
    name, spec = head.split(" | ")
    derived = [_DERIVED.match(entry) for entry in spec.split()]
    drawn = [entry for entry, match in zip(spec.split(), derived, strict=True) if not match]
    given = {entry.split("=")[0] for entry in spec.split()}
    drawn += [entry for entry in _COMMON.split() if entry.split("=")[0] not in given]
    turns: list[tuple[str, tuple[Step, ...]]] = []
    for turn in "\n".join(lines).split("\n> "):
        text, *steps = turn.split("\n")
        turns.append((text, tuple(_step(line) for line in steps)))
    return Story(name, " ".join(drawn), tuple(match.groups() for match in derived if match), tuple(turns))


def read_stories(text: str) -> tuple[Story, ...]:
    """All stories of a text."""
    return tuple(_story(block) for block in text.strip().removeprefix("# ").split("\n# "))


def _value(term: str | None, numbers: Numbers) -> int:
    return int(term) if term and term.isdigit() else numbers[term or ""]


def _solve(story: Story, numbers: Numbers) -> list[str] | None:
    """The worked calculations; adds the results to the numbers. None if one of them is out of range."""
    worked: list[str] = []
    for step in (step for _, steps in story.turns for step in steps):
        left, right = _value(step.left, numbers), _value(step.right, numbers)
        result = _OPERATIONS[step.operation](left, right)
        if not 0 < result <= _HIGHEST:
            return None
        worked.append(f"{left} {step.operation} {right} = {result}")
        numbers[f"s{len(worked)}"] = result
    return worked


def _derive(story: Story, numbers: Numbers) -> bool:
    """Adds the numbers made of others; false if one of them is out of range."""
    for name, left, right, sign, last in story.derived:
        value = _value(left, numbers) * _value(right, numbers)
        if sign:
            value = _OPERATIONS[sign](value, _value(last, numbers))
        numbers[name or ""] = value
        if not 0 < value <= _HIGHEST:
            return False
    return True


def _people(rng: random.Random) -> dict[str, object]:
    first, second, third = people(rng, 3)
    he, his, him = person_forms(first)
    return {"A": first, "B": second, "C": third, "he": he, "He": he.title(), "his": his, "His": his.title(), "him": him}


def _draw(rng: random.Random, story: Story) -> tuple[dict[str, object], list[str]]:
    """Slots for which every step has a good result, and the calculations."""
    while True:
        slots = draw_slots(rng, story.spec)
        numbers = {name: value for name, value in slots.items() if isinstance(value, int)}
        worked = _solve(story, numbers) if _derive(story, numbers) else None
        if worked:
            return {**slots, **_people(rng), **numbers}, worked


def _answer(rng: random.Random, steps: tuple[Step, ...], worked: list[str], slots: dict[str, object]) -> str:
    pairs = zip(steps, worked, strict=True)
    sentences = [say(rng, step.sentence.replace("{=}", done), slots) for step, done in pairs]
    result = worked[-1].rpartition(" ")[2]
    return say(rng, _LEADS, {}) + " ".join([*sentences, f"The answer is {result}."])


def tell(rng: random.Random, story: Story) -> tuple[list[str], list[tuple[str, ...]], str]:
    """The questions of a story, the acceptable answers to each, and the key of the first question."""
    slots, worked = _draw(rng, story)
    questions: list[str] = []
    answers: list[tuple[str, ...]] = []
    done = 0
    for text, steps in story.turns:
        part = worked[done : done + len(steps)]
        done += len(steps)
        questions.append(punctuated(say(rng, text, slots)))
        answers.append(wordings(partial(_answer, rng, steps, part, slots), 3))
    first = story.turns[0][0]
    used = [
        value for name, value in slots.items() if f"{{{name}}}" in first and name.lower() not in ("he", "his", "him")
    ]
    return questions, answers, key_of(story.name, *used)


# The word problems, in the notation of stories.

STORIES = load("story_words.stories", str)


# Word problems of two or three steps, each solved with every calculation written out.

_STORIES = read_stories(STORIES)
_MATH_REASONING_FRAMES = load("math_reasoning.frames", tuple[str, ...])


def generate_math_reasoning(rng: random.Random) -> Example:
    """A short story with a question; the answer works it out and ends with `The answer is N.`"""
    (problem,), answers, key = tell(rng, pick(rng, _STORIES))
    prompt = say(rng, pick(rng, _MATH_REASONING_FRAMES), {"problem": problem})
    return Example("math_reasoning", (prompt,), tuple(answers), key, "numeric")


# Short questions of school mathematics with a follow-up each, in the notation of stories.

MATH = load("math_words.math", str)


# Short questions of school mathematics, each with a follow-up on its result.

_QUESTIONS = read_stories(MATH)
_SCHOOL_MATH_FRAMES = load("school_math.frames", tuple[str, ...])


def generate_math(rng: random.Random) -> Example:
    """A question and a follow-up; each answer works it out and ends with `The answer is N.`"""
    turns, answers, key = tell(rng, pick(rng, _QUESTIONS))
    # Who asks is no part of the key: the numbers of the evaluation text are new under any name.
    turns[0] = say(
        rng,
        pick(rng, _SCHOOL_MATH_FRAMES),
        {"question": turns[0], "name": pick(rng, PEOPLE), "city": pick(rng, KINDS["city"])},
    )
    return Example("math", tuple(turns), tuple(answers), key, "numeric")
