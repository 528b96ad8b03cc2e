"""Of decoders that the kit does not make (trained or loaded ones, biased rules): greedy output match, and how
biased."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from scipy.stats import chisquare

from specbench_ss.engine.decoder import Decoder, Generation
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams

Joint = dict[tuple[int, ...], float]
PROMPTS = ([5, 6, 7, 8, 9, 10, 11], [3], [20, 4, 4, 4, 30, 12, 9, 8, 50, 41, 33, 22, 17, 60, 9])


def assert_greedy_same(decoder: Decoder, reference: Decoder, limit: int = 30) -> list[Generation]:
    """Token for token; returns the decoder's answers."""
    found = []
    for prompt in PROMPTS:
        found.append(generate(decoder, prompt, StopParams(limit), SamplingParams()))
        assert found[-1].tokens == generate(reference, prompt, StopParams(limit), SamplingParams()).tokens
    return found


def exact_joint(decoder: Decoder, prompt: Sequence[int], sampling: SamplingParams, length: int = 3) -> Joint:
    """The model's own distribution of the next tokens."""
    joint: Joint = {(): 1.0}
    for _ in range(length):
        joint = {
            (*tokens, x): mass * p_x
            for tokens, mass in joint.items()
            for x, p_x in enumerate(sampling.probs(decoder.next_logits(prompt, tokens)).tolist())
            if p_x > 0
        }
    return joint


def p_value(decoder: Decoder, prompt: Sequence[int], sampling: SamplingParams, n: int = 500, length: int = 2) -> float:
    """Of a chi-square of the joint of the first tokens against the model's own; the seeds are fixed."""
    joint = exact_joint(decoder, prompt, sampling, length)
    draws = (generate(decoder, prompt, StopParams(length), replace(sampling, seed=i)).tokens for i in range(n))
    seen = Counter(map(tuple, draws))
    assert set(seen) <= set(joint)
    common = [t for t in joint if joint[t] * n >= 5]
    expected, observed = [joint[t] * n for t in common], [float(seen[t]) for t in common]
    if n - sum(expected) > 1:
        expected.append(n - sum(expected))
        observed.append(n - sum(observed))
    scale = sum(observed) / sum(expected)
    return float(chisquare(observed, [e * scale for e in expected]).pvalue)
