"""Puzzles with worked reasoning, each with a follow-up question."""

from __future__ import annotations

import random
from functools import partial

from lab.example import Example, load
from lab.structured.reasoning_puzzles import PUZZLES, word
from lab.structured.wording import pick, say, wordings

_FRAMES = load("reasoning.frames", tuple[str, ...])


def generate(rng: random.Random) -> Example:
    """A puzzle and a follow-up; each answer says how it is found."""
    puzzle = pick(rng, PUZZLES)(rng)
    question, follow = (word(rng, template, puzzle) for template in puzzle.questions)
    answers = tuple(wordings(partial(word, rng, template, puzzle), 5) for template in puzzle.answers)
    prompt = say(rng, pick(rng, _FRAMES), {"question": question})
    return Example("reasoning", (prompt, follow), answers, puzzle.key, "rouge_l")
