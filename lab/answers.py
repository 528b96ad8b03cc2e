"""The lab base's own greedy answers to training prompts, appended token by token in the lab's chat form."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.example import Example
from specbench_ss.decoding.target import Target
from specbench_ss.training.text.answering import Answering, own_answers


class LabTalk:
    """A generated example whose answers the model gives; one that did not end within the limit ends it."""

    def __init__(self, example: Example, backend: Any) -> None:
        self.example, self.backend = example, backend
        self.ids: list[int] = []
        self.turn = 0
        self.going = True

    def prompt(self) -> list[int] | None:
        """The conversation up to the marker that opens the next answer."""
        if not self.going or self.turn == len(self.example.turns):
            return None
        text = f"<|user|>{self.example.turns[self.turn]}<|assistant|>"
        start = "" if self.turn else "<|bos|>"
        self.ids = self.ids + self.backend.encode(start + text, add_special_tokens=False).ids
        return self.ids

    def answered(self, answer: list[int], ended: bool) -> None:
        """Append the answer."""
        self.ids = self.ids + answer
        self.turn, self.going = self.turn + 1, ended


def own_conversations(
    target: Target, examples: Iterator[Example], count: int, batch: int = 128, limit: int = 192
) -> Iterator[list[NDArray[np.int32]]]:
    """Conversations in which the model gave every answer, as ids; one list a batch, `count` conversations in all."""
    pool = sorted(islice(examples, count), key=lambda e: (e.category, len(e.turns[0])))
    talks = [LabTalk(example, target.tokenizer.backend_tokenizer) for example in pool]
    for _, answered in own_answers(target, talks, Answering((target.tokenizer.eos_token_id,), limit), batch):
        yield [np.asarray(talk.ids, np.int32) for talk in answered]
