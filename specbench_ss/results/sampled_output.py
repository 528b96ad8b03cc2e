"""Test of a method's sampled tokens against the target's distribution.

The evidence is a betting score: a product of likelihood ratios, whose mean is at most 1 where tokens are drawn from the
target's distribution (Ville 1939; Shafer, JRSS A 184, 2021). So the probability that it ever exceeds 1 / p is at most
p, after any number of tokens and whatever ended the answers. docs/design/sampled-output.md has the alternatives.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from operator import add
from typing import Any, Literal

from specbench_ss.runs.rows import PIT_BINS, Run, SampledTokens

Bias = Literal["biased", "no bias found", "too few tokens", "not testable"]

BIASED = 1e-6  # the largest p at which a method is called biased; that of one false alarm in a million methods
CONTROL = 1e-3  # the largest p of its reference at which a method is not testable
ENOUGH = 300.0  # variance of the log-likelihood: sampling at two thirds of the temperature is found with p = 0.99
ENOUGH_OFFERED = 75.0  # variance of the accepted tokens: accepting at e times the odds is found with p = 0.99
ROUNDING = 1e-4  # share of tokens that a filter may exclude by more than the rounding that is allowed for
PRIOR = (*[8.0] * PIT_BINS, 0.1)  # Dirichlet: how unequal the alternatives' histograms are


@dataclass(frozen=True, slots=True)
class SamplingTest:
    """How the sampled tokens of a method compare with the target's distribution.

    tokens: tokens that were compared. p: bound on the probability of such evidence without bias. surplus: mean of log
    p(x) minus its expectation, in nats per token. outside: tokens that the sampling filters exclude. offered: tokens
    for which something was drafted. accepted: of them, drafted ones. expected: as many as should have been accepted.
    """

    bias: Bias
    tokens: int
    p: float
    surplus: float
    outside: int
    offered: int
    accepted: int
    expected: float

    def columns(self) -> dict[str, Any]:
        """Return the columns of the summary."""
        named = asdict(self)
        return {"bias": named.pop("bias"), **{f"bias_{name}": value for name, value in named.items()}}


def sampling_tests(run: Run) -> dict[str, SamplingTest]:
    """Return the test of each method whose sampled tokens were compared, over all tasks."""
    pooled = {label: pool(v.sampled for v in run.sameness if v.method == label and v.sampled) for label in run.labels}
    p = {label: bound(of) for label, of in pooled.items()}
    found = {}
    for label, of in pooled.items():
        if of.tokens:
            control = min((p[other] for other in _controls(run, label)), default=1.0)
            counts = (of.pit_counts[-1], of.offered, of.accepted, of.expected)
            found[label] = SamplingTest(
                _bias(of, p[label], control), of.tokens, p[label], of.surplus / of.tokens, *counts
            )
    return found


def bias_found(run: Run, label: str, tests: Mapping[str, SamplingTest]) -> list[str]:
    """Report that a method that promises its reference's distribution draws from another one."""
    test = tests.get(label)
    if test is None or test.bias != "biased" or not _entry(run, label)["lossless"] or label == run.baseline:
        return []
    return [f"biased: {described(test)}"]


def unsuited_control(run: Run, label: str, test: SamplingTest | None) -> list[str]:
    """Report that plain decoding fails the test itself, so that other methods cannot be tested by it."""
    held = [m["label"] for m in run.manifest["methods"] if m.get("reference", run.baseline) == label != m["label"]]
    if test is None or test.p >= CONTROL or not held:
        return []
    return [f"untestable: its own {described(test)}; not tested: {', '.join(held)}"]


def described(test: SamplingTest) -> str:
    """Return the evidence in words: '1,204 sampled tokens, p < 1e-06, 0.21 nats a token too probable'."""
    p = f"p < {BIASED:g}" if test.p < BIASED else f"p = {test.p:.2g}"
    side = "probable" if test.surplus > 0 else "improbable"
    outside = f", {test.outside:,} of them excluded by the sampling filters" if test.outside else ""
    drafted = f", {test.accepted:,} drafted ones for {test.expected:,.0f} expected" if test.offered else ""
    return f"{test.tokens:,} sampled tokens, {p}, {abs(test.surplus):.3f} nats a token too {side}{drafted}{outside}"


def pool(answers: Iterable[SampledTokens]) -> SampledTokens:
    """Return the sums over all these answers."""
    return reduce(add, answers, SampledTokens())


def bound(pooled: SampledTokens) -> float:
    """Return the bound on the probability of this evidence, or more, where the tokens are not biased."""
    return min(1.0, math.exp(-evidence(pooled)))


def evidence(pooled: SampledTokens) -> float:
    """Return the logarithm of the betting score: the mean of those of likelihoods, histogram and acceptance."""
    parts = (_log_mean(pooled.log_ratios), _histogram(pooled.pit_counts), _log_mean(pooled.accept_ratios))
    return _log_mean(parts)


def _histogram(counts: Sequence[int]) -> float:
    """Return the log likelihood ratio of a Dirichlet mixture of histograms to the uniform one."""
    n, total = sum(counts), sum(PRIOR)
    shares = (*[1 / PIT_BINS] * PIT_BINS, ROUNDING)
    terms = (
        math.lgamma(a + k) - math.lgamma(a) - k * math.log(share)
        for a, k, share in zip(PRIOR, counts, shares, strict=True)
    )
    return math.fsum(terms) - math.lgamma(total + n) + math.lgamma(total)


def _log_mean(logs: Sequence[float]) -> float:
    largest = max(logs)
    return largest + math.log(math.fsum(math.exp(x - largest) for x in logs) / len(logs))


def _controls(run: Run, label: str) -> set[str]:
    """Return the plain decodings whose own tokens show whether the test works: the method's reference, if another."""
    return {_entry(run, label).get("reference", run.baseline)} - {label}


def _entry(run: Run, label: str) -> dict[str, Any]:
    return next(method for method in run.manifest["methods"] if method["label"] == label)


def _bias(of: SampledTokens, p: float, control: float) -> Bias:
    if control < CONTROL:
        return "not testable"
    if p < BIASED:
        return "biased"
    enough = of.variance >= ENOUGH and (not of.offered or of.accept_variance >= ENOUGH_OFFERED)
    return "no bias found" if enough else "too few tokens"
