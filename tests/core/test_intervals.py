"""Bootstrap intervals: they are scipy's, on all resamples or on so many that chance leaves the printed digits alone."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from scipy import stats

from specbench_ss import stats as intervals
from specbench_ss.results.text import interval
from specbench_ss.stats import LISTED, Floats, bca, drawn, listed, resamples


def log_ratio(sums: Floats) -> Floats:
    return np.asarray(np.log(sums[..., 0] / sums[..., 1]))


def questions(n: int, noise: float, seed: int = 0) -> Floats:
    """Seconds of a reference and a method, [n, 2]."""
    rng = np.random.default_rng(seed)
    work = rng.lognormal(0, 0.6, n)
    return np.stack([work, work / 1.3 * np.exp(rng.normal(0, noise, n))], 1)


def of_scipy(columns: Floats, method: Any, resamples: int = 40_000) -> tuple[float, float]:
    def statistic(a: Floats, b: Floats, axis: int = -1) -> Floats:
        return np.asarray(np.log(a.sum(axis) / b.sum(axis)))

    done = stats.bootstrap(
        tuple(columns.T), statistic, paired=True, vectorized=True, n_resamples=resamples, method=method,
        rng=np.random.default_rng(3), batch=5000,
    )  # fmt: skip
    return float(done.confidence_interval.low), float(done.confidence_interval.high)


@pytest.mark.parametrize(("n", "noise", "seed"), [(9, 0.3, 2), (12, 0.2, 0), (40, 0.5, 0)])
def test_the_interval_is_scipys(n: int, noise: float, seed: int) -> None:
    columns = questions(n, noise, seed)
    ours, theirs = bca(log_ratio, columns, resamples(n)), of_scipy(columns, "BCa")
    assert ours == pytest.approx(theirs, abs=0.03 * (theirs[1] - theirs[0]))
    percentile = of_scipy(columns, "percentile")  # which is another one, so that the test can show
    assert percentile != pytest.approx(theirs, abs=0.03 * (theirs[1] - theirs[0]))


@pytest.mark.parametrize("n", [4, 5])
def test_few_questions_have_every_resample_with_its_probability(n: int) -> None:
    found = listed(n)
    assert found.weights is not None
    by_counts = {tuple(map(int, row)): weight for row, weight in zip(found.counts, found.weights, strict=True)}
    drawn_each = [tuple(np.bincount(draws, minlength=n)) for draws in product(range(n), repeat=n)]
    for counts in set(drawn_each):
        assert by_counts.pop(tuple(map(int, counts))) == pytest.approx(drawn_each.count(counts) / n**n)
    assert not by_counts


def test_random_resamples_have_n_questions_each_and_each_question_as_often() -> None:
    counts = drawn(30, 20_000, 1).counts
    assert (counts.sum(1) == 30).all()
    assert counts.mean(0) == pytest.approx(1, abs=0.05)
    assert counts.var(0) == pytest.approx(29 / 30, abs=0.05)
    assert np.array_equal(counts, drawn(30, 20_000, 1).counts)
    assert not np.array_equal(counts, drawn(30, 20_000, 2).counts)


def test_sums_are_those_of_the_questions_drawn() -> None:
    columns = questions(12, 0.2)
    found = drawn(12, 500, 0)
    assert found.sums(columns) == pytest.approx(found.counts.astype(float) @ columns)


@pytest.mark.parametrize("n", [5, LISTED + 1, 13, 80])
def test_other_seeds_print_the_same_interval_within_one_of_its_last_digit(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise of 20 % a question, more than any run had that was not called unstable."""
    columns = questions(n, 0.2)
    ends = []
    for seed in range(4):
        monkeypatch.setattr(intervals, "resamples", lambda n, seed=seed: resamples(n, seed))
        low, high = intervals.speedup_interval(columns[:, 0], np.ones(n), columns[:, 1], np.ones(n)) or (0, 0)
        ends.append([float(text) for text in interval((low, high)).split("–")])
    assert np.ptp(ends, axis=0).max() <= 0.0101 if n > LISTED else np.ptp(ends, axis=0).max() == 0


def test_an_interval_wider_than_one_has_a_digit_less() -> None:
    assert interval((1.234, 1.987)) == "1.23–1.99"
    assert interval((1.234, 2.987)) == "1.2–3.0"
    assert interval((0.96, 2.987)) == "0.96–2.99"  # on which side of 1 it lies, with equal digits
    assert interval((1.0002, 1.283)) == "1.0002–1.2830"


def test_a_memory_of_many_questions_is_bounded() -> None:
    assert resamples(5_000).counts.nbytes <= 25_000_000
