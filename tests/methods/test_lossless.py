"""Losslessness: greedy output equals autoregressive decoding; at T>0 the distribution is the target's own."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from scipy.stats import chisquare

from specbench_ss.generate import Limits, generate
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.sampling import Sampling
from specbench_ss.target import Target
from tests.methods.decoders import VARIANTS
from tests.tiny import ARCHITECTURES, tiny_model

PROMPTS = ([5, 6, 7, 8, 9, 10, 11], [3], [20, 4, 4, 4, 30, 12, 9, 8, 50, 41, 33, 22, 17, 60, 9])


@pytest.fixture(scope="module", params=ARCHITECTURES)
def target(request: pytest.FixtureRequest) -> Target:
    return Target(tiny_model(request.param))


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_equals_autoregressive(target: Target, name: str) -> None:
    decoder, reference = VARIANTS[name](target), Autoregressive(target)
    for prompt in PROMPTS:
        assert (
            generate(decoder, prompt, Limits(40), Sampling()).tokens
            == generate(reference, prompt, Limits(40), Sampling()).tokens
        )


def test_autoregressive_equals_transformers(target: Target) -> None:
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        theirs = target.model.generate(ids, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)
        ours = generate(Autoregressive(target), prompt, Limits(40), Sampling()).tokens
        assert ours == theirs[0, len(prompt) :].tolist()


def test_no_state_from_the_last_prompt(target: Target) -> None:
    for make in VARIANTS.values():
        decoder = make(target)
        first = [generate(decoder, p, Limits(12), Sampling(0.9, seed=4)).tokens for p in PROMPTS]
        again = [generate(decoder, p, Limits(12), Sampling(0.9, seed=4)).tokens for p in reversed(PROMPTS)]
        assert first == again[::-1]


SMALL = 7
SAMPLINGS = (Sampling(1.0), Sampling(0.7, top_p=0.8), Sampling(1.3, top_k=3))
SAMPLED = ("ar", "medusa", "ss", "ss-unpruned", "ss-chain", "ss-best-nodes")


def test_acceptance_is_counted_against_what_was_drafted() -> None:
    """Pruning takes nodes away from verification, not from the count of what was drafted."""
    steps = generate(VARIANTS["ss-one-kept"](Target(tiny_model("llama"))), [5, 6, 7], Limits(20), Sampling()).steps
    assert {(step.verified, step.depth, step.nodes) for step in steps} == {(0, 3, 14)}


def exact_joint(target: Target, prompt: list[int], sampling: Sampling) -> dict[tuple[int, ...], float]:
    """The target's own distribution of the next three tokens."""
    joint: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        following = {}
        for tokens, mass in joint.items():
            p = sampling.probs(target.next_logits([*prompt, *tokens]))
            following.update({(*tokens, x): mass * float(p[x]) for x in range(len(p)) if p[x] > 0})
        joint = following
    return joint


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["plain", "top-p", "top-k"])
@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_distribution_is_exact(name: str, sampling: Sampling) -> None:
    """Chi-square on single tokens and on the joint of three; fixed seeds, so a pass stays a pass."""
    target = Target(tiny_model("llama", vocab=SMALL, layers=2))
    decoder, prompt, n = VARIANTS[name](target), [3, 4, 5], 1000
    draws = [
        tuple(
            generate(
                decoder, prompt, Limits(3), Sampling(sampling.temperature, sampling.top_p, sampling.top_k, i)
            ).tokens
        )
        for i in range(n)
    ]
    joint = exact_joint(target, prompt, sampling)
    assert set(draws) <= set(joint)
    for length in (2, 3):
        expected: Counter[tuple[int, ...]] = Counter()
        for tokens, mass in joint.items():
            expected[tokens[:length]] += mass * n  # type: ignore[assignment]
        seen = Counter(d[:length] for d in draws)
        common = [t for t in expected if expected[t] >= 5]
        rest_expected, rest_seen = n - sum(expected[t] for t in common), n - sum(seen[t] for t in common)
        f_exp = [float(expected[t]) for t in common] + ([rest_expected] if rest_expected > 1 else [])
        f_obs = [float(seen[t]) for t in common] + ([float(rest_seen)] if rest_expected > 1 else [])
        scale = sum(f_obs) / sum(f_exp)
        assert chisquare(f_obs, [e * scale for e in f_exp]).pvalue > 1e-3
