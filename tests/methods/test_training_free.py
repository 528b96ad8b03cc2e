"""Lookahead, recycling and suffix, in all their shapes: drafts are accepted, up to the edges of the context."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from specbench_ss.engine.decoder import Decoder
from specbench_ss.engine.generate import Limits, generate
from specbench_ss.engine.sampling import Sampling
from specbench_ss.engine.target import Target
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.methods.lookahead import Lookahead
from specbench_ss.methods.recycling import Recycling
from specbench_ss.methods.suffix import Suffix
from tests.tiny import SOME, tiny_model

METHODS: tuple[type[Decoder], ...] = (Lookahead, Recycling, Suffix)
CONTEXT = 128
PROMPTS = ([5, 6, 7, 8, 9, 10, 11], [3], [20, 4, 4, 30, 12, 9] * 4, [7, 9] * 60, [8] * (CONTEXT - 1))
REPEATING = [3, 4, 5, 6, 3, 4, 5, 3, 4, 6, 3, 4]


def shapes(target: Target) -> Iterator[tuple[str, Decoder]]:
    for method in METHODS:
        for label, make in method.examples(target).items():
            yield f"{method.name}, {label}", make()


@pytest.mark.parametrize("kind", SOME)
def test_greedy_equals_autoregressive(kind: str) -> None:
    target = Target(tiny_model(kind))
    plain = Autoregressive(target)
    expected = [generate(plain, p, Limits(25), Sampling()).tokens for p in PROMPTS]
    for shape, decoder in shapes(target):
        found = [generate(decoder, p, Limits(25), Sampling()) for p in PROMPTS]
        assert [f.tokens for f in found] == expected, shape
        assert shape == "recycling, chain" or sum(s.accepted for f in found for s in f.steps) > 5, shape
