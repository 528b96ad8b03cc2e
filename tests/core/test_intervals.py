"""Intervals over questions within tasks: exact properties of their parts, and coverage by simulation."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from scipy import stats
from scipy.special import ndtri

from benchmarks.interval_coverage import DESIGNS, NOISES, Noise, covered, covered_blocks, significant_pairs, simulate
from specbench_ss.results.text import interval
from specbench_ss.stats.intervals import (
    Floats,
    estimate,
    freedom,
    log_ratio,
    mean_interval,
    pairwise,
    ratio_interval,
    speedup_interval,
    strata_of,
    tail_of_each,
)
from tests.tiny import few, thorough

RNG = np.random.default_rng


def columns(n: int, seed: int = 0) -> tuple[Floats, Floats]:
    """Seconds of a baseline and of a method that is 1.3 times as fast, [n] each."""
    rng = RNG(seed)
    work = rng.lognormal(0, 0.6, n)
    return work, work / 1.3 * np.exp(rng.normal(0, 0.2, n))


def test_the_mean_of_one_task_has_the_interval_of_student() -> None:
    values = RNG(0).normal(0.1, 1, 12)
    theirs = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert mean_interval(values) == pytest.approx((theirs.low, theirs.high))


@pytest.mark.parametrize("sizes", [(2, 2), (3, 2), (3,)])
def test_the_variance_within_tasks_is_right_on_average_over_all_samples(sizes: tuple[int, ...]) -> None:
    """All samples of so many questions from tasks of three: without k / (k - 1) it would be too small by a half."""
    tasks = [np.array([0.0, 1.0, 5.0]), np.array([10.0, 11.0, 11.0])]
    strata, n = np.repeat(np.arange(len(sizes)), sizes), sum(sizes)
    means, variances = [], []
    for drawn in product(*(product(task, repeat=k) for task, k in zip(tasks, sizes, strict=False))):
        values = np.array([value for of_task in drawn for value in of_task])
        means.append(values.mean())
        variances.append(estimate(values.mean(), values / n, np.ones(n), strata).error ** 2)
    assert np.mean(variances) == pytest.approx(np.var(means))


def test_a_pull_is_how_far_the_logarithm_moves_with_a_question() -> None:
    """The error is that of the infinitesimal jackknife, from numerical derivatives by the weights of the questions."""
    a, b = columns(9)
    tokens = RNG(1).integers(20, 60, 9).astype(float)
    strata = strata_of([*"aaaabbbcc"])

    def value(weights: Floats) -> float:
        return float(np.log((weights @ a) * (weights @ tokens) / ((weights @ b) * (weights @ tokens[::-1]))))

    step = 1e-6 * np.eye(9)
    influences = np.array([(value(1 + one) - value(1 - one)) / 2e-6 for one in step])
    squares = [
        ((part - part.mean()) ** 2).sum() * k / (k - 1)
        for part, k in ((influences[strata == h], k) for h, k in enumerate((4, 3, 2)))
    ]
    found = log_ratio((a, tokens), (b, tokens[::-1]), strata)
    assert found.value == pytest.approx(value(np.ones(9)))
    assert found.error == pytest.approx(math.sqrt(sum(squares)), rel=1e-5)


@thorough
def test_degrees_of_freedom() -> None:
    """Equal questions of one task have n - 1; those of a variance of unequal normal influences are simulated."""
    assert freedom(np.ones(7), np.zeros(7, np.int64)) == pytest.approx(6)
    assert freedom(np.ones(12), np.repeat([0, 1, 2], 4)) == pytest.approx(9)
    shares, strata = np.array([5.0, 1, 1, 1, 3, 2, 1]), np.array([0, 0, 0, 0, 1, 1, 1])
    influences = RNG(0).normal(0, shares, (20_000, 7))
    variances = np.array([estimate(0.0, one, shares, strata).error ** 2 for one in influences])
    assert freedom(shares, strata) == pytest.approx(2 * variances.mean() ** 2 / variances.var(), rel=0.05)


@pytest.mark.parametrize(
    ("tasks", "strata"),
    [
        ("aaaa", [0, 0, 0, 0]),
        ("abab", [0, 1, 0, 1]),
        ("abcdd", [0, 0, 0, 1, 1]),  # tasks of one question are one stratum
        ("aaabbc", [0, 0, 0, 1, 1, 1]),  # one alone joins the smallest other task
        ("abbaac", [0, 1, 1, 0, 0, 1]),
        ("abcd", [0, 0, 0, 0]),
    ],
)
def test_strata(tasks: str, strata: list[int]) -> None:
    assert strata_of([*tasks]).tolist() == strata


def test_differences_between_tasks_do_not_widen_an_interval() -> None:
    """Two tasks in which the method is exactly 1.1 and 1.9 times as fast: nothing is uncertain within them."""
    work = RNG(0).lognormal(0, 0.1, 8)
    strata, one = strata_of([*"aaaabbbb"]), np.ones(8)
    sure = ratio_interval((work,), (work / work / np.repeat([1.1, 1.9], 4) * work.mean(),), 0, strata)
    alike = ratio_interval((one,), (np.repeat([1 / 1.1, 1 / 1.9], 4),), 0, strata)
    pooled = ratio_interval((one,), (np.repeat([1 / 1.1, 1 / 1.9], 4),), 0)
    assert alike and pooled and sure
    assert alike[1] / alike[0] == pytest.approx(1) and pooled[1] / pooled[0] > 1.5
    assert sure[1] / sure[0] < 1.3


def test_neither_the_order_of_questions_nor_the_unit_matters() -> None:
    a, b = columns(12)
    strata, mixed = strata_of([*"aabbccddeeff"]), RNG(3).permutation(12)
    found = ratio_interval((a,), (b,), 1, strata)
    assert found == pytest.approx(ratio_interval((a[mixed],), (b[mixed],), 1, strata[mixed]))
    assert found == pytest.approx(ratio_interval((60 * a,), (60 * b,), 1, strata))
    low, high = ratio_interval((b,), (a,), 1, strata) or (0, 0)
    assert found == pytest.approx((1 / high, 1 / low))


@pytest.mark.parametrize("processes", [0, 1, 2])
def test_each_process_adds_a_hundredth(processes: int) -> None:
    ones = np.ones(5)
    assert speedup_interval(2 * ones, ones, ones, ones, processes=processes) == pytest.approx(
        (2 / 1.01**processes, 2 * 1.01**processes)
    )


@few(7)
@pytest.mark.parametrize("design", ["4", "10", "80", "4 x 6", "13 x 2", "13 x 4", "12+6+4+2"])
@pytest.mark.parametrize("noise", [NOISES[1], NOISES[4], NOISES[6]], ids=lambda noise: noise.name)
def test_intervals_cover_the_truth(design: str, noise: object) -> None:
    """95 to 97.5 % by the table in docs/metrics.md; 1,000 runs determine it to 1.5 %."""
    assert isinstance(noise, type(NOISES[0]))
    share, _ = covered(simulate(DESIGNS[design], noise, 1000, RNG(5)))
    assert 0.935 <= share <= 0.985


@few(2)
@pytest.mark.parametrize(
    ("noise", "blocks", "process", "drift", "least", "widest"),
    [
        (NOISES[1], 2, 0.03, 0.0, 0.90, 0.36),  # 92 %: two blocks are too few
        (NOISES[1], 4, 0.03, 0.0, 0.94, 0.085),
        (NOISES[1], 4, 0.05, 0.0, 0.94, 0.125),
        (NOISES[1], 4, 0.0, 0.0, 0.965, 0.05),
        (NOISES[4], 2, 0.03, 0.0, 0.94, 0.40),
        (NOISES[4], 4, 0.03, 0.0, 0.945, 0.13),
        (NOISES[4], 4, 0.05, 0.0, 0.94, 0.16),
        (NOISES[4], 4, 0.01, 0.1, 0.96, 0.12),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_intervals_of_servers_that_take_turns_cover_the_truth(
    noise: Noise, blocks: int, process: float, drift: float, least: float, widest: float
) -> None:
    """By the table in docs/metrics.md; 1,000 runs determine a coverage to 1.5 %."""
    share, half = covered_blocks(DESIGNS["13 x 4"], noise, blocks, process, drift, 1000, RNG(7))
    assert share >= least and half <= widest


def test_blocks_that_differ_widen_the_interval_by_what_questions_do_not_explain() -> None:
    a, b = columns(24)
    strata, block = np.repeat([0, 1, 2], 8), np.tile([0, 1, 2, 3], 6)
    plain = log_ratio((a,), (b,), strata)
    block_effects = np.array([0.3, -0.3, 0.2, -0.2])
    found = log_ratio((a,), (b * np.exp(block_effects[block]),), strata, blocks=(block,))
    assert found.error == pytest.approx(block_effects.std(ddof=1) / 2, rel=0.3)  # of a mean of four
    assert found.freedom == pytest.approx(3, rel=0.15)
    alone = log_ratio((a,), (b * np.exp(block_effects[block]),), strata).error
    assert found.error > 1.5 * alone > plain.error
    assert log_ratio((a,), (b,), strata, blocks=(0 * block,)) == plain  # one block
    assert log_ratio((a,), (b,), strata, blocks=(np.arange(24),)) == plain  # their differences are those of questions


@few(1)
@pytest.mark.parametrize("sigma", [0.0, 0.02, 0.2])
def test_the_degrees_of_freedom_with_blocks_are_those_of_their_mean_square(sigma: float) -> None:
    """The variance is distributed about as a mean square of three degrees, however much of it questions cause."""
    strata, block, rng = np.repeat([0, 1, 2], 8), np.tile([0, 1, 2, 3], 6), RNG(3)
    effects, noise = sigma * rng.normal(size=(4000, 4))[:, block], 0.05 * rng.normal(size=(4000, 24))
    found = [estimate(0.0, one / 24, np.ones(24), strata, blocks=(block,)) for one in effects + noise]
    assert all(0.95 * 3 < one.freedom < 21 + 3 for one in found)
    truth = 0.05**2 / 24 + sigma**2 / 4
    means = (effects + noise).mean(1)
    missed = np.mean([abs(mean) > one.around()[1] for mean, one in zip(means, found, strict=True)])
    assert np.var(means) == pytest.approx(truth, rel=0.1) and 0.01 <= missed <= 0.06


def test_an_interval_beyond_the_range_of_floats_ends_there() -> None:
    """Twenty servers, each fast in one block and slow in the other: t of one degree of freedom is 1,600."""
    block = np.arange(8) % 2
    seconds = np.exp(5.0 * ((np.arange(20)[:, None] + block) % 2) + 0.01 * RNG(0).normal(size=(20, 8)))
    found = pairwise(seconds, np.ones((20, 8)), blocks=(block,))
    ends = np.array(found)
    assert np.isfinite(ends).all() and (ends > 0).all()
    assert ends[0, 1, 0] < 1e-300 and ends[0, 1, 1] > 1e300


def test_the_variance_of_blocks_is_right_on_average() -> None:
    """Unequal blocks, which lack tasks: the estimate is unbiased, up to its cut at zero."""
    strata, block = np.repeat([0, 1, 2], [10, 9, 5]), np.array([0, 1, 2] * 6 + [0, 0, 1, 1, 1, 0])
    sigma, rng = 0.2, RNG(0)
    y = (0.05 * rng.normal(size=(1000, 24)) + sigma * rng.normal(size=(1000, 3))[:, block]) / 24
    found = [estimate(0.0, one, np.ones(24), strata, blocks=(block,)).error ** 2 for one in y]
    truth = 0.05**2 / 24 + sigma**2 * ((np.bincount(block) / 24) ** 2).sum()
    assert np.mean(found) == pytest.approx(truth, rel=0.1) and np.var(y.sum(1)) == pytest.approx(truth, rel=0.15)


def test_tasks_as_strata_narrow_the_interval_of_the_default_run() -> None:
    made = simulate(DESIGNS["13 x 4"], NOISES[4], 300, RNG(2))
    halves = [
        np.mean([log_ratio((a,), (b,), strata).error for a, b in zip(made.baseline, made.method, strict=True)])
        for strata in (made.strata, None)
    ]
    assert halves[0] < 0.7 * halves[1]


def test_each_pair_has_the_interval_that_it_has_alone() -> None:
    rng, strata = RNG(0), strata_of([*"aaabbbcccc"])
    seconds, tokens = rng.lognormal(0, 0.4, (3, 10)), rng.integers(20, 60, (3, 10)).astype(float)
    found = pairwise(seconds, tokens, strata, 2, simultaneous=False)
    for i, j in ((0, 1), (1, 2), (0, 2)):
        alone = speedup_interval(seconds[j], tokens[j], seconds[i], tokens[i], strata, 2)
        assert found[i][j] == pytest.approx(alone)
        assert found[j][i] == pytest.approx((1 / found[i][j][1], 1 / found[i][j][0]))
        assert found[i][i] == (1, 1)
    together = pairwise(seconds, tokens, strata, 2)
    assert together[0][1][0] < found[0][1][0] and together[0][1][1] > found[0][1][1]
    assert pairwise(seconds[:2], tokens[:2], strata) == pairwise(seconds[:2], tokens[:2], strata, simultaneous=False)


def test_the_level_of_each_of_many_pairs_is_tukeys() -> None:
    """Quantiles of the studentized range with infinite degrees of freedom, over the square root of 2."""
    assert tail_of_each(2) == pytest.approx(0.05)
    for methods, tabled in ((3, 3.314), (10, 4.474), (20, 5.012)):
        assert -ndtri(tail_of_each(methods) / 2) * math.sqrt(2) == pytest.approx(tabled, abs=1e-3)


@few(1)
@pytest.mark.parametrize("design", ["6", "13 x 4"])
def test_twenty_equal_methods_have_a_significant_pair_in_few_runs(design: str) -> None:
    assert significant_pairs(DESIGNS[design], 20, NOISES[1], 100, RNG(4)) <= 0.05
    assert significant_pairs(DESIGNS[design], 20, NOISES[1], 10, RNG(4), simultaneous=False) > 0.5


def test_an_interval_wider_than_one_has_a_digit_less() -> None:
    assert interval((1.234, 1.987)) == "1.23–1.99"
    assert interval((1.234, 2.987)) == "1.2–3.0"
    assert interval((0.96, 2.987)) == "0.96–2.99"  # on which side of 1 it lies, with equal digits
    assert interval((1.0002, 1.283)) == "1.0002–1.2830"
