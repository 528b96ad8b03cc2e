"""A model's own answers to prompts: what drafters learn from, since they have to guess what the model will say.

Answers are made in batches by Hugging Face's generate. This module knows no drafter, and conversations only as `Talk`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch


class Talk(Protocol):
    """A conversation in which the model gives every answer."""

    def prompt(self) -> list[int] | None:
        """Return token ids that end where the next answer begins; None where there is nothing more to answer."""

    def answered(self, answer: list[int], ended: bool) -> None:
        """Take the answer, its end token included. ended: whether there is an end token."""


@dataclass(frozen=True, slots=True)
class Answering:
    """How answers are made: at most `limit` tokens each; temperature 0 is greedy, any other is plain sampling.

    ends: token ids that end an answer. pad: the id that fills up the shorter prompts of a batch; it is masked out.
    """

    ends: Collection[int]
    pad: int
    limit: int = 192
    temperature: float = 0.0
    seed: int = 0


T = TypeVar("T", bound=Talk)


def own_answers(
    model: Any, talks: Sequence[T], how: Answering, batch: int = 128, skip: Collection[int] = ()
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
        _converse(model, chosen, how, (how.seed, start))
        yield start, list(chosen)


def _converse(model: Any, talks: Sequence[Talk], how: Answering, seed: tuple[int, ...]) -> None:
    turn = 0
    while going := [(talk, prompt) for talk in talks if (prompt := talk.prompt()) is not None]:
        answers = answer_batch(model, [prompt for _, prompt in going], how, (*seed, turn))
        for (talk, _), answer in zip(going, answers, strict=True):
            talk.answered(answer, bool(answer) and answer[-1] in how.ends)
        turn += 1


@torch.inference_mode()
def answer_batch(
    model: Any, prompts: Sequence[Sequence[int]], how: Answering, seed: tuple[int, ...] = (0,)
) -> list[list[int]]:
    """Return answers (end token included) to prompts of any length, in one left-padded batch.

    seed: for temperature > 0.
    """
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), how.pad)
    seen = torch.zeros((len(prompts), longest), dtype=torch.long)
    for i, p in enumerate(prompts):
        ids[i, longest - len(p) :] = torch.tensor(p)
        seen[i, longest - len(p) :] = 1
    sampled: dict[str, Any] = {"do_sample": False}
    if how.temperature > 0:
        sampled = {"do_sample": True, "temperature": how.temperature, "top_k": 0, "top_p": 1.0}
    with _own_distribution(model), _seeded(seed, model.device):
        out = model.generate(
            input_ids=ids.to(model.device), attention_mask=seen.to(model.device), max_new_tokens=how.limit,
            eos_token_id=sorted(how.ends), pad_token_id=how.pad, **sampled,
        )  # fmt: skip
    return [_until(row, how.ends) for row in out[:, longest:].tolist()]


def _until(row: list[int], ends: Collection[int]) -> list[int]:
    stop = next((i for i, token in enumerate(row, start=1) if token in ends), len(row))
    return row[:stop]


@contextmanager
def _own_distribution(model: Any) -> Iterator[None]:
    """Switch off the penalties and cut-offs of the model's generation config: the harness decodes without them."""
    from transformers import GenerationConfig

    kept = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = kept


@contextmanager
def _seeded(seed: tuple[int, ...], device: torch.device) -> Iterator[None]:
    """Start torch's random numbers at this seed, and restore them afterwards as if nothing had been drawn."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0] >> 1))
        yield
