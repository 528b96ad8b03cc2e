"""Short questions of school mathematics, each with a follow-up on its result."""

from __future__ import annotations

import random

from lab.example import Example, load
from lab.structured.math_words import MATH
from lab.structured.stories import read_stories, tell
from lab.structured.wording import pick, say
from lab.structured.words import KINDS, PEOPLE

_QUESTIONS = read_stories(MATH)
_FRAMES = load("school_math.frames", tuple[str, ...])


def generate(rng: random.Random) -> Example:
    """A question and a follow-up; each answer works it out and ends with `The answer is N.`"""
    turns, answers, key = tell(rng, pick(rng, _QUESTIONS))
    # Who asks is no part of the key: the numbers of the evaluation text are new under any name.
    turns[0] = say(
        rng, pick(rng, _FRAMES), {"question": turns[0], "name": pick(rng, PEOPLE), "city": pick(rng, KINDS["city"])}
    )
    return Example("math", tuple(turns), tuple(answers), key, "numeric")
