"""Places of a ranking: every two methods are compared with each other, question by question."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from specbench_ss.results.ranking import RankRange, headline, rank_ranges
from specbench_ss.results.summary import OVERALL, PairedTimes, SummaryRow, paired, summarise
from specbench_ss.runs.records import Run
from specbench_ss.runs.run_dir import read_run
from specbench_ss.stats import compare, pairwise, speedup_interval
from tests.conftest import MakeRun

LABELS = ("ar", "ss", "medusa", "ar[n=1]")


def paced(run: Run, pace: dict[str, float], noise: dict[str, float]) -> list[SummaryRow]:
    """Give the run other wall times, and summarise them: ar's differ by question, the others' by the noise."""
    rng = random.Random(0)
    by_question = {row.question_id: rng.uniform(0.6, 1.6) for row in run.rows}
    for row in run.rows:
        if row.ok:
            own = pace[row.method] * rng.uniform(1 - noise.get(row.method, 0), 1 + noise.get(row.method, 0))
            row.wall_s = (row.tokens or 0) * 0.01 * (by_question[row.question_id] if row.method == "ar" else 1) / own
    rows = [row for row in summarise(run) if row.task == OVERALL]
    of = {label: [row for row in run.rows if row.method == label] for label in run.labels}
    times = {row.method: PairedTimes(*paired(of[row.method], of["ar"])) for row in rows[1:]}
    bounds = {label: one.interval() for label, one in times.items()}
    changed = [
        replace(
            r,
            speedup=times[r.method].speedup(),
            speedup_interval=bounds[r.method],
            comparison=compare(bounds[r.method]),
        )
        for r in rows[1:]
    ]
    return [rows[0], *changed]


@pytest.mark.parametrize("n", [4, 30])
def test_each_pair_has_the_interval_that_it_has_alone(n: int) -> None:
    rng = np.random.default_rng(0)
    seconds, tokens = rng.lognormal(0, 0.4, (3, n)), rng.integers(20, 60, (3, n)).astype(float)
    found = pairwise(seconds, tokens)
    for i, j in ((0, 1), (1, 2), (0, 2)):
        alone = speedup_interval(seconds[j], tokens[j], seconds[i], tokens[i])
        assert found[i][j] == pytest.approx(alone)
        assert found[j][i] == pytest.approx((1 / found[i][j][1], 1 / found[i][j][0]))
        assert found[i][i] == (1, 1)


def test_an_order_may_be_sure_though_both_intervals_against_the_reference_are_wide(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=LABELS))
    rows = paced(run, {"ar": 1, "ss": 1.5, "medusa": 1.42, "ar[n=1]": 1.0}, {})
    bounds = {row.method: row.speedup_interval for row in rows}
    assert bounds["ss"] and bounds["medusa"] and bounds["ss"][0] < bounds["medusa"][1]  # they overlap
    assert rank_ranges(run, rows) == {
        "ss": RankRange(1, 1, ()), "medusa": RankRange(2, 2, ()), "ar[n=1]": RankRange(3, 3, ())
    }  # fmt: skip


def test_methods_that_cannot_be_reported_apart_share_their_places(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=LABELS))
    rows = paced(run, {"ar": 1, "ss": 1.5, "medusa": 1.49, "ar[n=1]": 0.5}, {"ss": 0.3, "medusa": 0.3})
    placed = rank_ranges(run, rows)
    assert {(one.best, one.worst) for label, one in placed.items() if label != "ar[n=1]"} == {(1, 2)}
    assert placed["ar[n=1]"] == RankRange(3, 3, ())
    first, second = sorted(("ss", "medusa"), key=lambda label: placed[label].tied_with, reverse=True)
    assert placed[first].tied_with == (second,)
    stated = headline(rows, [], placed)
    assert stated.startswith(f"Highest speedup: {first}, ") and f"; {second} is not significantly" in stated
    assert headline(rows, [], {}).startswith(f"{first} is fastest: ")


def test_below_four_questions_there_are_none(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=LABELS, categories=("qa",), questions=3))
    assert rank_ranges(run, summarise(run)) == {}


def test_controls_and_methods_of_another_model_have_no_place(make_run: MakeRun) -> None:
    labels = ("ar", "ss", "ss-shared", "ss-shared-ar")
    run = read_run(make_run(labels=labels, references={"ss-shared": "ss-shared-ar"}))
    assert set(rank_ranges(run, summarise(run))) == {"ss"}
