"""Prompts for the warm-up: like those of the run, and none that the run asks.

A method that keeps its answers would otherwise know some of the run's questions before the first of them is measured,
and all repeats of a prompt would be equally fast.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from specbench_ss.benchmark.requests import prompt_ids
from specbench_ss.runs.suite import Question

if TYPE_CHECKING:
    from specbench_ss.decoding.target import Target


def warm_prompts(target: Target, questions: Sequence[Question], many: int) -> list[list[int]]:
    """Prompt ids for the first `many` questions: each first turn with its words in reverse order."""
    return [_ids(target, text) for text in warm_texts(questions, many)]


def warm_texts(questions: Sequence[Question], many: int) -> list[str]:
    """The same as texts."""
    asked = [_plain(q.turns[0]) for q in questions]
    return [unasked(q.turns[0], asked) for q in questions[:many]]


def unasked(text: str, asked: Sequence[str]) -> str:
    """Return a text of about this length that is none of those asked, which are given in plain form.

    The words in reverse order, or the characters, or, where both read the same from either end, a number before it.
    The first one is taken that neither begins nor continues a text that is asked, if there is such a one.
    """
    others = [other for other in _others(text, len(asked)) if _plain(other) not in asked]
    return next((other for other in others if not any(_alike(_plain(other), one) for one in asked)), others[0])


def _others(text: str, asked: int) -> list[str]:
    """More texts than are asked, so that one is left."""
    numbered = [f"{number}. {text}" for number in range(asked + 1)]
    return ["".join(reversed(re.split(r"(\s+)", text))), text[::-1], *numbered]


def _alike(one: str, other: str) -> bool:
    """Whether one text is how the other one begins."""
    return one.startswith(other) or other.startswith(one)


def _plain(text: str) -> str:
    """What a tokenizer that lowers letters and joins spaces might see."""
    return " ".join(text.casefold().split())


def _ids(target: Target, text: str) -> list[int]:
    """As many of the last ids as fit: a text may have more tokens backwards."""
    ids = prompt_ids(target, [text])
    return ids[-(target.context_length // 2) :] if len(ids) >= target.context_length else ids
