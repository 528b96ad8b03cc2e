"""Quality: scores, paired differences, sampled output against the target's distribution.

The test of sampled tokens is the betting score of `stats/betting.py`.

Non-inferiority is judged as in clinical trials: by the interval of the paired difference against a margin stated
beforehand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from scipy.special import betaincinv

from specbench_ss.errors import UserError
from specbench_ss.options import checked_value
from specbench_ss.results.findings import Finding
from specbench_ss.runs.records import Key, Run, SampleRecord
from specbench_ss.stats.betting import BIASED, SampledTokens, bound, pool, too_coarse
from specbench_ss.stats.intervals import Floats, Interval, Strata, mean_interval, strata_of
from specbench_ss.suite import Question

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
    tail: of a server, tokens that are not among the most probable ones. tail_expected: as many as there may be.
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
    tail: int
    tail_expected: float
    reason: str = ""

    def columns(self) -> dict[str, Any]:
        """Return the columns of the summary."""
        named = asdict(self)
        return {"bias": named.pop("bias"), **{f"bias_{name}": value for name, value in named.items()}}


def sampling_tests(run: Run) -> dict[str, SamplingTest]:
    """Return the test of each method whose sampled tokens were compared, over all tasks."""
    pooled = {
        label: pool(v.sampled for v in run.output_match if v.method == label and v.sampled) for label in run.labels
    }
    p = {label: bound(of) for label, of in pooled.items()}
    found = {}
    for label, of in pooled.items():
        if of.tokens or of.tail:
            control = run.reference(label)
            reason = _why_not(run, of, control, 1.0 if control == label else p[control])
            drafts = not run.served and any(row.draft_nodes for row in run.of(label) if row.ok)
            bias: Bias = "not testable" if reason else _bias(of, p[label], drafts)
            counts = (of.pit_counts[-1], of.offered, of.accepted, of.expected, of.tail, of.tail_expected)
            tokens = of.tokens + of.tail
            found[label] = SamplingTest(bias, tokens, p[label], of.surplus / max(of.tokens, 1), *counts, reason)
    return found


def bias_found(run: Run, label: str, test: SamplingTest | None) -> list[Finding]:
    """Report that a method that promises its reference's distribution draws from another one."""
    if test is None or test.bias != "biased" or label == run.baseline:
        return []
    return [Finding("biased", described(test))] if run.entry(label)["lossless"] else []


def unsuited_control(run: Run, label: str, test: SamplingTest | None) -> list[Finding]:
    """Report that methods cannot be tested: rounding, or the baseline fails the test itself."""
    tested = [other for other in run.labels if run.reference(other) == label != other]
    if test is None or not tested or not (test.reason or test.p < CONTROL):
        return []
    text = f"{test.reason or f'its own {described(test)}'}; not tested: {', '.join(tested)}"
    return [Finding("untestable", text)]


def described(test: SamplingTest) -> str:
    """Describe the evidence: '1,204 sampled tokens, p < 1e-06, 0.21 nats a token too probable'."""
    p = f"p < {BIASED:g}" if test.p < BIASED else f"p = {test.p:.2g}"
    side = "probable" if test.surplus > 0 else "improbable"
    outside = f", {test.outside:,} of them excluded by the sampling filters" if test.outside else ""
    drafted = f", {test.accepted:,} drafted ones for {test.expected:,.0f} expected" if test.offered else ""
    rare = (
        f", {test.tail:,} improbable ones for at most {test.tail_expected:,.1f} expected" if test.tail_expected else ""
    )
    surplus = f"{abs(test.surplus):.3f} nats a token too {side}"
    return f"{test.tokens:,} sampled tokens, {p}, {surplus}{drafted}{outside}{rare}"


def _why_not(run: Run, of: SampledTokens, control: str, p_of_control: float) -> str:
    """Return why the tokens of a method cannot be tested; '' where they can."""
    config = run.manifest["config"]
    if too_coarse(of, filtered=bool(config["top_k"]) or config["top_p"] < 1):
        return f"rounding of {run.manifest['model']['dtype']} at temperature {config['temperature']:g}"
    return f"{control} fails the test itself" if p_of_control < CONTROL else ""


