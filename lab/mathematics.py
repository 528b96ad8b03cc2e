"""Sums, word problems and short calculations."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from lab.example import Example, load
from lab.wording import KINDS, PEOPLE, draw_slots, key_of, people, person_forms, pick, punctuated, render, wordings

# Arithmetic drills: training text only, never asked in a suite. The word problems need sums that come out right.

ASKS = ("Drill", "Sums", "Practice", "Work these out")
LIMIT = 400  # products go no further


def equation(rng: random.Random) -> tuple[str, str]:
    """Return a calculation and its result, in the notation of the word problems."""
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
    """Return a row of calculations, asked together and answered one by one."""
    sums = [equation(rng) for _ in range(rng.randint(6, 12))]
    asked = ", ".join(left for left, _ in sums)
    answer = " ".join(f"{left} = {right}." for left, right in sums)
    return Example("arithmetic", (f"{rng.choice(ASKS)}: {asked}",), ((answer,),), asked, "none")


# Stories with numbers, and the worked answers to their questions.

Numbers = dict[str, int]
_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    # 0 marks a division that leaves a rest; no story allows a result of 0
    "/": lambda left, right: left // right if right and left % right == 0 else 0,
}
# Drawn for every story, so that its texts may name any of them.
_COMMON = "T=things F=fruit D=weekday E=weekday Z=weekday I=clothing S=subject P=city Q=city d=2-30"
_HIGHEST = 199
_LEADS = "[||Let us work it out. |We go step by step. ]"


@dataclass(frozen=True, slots=True)
class Turn:
    """A question of a story. steps: calculation -> its sentence. `s1` is the result of the first step."""

    ask: str
    steps: dict[str, str]


@dataclass(frozen=True, slots=True)
class Story:
    """A story: its slots, derived numbers, and questions."""

    name: str
    slots: str
    turns: tuple[Turn, ...]
    derived: dict[str, str] = field(default_factory=dict)

    def spec(self) -> str:
        """Return the specification of all slots of the story."""
        own = {*self.derived, *(entry.partition("=")[0] for entry in self.slots.split())}
        return " ".join([self.slots, *(entry for entry in _COMMON.split() if entry.partition("=")[0] not in own)])


def _calculated(calculation: str, numbers: Numbers) -> tuple[str, int]:
    """Return the calculation with its numbers, and its result, from left to right; 0 where it is out of range."""
    terms = [str(numbers.get(term, term)) for term in calculation.split()]
    result = int(terms[0])
    for sign, value in zip(terms[1::2], terms[2::2], strict=True):
        result = _OPERATIONS[sign](result, int(value))
    return " ".join(terms), result if 0 < result <= _HIGHEST else 0


def _solve(story: Story, numbers: Numbers) -> list[str]:
    """Return the worked calculations; adds derived numbers and results to `numbers`. Empty if one is out of range."""
    for name, calculation in story.derived.items():
        _, numbers[name] = _calculated(calculation, numbers)
        if not numbers[name]:
            return []
    worked: list[str] = []
    for calculation in (calculation for turn in story.turns for calculation in turn.steps):
        shown, result = _calculated(calculation, numbers)
        if not result:
            return []
        worked.append(f"{shown} = {result}")
        numbers[f"s{len(worked)}"] = result
    return worked


def _draw(rng: random.Random, story: Story) -> tuple[dict[str, object], list[str]]:
    """Return slots for which every step has a good result, and the calculations."""
    spec, worked = story.spec(), list[str]()
    while not worked:
        slots = draw_slots(rng, spec)
        numbers = {name: value for name, value in slots.items() if isinstance(value, int)}
        worked = _solve(story, numbers)
    persons = people(rng, 3)
    names = dict(zip(("A", "B", "C", "he", "his", "him"), (*persons, *person_forms(persons[0])), strict=True))
    names |= {"He": names["he"].title(), "His": names["his"].title()}
    return {**slots, **names, **numbers}, worked


def _answer(rng: random.Random, sentences: list[str], slots: dict[str, object], result: str) -> str:
    texts = [render(rng, sentence, slots) for sentence in sentences]
    return render(rng, _LEADS, {}) + " ".join([*texts, f"The answer is {result}."])


def render_story(rng: random.Random, story: Story) -> tuple[list[str], list[tuple[str, ...]], str]:
    """Return the questions of a story, the acceptable answers to each, and the key of the first question."""
    slots, worked = _draw(rng, story)
    questions: list[str] = []
    answers: list[tuple[str, ...]] = []
    calculations = iter(worked)
    for turn in story.turns:
        done = [next(calculations) for _ in turn.steps]
        sentences = [text.replace("{=}", shown) for text, shown in zip(turn.steps.values(), done, strict=True)]
        questions.append(punctuated(render(rng, turn.ask, slots)))
        answers.append(wordings(partial(_answer, rng, sentences, slots, done[-1].rpartition(" ")[2]), 3))
    first = story.turns[0].ask
    used = [
        value for name, value in slots.items() if f"{{{name}}}" in first and name.lower() not in ("he", "his", "him")
    ]
    return questions, answers, key_of(story.name, *used)


_PROBLEMS = load("math_reasoning.stories", tuple[Story, ...])
_PROBLEM_FRAMES = load("math_reasoning.frames", tuple[str, ...])


def generate_math_reasoning(rng: random.Random) -> Example:
    """Return a short story with a question; the answer works it out and ends with `The answer is N.`"""
    (problem,), answers, key = render_story(rng, pick(rng, _PROBLEMS))
    prompt = render(rng, pick(rng, _PROBLEM_FRAMES), {"problem": problem})
    return Example("math_reasoning", (prompt,), tuple(answers), key, "numeric")


_QUESTIONS = load("math.stories", tuple[Story, ...])
_QUESTION_FRAMES = load("math.frames", tuple[str, ...])


def generate_math(rng: random.Random) -> Example:
    """Return a question of school mathematics and a follow-up on its result, answered in the same way."""
    (question, *follow_ups), answers, key = render_story(rng, pick(rng, _QUESTIONS))
    # The name of the asking person is no part of the key: the numbers of the evaluation text are new under any name.
    frame = pick(rng, _QUESTION_FRAMES)
    question = render(rng, frame, {"question": question, "name": pick(rng, PEOPLE), "city": pick(rng, KINDS["city"])})
    return Example("math", (question, *follow_ups), tuple(answers), key, "numeric")
