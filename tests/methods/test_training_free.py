"""Lookahead, recycling and suffix, in all their shapes: greedy sameness, exact sampling, the edges of the context."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from scipy.stats import chisquare

from specbench_ss.decoding.decoder import Decoder
from specbench_ss.decoding.loop import Limits, generate
from specbench_ss.decoding.sampling import Sampling
from specbench_ss.decoding.target import Target
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.methods.lookahead import Lookahead
from specbench_ss.methods.recycling import Recycling
from specbench_ss.methods.suffix.decoding import Suffix
from tests.methods.exactness import exact_joint
from tests.tiny import ARCHITECTURES, tiny_model

METHODS: tuple[type[Decoder], ...] = (Lookahead, Recycling, Suffix)
CONTEXT = 128
PROMPTS = ([5, 6, 7, 8, 9, 10, 11], [3], [20, 4, 4, 30, 12, 9] * 4, [7, 9] * 60, [8] * (CONTEXT - 1))
REPEATING = [3, 4, 5, 6, 3, 4, 5, 3, 4, 6, 3, 4]


def shapes(target: Target) -> Iterator[tuple[str, Decoder]]:
    for method in METHODS:
        for label, make in method.examples(target).items():
            yield f"{method.name}, {label}", make()


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_greedy_equals_autoregressive(kind: str) -> None:
    target = Target(tiny_model(kind))
    plain = Autoregressive(target)
    expected = [generate(plain, p, Limits(25), Sampling()).tokens for p in PROMPTS]
    for shape, decoder in shapes(target):
        found = [generate(decoder, p, Limits(25), Sampling()) for p in PROMPTS]
        assert [f.tokens for f in found] == expected, shape
        assert shape == "recycling, chain" or sum(s.accepted for f in found for s in f.steps) > 5, shape


SAMPLED = {
    "lookahead": lambda t: Lookahead(t, Lookahead.Options(3, 3, 3, pool_from_prompt=True)),
    "lookahead's window alone": lambda t: Lookahead(t, Lookahead.Options(2, 9, 3)),
    "recycling": lambda t: Recycling(t, Recycling.Options(k=4, prompt=True)),
    "suffix": lambda t: Suffix(t, Suffix.Options(offset=6, min_prob=0.01)),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_distribution_is_exact(name: str) -> None:
    target, sampling = Target(tiny_model("opt", vocab=7, layers=2)), Sampling(1.2, top_p=0.9)
    decoder, n = SAMPLED[name](target), 500
    found = [generate(decoder, REPEATING, Limits(3), replace(sampling, seed=i)) for i in range(n)]
    steps = [s for f in found for s in f.steps]
    assert sum(s.nodes > 0 for s in steps) > n / 4 and sum(s.accepted for s in steps) > 20
    joint = exact_joint(Autoregressive(target), REPEATING, sampling)
    seen = Counter(tuple(f.tokens) for f in found)
    assert set(seen) <= set(joint)
    common = [t for t in joint if joint[t] * n >= 5]
    expected, observed = [joint[t] * n for t in common], [float(seen[t]) for t in common]
    expected.append(n - sum(expected))
    observed.append(n - sum(observed))
    assert chisquare(observed, expected).pvalue > 1e-3


def test_nothing_is_left_of_the_last_prompt() -> None:
    """Steps too, unless the method says that it remembers."""
    target = Target(tiny_model("qwen3"))
    for shape, decoder in shapes(target):
        if not decoder.remembers:
            first = [generate(decoder, p, Limits(12), Sampling(0.9, seed=4)) for p in PROMPTS]
            again = [generate(decoder, p, Limits(12), Sampling(0.9, seed=4)) for p in reversed(PROMPTS)][::-1]
            for one, other in zip(first, again, strict=True):
                assert one.tokens == other.tokens, shape
                assert [s.nodes for s in one.steps] == [s.nodes for s in other.steps], shape


@pytest.mark.parametrize("method", METHODS, ids=lambda method: str(method.name))
def test_no_value_that_tuning_may_try_changes_the_greedy_output(method: type[Decoder]) -> None:
    target = Target(tiny_model("llama"))
    decoder = method.load(target, method.Options())
    expected = generate(Autoregressive(target), PROMPTS[2], Limits(25), Sampling()).tokens
    for option, values in decoder.tunable().items():
        for value in values:
            other = decoder.variant(replace(decoder.options, **{option: value}))
            assert generate(other, PROMPTS[2], Limits(25), Sampling()).tokens == expected