def _bias(of: SampledTokens, p: float, drafts: bool) -> Bias:
    """Return the verdict on tokens that can be tested. drafts: the method drafted, so acceptance has to be tested."""
    if p < BIASED:
        return "biased"
    enough = of.variance >= ENOUGH and (not drafts or of.accept_variance >= ENOUGH_OFFERED)
    return "no bias found" if enough else "too few tokens"


MARGIN = 0.02  # of a score from 0 to 1: how much worse still counts as no worse
CHANGED = 0.01  # of a score from 0 to 1: from here on the outcome of a question is another one
FEW_CHANGED = 5  # questions: of fewer that all go one way, no sign test is significant (0.5 ** 4 > 0.05)
LEVEL = 0.95  # one-sided, of the bound where few changed
NonInferiority = Literal["non-inferior", "inferior", "not shown"]


def checked_margin(margin: float) -> float:
    """Return the margin. Raises UserError where it is no number above 0 and up to 1."""
    value = float(checked_value("quality_margin", float, margin))
    if not 0 < value <= 1:
        raise UserError(f"the margin of quality must be above 0 and at most 1, not {value:g}")
    return value


def measures(questions: Iterable[Question]) -> list[str]:
    """Return the quality metrics of the questions, without duplicates; a mean over several of them has no meaning."""
    return sorted({question.metric for question in questions if question.metric})


def mean_score(
    samples: Sequence[SampleRecord],
    baseline: Sequence[SampleRecord],
    itself: bool,
    name: str,
    scores: Mapping[Key, float | None],
    may_change: bool = False,
) -> dict[str, Any]:
    """Return the mean score and its mean paired difference to the baseline, both as means of question means.

    samples, baseline: paired. itself: the method is the baseline, which has no interval. name: what the score
    is called in the summary. scores: of each sample that has one. may_change: whether the method may change outputs, so
    that an unchanged question is weak evidence on other questions.
    """
    pairs: dict[str, list[tuple[float, float]]] = {}
    task = {row.question_id: row.category for row in samples}
    for a, b in zip(samples, baseline, strict=True):
        score, baseline_score = scores.get(a.key), scores.get(b.key)
        if score is not None and baseline_score is not None:
            pairs.setdefault(a.question_id, []).append((score, baseline_score))
    means = np.array([np.mean(values, axis=0) for values in pairs.values()], dtype=np.float64).reshape(-1, 2)
    difference, strata = means[:, 0] - means[:, 1], strata_of([task[question] for question in pairs])
    none = len(means) == 0
    return {
        name: None if none else float(means[:, 0].mean()),
        f"{name}_n": len(means),
        f"{name}_difference": None if none else float(difference.mean()),
        f"{name}_interval": None
        if itself
        else conservative_interval(difference, strata)
        if may_change
        else mean_interval(difference, strata),
    }


def conservative_interval(differences: Floats, strata: Strata | None = None) -> Interval | None:
    """Return the interval of the mean paired difference [n]; where few questions changed, at least `unseen`."""
    found = mean_interval(differences, strata)
    if found is None or (np.abs(differences) > CHANGED).sum() >= FEW_CHANGED:
        return found
    low, high = unseen(differences)
    return min(found[0], low), max(found[1], high)


def unseen(differences: Floats) -> Interval:
    """Return how far a mean difference may be from 0 by questions that changed, however few of these [n] did.

    No more of all questions are lost, or won, than Clopper and Pearson's bound at 95%, which is the rule of three, 3 /
    n, where none was (Hanley and Lippman-Hand 1983); and none by more than 1. What changed less adds its mean.
    """
    n, small = len(differences), np.abs(differences) <= CHANGED
    drift = float(differences[small].sum() / n)
    lost, won = int((differences < -CHANGED).sum()), int((differences > CHANGED).sum())
    return min(drift, 0.0) - _at_most(lost, n), max(drift, 0.0) + _at_most(won, n)


def _at_most(seen: int, n: int) -> float:
    return 1.0 if seen == n else float(betaincinv(seen + 1, n - seen, LEVEL))


def non_inferiority(around: Interval | None, margin: float) -> NonInferiority:
    """Return whether quality is at most `margin` below the reference's. around: the interval of the difference."""
    if around is None or around[0] <= -margin <= around[1]:
        return "not shown"
    return "non-inferior" if around[0] > -margin else "inferior"
