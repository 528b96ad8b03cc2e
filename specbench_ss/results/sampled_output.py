"""Test of a method's sampled tokens against the target's distribution.

The evidence is that of `runs/betting_score.py`. docs/design/sampled-output.md has the alternatives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from specbench_ss.runs.betting_score import BIASED, bound, pool, too_coarse
from specbench_ss.runs.rows import Run, SampledTokens

Bias = Literal["biased", "no bias found", "too few tokens", "not testable"]

CONTROL = 1e-3  # the largest p of its reference at which a method is not testable
ENOUGH = 600.0  # variance of the log-likelihood: sampling at two thirds of the temperature is found with p = 0.99
ENOUGH_OFFERED = 150.0  # variance of the accepted tokens: accepting at e times the odds is found with p = 0.99


@dataclass(frozen=True, slots=True)
class SamplingTest:
    """Result of the sampling test of one method.

    tokens: tokens that were compared. p: bound on the probability of such evidence without bias. surplus: mean of log
    p(x) minus its expectation, in nats per token. outside: tokens that the sampling filters exclude. offered: tokens
    for which something was drafted. accepted: of them, drafted ones. expected: as many as should have been accepted.
    reason: why the method is not testable, where it is not; else ''.
    """

    bias: Bias
    tokens: int
    p: float
    surplus: float
    outside: int
    offered: int
    accepted: int
    expected: float
    reason: str = ""

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
            reason = _why_not(run, label, of, control)
            bias = (
                "not testable"
                if reason
                else _bias(of, p[label], drafts=any(row.drafted for row in run.rows if row.method == label and row.ok))
            )
            found[label] = SamplingTest(bias, of.tokens, p[label], of.surplus / of.tokens, *counts, reason)
    return found


def bias_found(run: Run, label: str, tests: Mapping[str, SamplingTest]) -> list[str]:
    """Report that a method that promises its reference's distribution draws from another one."""
    test = tests.get(label)
    if test is None or test.bias != "biased" or not _entry(run, label)["lossless"] or label == run.baseline:
        return []
    return [f"biased: {described(test)}"]


def unsuited_control(run: Run, label: str, test: SamplingTest | None) -> list[str]:
    """Report that methods cannot be tested: rounding, or the baseline fails the test itself."""
    held = [m["label"] for m in run.manifest["methods"] if m.get("reference", run.baseline) == label != m["label"]]
    if test is None or not held or not (test.reason or test.p < CONTROL):
        return []
    return [f"untestable: {test.reason or f'its own {described(test)}'}; not tested: {', '.join(held)}"]


def described(test: SamplingTest) -> str:
    """Describe the evidence: '1,204 sampled tokens, p < 1e-06, 0.21 nats a token too probable'."""
    p = f"p < {BIASED:g}" if test.p < BIASED else f"p = {test.p:.2g}"
    side = "probable" if test.surplus > 0 else "improbable"
    outside = f", {test.outside:,} of them excluded by the sampling filters" if test.outside else ""
    drafted = f", {test.accepted:,} drafted ones for {test.expected:,.0f} expected" if test.offered else ""
    return f"{test.tokens:,} sampled tokens, {p}, {abs(test.surplus):.3f} nats a token too {side}{drafted}{outside}"


def _controls(run: Run, label: str) -> set[str]:
    """Return the label of the method's reference, unless it is the method itself."""
    return {_reference(run, label)} - {label}


def _reference(run: Run, label: str) -> str:
    return str(_entry(run, label).get("reference", run.baseline))


def _entry(run: Run, label: str) -> dict[str, Any]:
    return next(method for method in run.manifest["methods"] if method["label"] == label)


def _why_not(run: Run, label: str, of: SampledTokens, control: float) -> str:
    """Return why the tokens of a method cannot be tested; '' where they can."""
    config = run.manifest["config"]
    if too_coarse(of, filtered=bool(config["top_k"]) or config["top_p"] < 1):
        return f"rounding of {run.manifest['model']['dtype']} at temperature {config['temperature']:g}"
    return f"{_reference(run, label)} fails the test itself" if control < CONTROL else ""


def _bias(of: SampledTokens, p: float, drafts: bool) -> Bias:
    """Return the verdict on tokens that can be tested. drafts: the method drafted, so acceptance has to be tested."""
    if p < BIASED:
        return "biased"
    enough = of.variance >= ENOUGH and (not drafts or of.accept_variance >= ENOUGH_OFFERED)
    return "no bias found" if enough else "too few tokens"
