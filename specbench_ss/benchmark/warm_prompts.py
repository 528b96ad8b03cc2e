"""Prompts for the warm-up: like those of the run, and none that the run asks.

A method that keeps its answers would otherwise know some of the run's questions before the first of them is measured,
and all repeats of a prompt would be equally fast.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from specbench_ss.decoding.target import Target
from specbench_ss.runs.suite import Question


def warm_prompts(target: Target, questions: Sequence[Question], many: int) -> list[list[int]]:
    """Return prompt ids for the first `many` questions: each first prompt with its words in reverse order."""
    return [_ids(target, messages) for messages in warm_messages(questions, many)]


def warm_messages(questions: Sequence[Question], many: int) -> list[list[dict[str, str]]]:
    """Return the same prompts as messages."""
    asked = [_plain(q.turns[0]) for q in questions]
    return [
        [
            *({"role": m.role, "content": _backwards(m.content)} for m in q.history),
            {"role": "user", "content": unasked(q.turns[0], asked)},
        ]
        for q in questions[:many]
    ]


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
    return [_backwards(text), text[::-1], *numbered]


def _backwards(text: str) -> str:
    """Return the text with its words in reverse order."""
    return "".join(reversed(re.split(r"(\s+)", text)))


def _alike(one: str, other: str) -> bool:
    """Whether one text is how the other one begins."""
    return one.startswith(other) or other.startswith(one)


def _plain(text: str) -> str:
    """What a tokenizer that lowers letters and joins spaces might see."""
    return " ".join(text.casefold().split())


def _ids(target: Target, messages: list[dict[str, str]]) -> list[int]:
    """Return as many of the last ids as fit: a text may have more tokens backwards."""
    ids = target.encode_chat(messages)
    return ids[-(target.context_length // 2) :] if len(ids) >= target.context_length else ids
