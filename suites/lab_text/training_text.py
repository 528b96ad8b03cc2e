"""The lab's training text: conversations of every category, mixed, tokenized and packed into rows.

Knows the generators and the tokenizer; nothing of models. The completion mask is read off the lab's own markers;
text of other origin comes with a stored one (`methods/train`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbench_ss.suites.lab_text import drills
from specbench_ss.suites.lab_text.catalog import APP_CATEGORIES, GENERATORS
from specbench_ss.suites.lab_text.example import Example, draw
from specbench_ss.training.text.rows import lay_out, plan_rows

# share of conversations; tasks with computed answers need more of them than tasks of wording
WEIGHTS = {"sql": 2.0, "math_reasoning": 2.5, "math": 1.5, "meaning_representation": 0.8, "writing": 0.8, "qa": 1.6}

Row = tuple[NDArray[np.int32], NDArray[np.bool_]]


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


def render(example: Example) -> str:
    """The conversation as one string, in the form of the chat template."""
    parts = [
        f"<|user|>{turn}<|assistant|>{answers[0]}<|end|>"
        for turn, answers in zip(example.turns, example.answers, strict=True)
    ]
    return "<|bos|>" + "".join(parts)


def completion_mask(ids: NDArray[np.int32], special: Mapping[str, int]) -> NDArray[np.bool_]:
    """True where the token is part of an answer, its end token included; an answer may lack its end."""
    at = np.arange(len(ids))
    opened = np.maximum.accumulate(np.where(ids == special["assistant"], at, -1))
    closes = np.where((ids == special["bos"]) | (ids == special["pad"]), at, -1)
    closes[1:] = np.maximum(closes[1:], np.where(ids[:-1] == special["eos"], at[1:], -1))
    closed = np.maximum.accumulate(closes)
    mask: NDArray[np.bool_] = (opened >= 0) & (opened >= closed) & (ids != special["assistant"])
    return mask


def tokenize(tokenizer: Any, texts: list[str]) -> list[NDArray[np.int32]]:
    """Token ids of rendered conversations."""
    return [
        np.asarray(e.ids, np.int32) for e in tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    ]


def pack(docs: list[NDArray[np.int32]], length: int, pad: int) -> NDArray[np.int32]:
    """Whole conversations into rows [R, length]; the ones in a row see each other, as the lab's base is used to."""
    plan = plan_rows(map(len, docs), length)
    rows = np.full((len(plan), length), pad, np.int32)
    lay_out(docs, plan, rows)
    return rows
