"""A model whose layers lie on two devices answers as the same model on one, with every method.

The second device is the tests' own: its tensors hold numbers, and whatever mixes it with the first raises.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from specbench_ss import registry
from specbench_ss.decoding.loop import Limits, decode
from specbench_ss.decoding.sampling import Sampling
from specbench_ss.decoding.target import Target
from specbench_ss.testing.tiny import tiny_model, tiny_tokenizer
from tests.second_device import second_device, send_layers

WORDS = 61
PROMPT = [20, 4, 4, 4, 30, 12, 9, 8, 50, 41, 33, 22, 17, 60, 9]
METHODS = registry.names(registry.METHODS)
DIVISIONS = {"half": (2, 3), "all": (0, 1, 2, 3)}  # layers on the second device


@pytest.fixture(autouse=True)
def second(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in METHODS:
        registry.method_class(name)  # imported, so that they are given the second device's way of moving too
    with second_device(monkeypatch):
        yield


def divided(kind: str, there: Sequence[int]) -> Target:
    model = tiny_model(kind, vocab=WORDS)
    send_layers(model, there)
    target = Target(model, tiny_tokenizer(WORDS), "tiny")
    assert target.layers_on[torch.device("cpu")] == [i for i in range(4) if i not in there]
    return target


def whole(kind: str) -> Target:
    return Target(tiny_model(kind, vocab=WORDS), tiny_tokenizer(WORDS), "tiny")


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("division", DIVISIONS)
def test_division_changes_no_token(name: str, division: str) -> None:
    one, two = (registry.method_class(name).examples(t) for t in (whole("llama"), divided("llama", DIVISIONS[division])))
    for label, make in one.items():
        for sampling in (Sampling(), Sampling(temperature=0.8, seed=3)):
            answers = [decode(made(), PROMPT, Limits(16), sampling) for made in (make, two[label])]
            assert answers[0].tokens == answers[1].tokens, (label, sampling)
            steps = [[(step.nodes, step.verified) for step in answer.steps] for answer in answers]
            assert steps[0] == steps[1], (label, sampling)
