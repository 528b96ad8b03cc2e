"""The lab's training text: conversations of every category, mixed, tokenized and packed into rows.

Knows the generators and the tokenizer; nothing of models. The completion mask is read off the lab's own markers;
text of other origin comes with a stored one (`methods/train`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

from lab import drills
from lab.catalog import APP_CATEGORIES, GENERATORS
from lab.example import Example, draw

# share of conversations; tasks with computed answers need more of them than tasks of wording
WEIGHTS = {"sql": 2.0, "math_reasoning": 2.5, "math": 1.5, "meaning_representation": 0.8, "writing": 0.8, "qa": 1.6}


# the last part of the base's training: what computes is drilled, the rest is kept alive
POLISH_WEIGHTS = {**WEIGHTS, "arithmetic": 8.0, "math_reasoning": 4.0, "math": 4.0}
APP_WEIGHTS = {name: float(name in APP_CATEGORIES) for name in GENERATORS}  # the applications and nothing else


def conversations(split: str, seed: int, weighting: Mapping[str, float] = WEIGHTS) -> Iterator[Example]:
    """An endless mixture of all categories; drills only where they are given a weight."""
    makers = {**GENERATORS, "arithmetic": drills.generate} if "arithmetic" in weighting else GENERATORS
    names = sorted(makers)
    streams = {name: draw(makers[name], split, seed) for name in names}
    weights = [weighting.get(name, 1.0) for name in names]
    rng = random.Random(f"mixture:{split}:{seed}")
    while True:
        yield next(streams[rng.choices(names, weights)[0]])
