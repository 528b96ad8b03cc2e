"""A model's own answers to prompts: what drafters learn from, since they have to guess what the model will say.

Answers are made in batches. This module knows no drafter, and conversations only as `Talk`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import torch

from specbench_ss.training.text.batched_decoding import decode_batch

if TYPE_CHECKING:
    from specbench_ss.engine.target import Target


class Talk(Protocol):
    """A conversation in which the model gives every answer."""

    def prompt(self) -> list[int] | None:
        """Return token ids that end where the next answer begins; None where there is nothing more to answer."""

    def answered(self, answer: list[int], ended: bool) -> None:
        """Take the answer, its end token included. ended: whether there is an end token."""


@dataclass(frozen=True, slots=True)
class Answering:
    """How answers are made: at most `limit` tokens each; temperature 0 is greedy, any other is plain sampling.

    ends: token ids that end an answer.
    """

    ends: Collection[int]
    limit: int = 192
    temperature: float = 0.0
    seed: int = 0


T = TypeVar("T", bound=Talk)


def own_answers(
    target: Target, talks: Sequence[T], how: Answering, batch: int = 128, skip: Collection[int] = ()
) -> Iterator[tuple[int, list[T]]]:
    """Answer every talk to its end, and yield (place, talks) for one batch after the other.

    A batch is the `batch` talks from `place` on, so similar talks should be neighbours: their answers end together.
    Batches come in random order; those whose place is in `skip` are left out. What a batch says depends only on the
    seed and its place.
    """
    for start in np.random.default_rng(0).permutation(range(0, len(talks), batch)).tolist():
        if start in skip:
            continue
        chosen = talks[start : start + batch]
        _converse(target, chosen, how, (how.seed, start))
        yield start, list(chosen)


def _converse(target: Target, talks: Sequence[Talk], how: Answering, seed: tuple[int, ...]) -> None:
    turn = 0
    while going := [(talk, prompt) for talk in talks if (prompt := talk.prompt()) is not None]:
        answers = answer_batch(target, [prompt for _, prompt in going], how, (*seed, turn))
        for (talk, _), answer in zip(going, answers, strict=True):
            talk.answered(answer, bool(answer) and answer[-1] in how.ends)
        turn += 1


def answer_batch(
    target: Target, prompts: Sequence[Sequence[int]], how: Answering, seed: tuple[int, ...] = (0,)
) -> list[list[int]]:
    """Return answers (end token included) to prompts of any length, made in one batch.

    seed: for temperature > 0.
    """
    start = int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0] >> 1)
    rng = torch.Generator(target.device).manual_seed(start)
    return decode_batch(target, prompts, how.limit, how.ends, how.temperature, rng)
