"""Order of samples: question by question, all methods interleaved; arrival times; warm-up prompts.

The order of the methods is random and balanced: blocks (one prompt, one repeat) form cycles, each a Williams Latin
square with shuffled methods and rows, so that over a cycle every method has every position, and follows every other
method, equally often. It depends only on the seed and the block's number, so a resumed run keeps its order.

Warm-up prompts are not questions of the run: methods with cross-request state would otherwise have seen them.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from specbench_ss.engine.target import Target
from specbench_ss.suite import Question


@dataclass(frozen=True, slots=True)
class Sample:
    """One request. index counts from 0 over the run, position over the methods of a block."""

    question: Question
    turn: int
    repeat: int
    method: str
    position: int
    index: int

    @property
    def key(self) -> tuple[str, int, str, int]:
        """Return the key of its record."""
        return (self.question.id, self.turn, self.method, self.repeat)


def interleave_tasks(questions: Sequence[Question]) -> list[Question]:
    """Interleave the tasks: the first question of each, then the others, with equal progress of all tasks.

    Questions of one task stay in their order.
    """
    many = Counter(question.category for question in questions)
    counts: Counter[str] = Counter()
    progress = []
    for question in questions:
        progress.append(counts[question.category] / many[question.category])
        counts[question.category] += 1
    return [question for _, question in sorted(zip(progress, questions, strict=True), key=lambda pair: pair[0])]


def plan(
    questions: Sequence[Question], methods: Sequence[str], repeats: int, seed: int, first: int = 0
) -> Iterator[Sample]:
    """Yield every sample of a run, in order. first: number of repeats in earlier rounds."""
    block = first * sum(len(question.turns) for question in questions)
    index = block * len(methods)
    for question in questions:
        for turn in range(len(question.turns)):
            for repeat in range(first, repeats):
                for position, method in enumerate(method_order(methods, block, seed)):
                    yield Sample(question, turn, repeat, method, position, index)
                    index += 1
                block += 1


def method_order(methods: Sequence[str], block: int, seed: int) -> tuple[str, ...]:
    """Return the order of the methods in this block (counted from 0)."""
    square = williams(len(methods))
    cycle, number = divmod(block, len(square))
    rng = random.Random(f"order:{seed}:{cycle}")
    names = list(methods)
    rng.shuffle(names)
    rng.shuffle(square)
    return tuple(names[i] for i in square[number])


def williams(n: int) -> list[list[int]]:
    """Return orders of 0..n-1 balanced for position and predecessor: n of them for even n, 2n for odd n > 1."""
    first = [i // 2 if i % 2 == 0 else n - 1 - i // 2 for i in range(n)]
    rows = [[(x + shift) % n for x in first] for shift in range(n)]
    return rows + [row[::-1] for row in rows] if n % 2 and n > 1 else rows


def question_blocks(questions: Sequence[Question], number: int) -> dict[str, int]:
    """Return the block of each question, from 0: `number` blocks of about as many questions of every task.

    Fewer questions than blocks give as many blocks as questions.
    """
    tasks = list(dict.fromkeys(question.category for question in questions))
    by_task = sorted(questions, key=lambda question: tasks.index(question.category))
    return {question.id: i % number for i, question in enumerate(by_task)}


def turns_of_servers(servers: Sequence[str], blocks: int, seed: int) -> list[tuple[str, ...]]:
    """Return the order in which servers take turns in each block.

    Blocks form pairs: the first server begins the first block of a pair, and the second block has the reverse order.
    With an even number of blocks all servers have the same mean place, so that a linear drift of the machine cancels.
    """
    first, others, turns = servers[0], servers[1:], list[tuple[str, ...]]()
    for block in range(blocks):
        order = (first, *(method_order(others, block // 2, seed) if others else ()))
        turns.append(order[::-1] if block % 2 else order)
    return turns


def sample_seed(seed: int, question_id: str, turn: int, repeat: int) -> int:
    """Return the sampling seed for one prompt and repeat, the same for every method; in [0, 2**63)."""
    digest = hashlib.sha256(f"{seed}\0{question_id}\0{turn}\0{repeat}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def arrivals(number: int, rate: float, seed: int, repeat: int) -> list[float]:
    """Return the seconds of Poisson arrivals, the same for every method; the last one is at number / rate.

    The exponential gaps are scaled, as in vLLM's benchmark: the mean rate of few requests is exact too.
    """
    rng = random.Random(f"arrivals:{seed}:{repeat}")
    times = list(accumulate(rng.expovariate(1.0) for _ in range(number)))
    return [time * number / (rate * times[-1]) for time in times]


def warmup_prompts(target: Target, questions: Sequence[Question], many: int) -> list[list[int]]:
    """Return warm-up prompt ids for the first `many` questions: first prompts with words in reverse order."""
    ids = [target.encode_chat(messages) for messages in warmup_messages(questions, many)]
    most = target.context_length  # a reversed text may have more tokens
    return [prompt[-(most // 2) :] if len(prompt) >= most else prompt for prompt in ids]


def warmup_messages(questions: Sequence[Question], many: int) -> list[list[dict[str, Any]]]:
    """Return the warm-up prompts as messages."""
    texts = [_plain(q.turns[0]) for q in questions]
    return [
        [
            *(m.as_dict() | ({"content": _backwards(m.content)} if m.content else {}) for m in q.history),
            {"role": "user", "content": unseen_prompt(q.turns[0], texts)},
        ]
        for q in questions[:many]
    ]


def unseen_prompt(text: str, questions: Sequence[str]) -> str:
    """Return a text of about this length that differs from all questions, which are in normalized form.

    Candidates are the words in reverse order, the characters in reverse order, and the text with a number before it.
    The first one that is no prefix or continuation of a question is preferred.
    """
    numbered = [f"{number}. {text}" for number in range(len(questions) + 1)]  # one more than questions
    others = [other for other in (_backwards(text), text[::-1], *numbered) if _plain(other) not in questions]
    return next((other for other in others if not any(_alike(_plain(other), q) for q in questions)), others[0])


def _backwards(text: str) -> str:
    """Return the text with its words in reverse order."""
    return "".join(reversed(re.split(r"(\s+)", text)))


def _alike(one: str, other: str) -> bool:
    """Return True if one text is a prefix of the other."""
    return one.startswith(other) or other.startswith(one)


def _plain(text: str) -> str:
    """Normalize case and spaces, as some tokenizers do."""
    return " ".join(text.casefold().split())
