"""The law of the distribution: at T>0 tokens come as often as the model's own probabilities say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

from specbench_ss.decoding.loop import Limits
from specbench_ss.decoding.sampling import Sampling
from specbench_ss.testing.law import Case, Law, Subject
from specbench_ss.testing.laws_greedy import REPEATING, not_exact
from specbench_ss.testing.watched_decoder import Watched

SAMPLINGS = (Sampling(1.0), Sampling(0.7, top_p=0.8), Sampling(1.3, top_k=3))
LENGTH = 3  # tokens whose joint distribution is enumerated
Stages = tuple[tuple[int, float], ...]
# answers, and the p-value below which what they say is looked at again, with more and other ones. Only the last stage
# breaks the law: chance does not.
STAGES: Stages = ((120, 0.04), (400, 0.003), (1200, 1e-5))
CERTAIN = 1e-12  # so small a p-value breaks the law at any stage: nothing is gained by more answers
ENOUGH = 5.0  # expected in a cell of a chi-square, for its distribution to be the limit's
Joint = dict[tuple[int, ...], float]


def samplings(subject: Subject) -> Iterator[Case]:
    """Yield requests with plain sampling, top-p and top-k. Where there are many shapes, each gets one of them."""
    for sampling in SAMPLINGS if subject.whole else SAMPLINGS[subject.number % 3 :][:1]:
        yield Case(tuple(min(x, subject.target.vocab_size - 1) for x in REPEATING), LENGTH, sampling)


def distribution(subject: Subject, case: Case) -> str:
    """Test the joint distribution of the first tokens by chi-square."""
    joint = enumerated(subject, case)
    return staged(subject, STAGES, lambda seeds: tests(subject, case, joint, seeds))


def staged(subject: Subject, stages: Stages, found_over: Callable[[range], dict[str, float]]) -> str:
    """Describe the least p-value if it is too small at every stage; '' otherwise. Every answer has its own seed."""
    first, what = 10_000 * subject.number, ""
    for draws, unlikely in stages:
        found = found_over(range(first, first + draws))
        first, worst = first + draws, min(found, key=lambda name: found[name])
        if found[worst] > unlikely:
            return ""
        what = f"{worst}: p = {found[worst]:.1g} over {draws} answers"
        if found[worst] < CERTAIN:
            return what
    return what


def enumerated(subject: Subject, case: Case) -> Joint:
    """Return the model's own distribution of the first tokens of an answer."""
    joint: Joint = {(): 1.0}
    for _ in range(case.max_new_tokens):
        following: Joint = {}
        for tokens, mass in joint.items():
            p = case.sampling.probs(subject.logits(case.prompt, tokens)).tolist()
            following |= {(*tokens, x): mass * p_x for x, p_x in enumerate(p) if p_x > 0}
        joint = following
    return joint


def tests(subject: Subject, case: Case, joint: Joint, seeds: range) -> dict[str, float]:
    """Return p-values by what was tested, over one answer a seed, each times the number of tests (Bonferroni)."""
    from scipy.stats import chi2

    watched, limits = Watched(subject.decoder()), Limits(case.max_new_tokens)
    answers = Counter(
        tuple(subject.answer(watched, case.prompt, limits, replace(case.sampling, seed=seed)).tokens) for seed in seeds
    )
    odd = next((tokens for tokens in answers if tokens not in joint), None)
    if odd is not None:
        return {f"the answer {list(odd)}, which the model never gives": 0.0}
    found = {}
    for n in range(1, case.max_new_tokens + 1):
        statistic, freedom = chi_square(answers, joint, n, len(seeds))
        found[f"chi-square of the first {n} tokens, {statistic:.0f} with {freedom} degrees of freedom"] = (
            min(1.0, case.max_new_tokens * float(chi2.sf(statistic, freedom))) if freedom else 1.0
        )
    return found


def chi_square(answers: Counter[tuple[int, ...]], joint: Joint, n: int, draws: int) -> tuple[float, int]:
    """Return statistic and degrees of freedom for the first n tokens.

    Outcomes expected too seldom count as one cell.
    """
    expected, seen = Counter[tuple[int, ...]](), Counter[tuple[int, ...]]()
    for tokens, mass in joint.items():
        expected[tokens[:n]] += mass * draws  # type: ignore[assignment]
    for tokens, count in answers.items():
        seen[tokens[:n]] += count
    common = [t for t in expected if expected[t] >= ENOUGH]
    cells = [(float(expected[t]), seen[t]) for t in common]
    rest = draws - sum(e for e, _ in cells)
    if rest >= 1:
        cells.append((rest, draws - sum(o for _, o in cells)))
    return sum((o - e) ** 2 / e for e, o in cells), max(0, len(cells) - 1)


LAWS = (
    Law("distribution", "at T>0 the output is distributed as the model's own, by enumeration", samplings, distribution,
        not_exact, on=("small",)),
)  # fmt: skip
