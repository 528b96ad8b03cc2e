"""Requests answered at the same time get the answers that they get alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from specbench_ss import registry
from specbench_ss.decoding.decoder import Decoder
from specbench_ss.decoding.loop import Limits, generate
from specbench_ss.decoding.sampling import Sampling
from specbench_ss.decoding.target import Target
from specbench_ss.decoding.together import (
    Answered,
    Asked,
    decode_together,
    next_step,
    side_by_side,
    wait_for,
)
from specbench_ss.errors import UserError
from specbench_ss.testing.tiny import tiny_target
from tests.tiny import WITHOUT_WINDOW

PROMPTS = ([5, 6, 7, 8, 9, 10], [3], [8, 4, 4, 4, 3, 9, 9, 8, 5, 4, 3, 2], [2, 2, 3], [7, 8, 9, 10, 7, 8, 9, 10, 7, 8])
METHODS = [name for name in registry.names(registry.METHODS)]


def together(decoder: Decoder, asked: list[Asked], most: int) -> list[Answered]:
    found: dict[int, Answered] = {}
    decode_together(decoder, asked, most, found.__setitem__)
    return [found[i] for i in range(len(asked))]


def examples() -> list[tuple[str, str]]:
    target = tiny_target("llama")
    return [(name, shape) for name in METHODS for shape in registry.method_class(name).examples(target)]


def made(kind: str, name: str, shape: str) -> Callable[[], Decoder]:
    return registry.method_class(name).examples(tiny_target(kind))[shape]


@pytest.mark.parametrize(("name", "shape"), examples())
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_do_not_depend_on_neighbours(name: str, shape: str, temperature: float) -> None:
    """In float32: the same tokens, steps and counts, alone and beside others that come and go."""
    make = made("llama", name, shape)
    asked = [
        Asked(prompt, Limits(9 + 4 * i, frozenset({1})), Sampling(temperature, seed=i))
        for i, prompt in enumerate(PROMPTS)
    ]
    decoder = make()
    if decoder.remembers:
        with pytest.raises(UserError, match="remembers earlier prompts"):
            together(decoder, asked, 3)
        return
    found = together(decoder, asked, 3)
    for one, answer in zip(asked, found, strict=True):
        assert answer.error is None, answer.error
        alone = generate(make(), one.prompt, one.limits, one.sampling)
        assert answer.generation is not None
        assert answer.generation.tokens == alone.tokens
        assert [(s.nodes, s.accepted) for s in answer.generation.steps] == [(s.nodes, s.accepted) for s in alone.steps]
        assert 0 < answer.first_s <= answer.wall_s
