"""Word problems of two or three steps, each solved with every calculation written out."""

from __future__ import annotations

import random

from lab.example import Example, load
from lab.structured.stories import read_stories, tell
from lab.structured.story_words import STORIES
from lab.structured.wording import pick, say

_STORIES = read_stories(STORIES)
_FRAMES = load("math_reasoning.frames", tuple[str, ...])


def generate(rng: random.Random) -> Example:
    """A short story with a question; the answer works it out and ends with `The answer is N.`"""
    (problem,), answers, key = tell(rng, pick(rng, _STORIES))
    prompt = say(rng, pick(rng, _FRAMES), {"problem": problem})
    return Example("math_reasoning", (prompt,), tuple(answers), key, "numeric")
