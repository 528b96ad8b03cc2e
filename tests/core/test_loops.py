"""Answers that end in a repetition."""

from __future__ import annotations

import pytest

from specbench_ss.results.checks import checks, repeats_itself
from specbench_ss.results.summary import summarise
from specbench_ss.runs.run_dir import read_run
from tests.conftest import MakeRun


@pytest.mark.parametrize(
    ("ids", "loop"),
    [
        ([*range(50), *[7] * 32], True),
        ([*range(50), *[1, 2, 3] * 11], True),
        ([*range(50), *list(range(8)) * 4], True),
        ([*range(50), *list(range(9)) * 4], False),
        ([7] * 31, False),
        ([*[7] * 40, 1], False),
        (list(range(64)), False),
        ([], False),
    ],
)
def test_a_loop_is_a_short_ngram_again_and_again_at_the_end(ids: list[int], loop: bool) -> None:
    assert repeats_itself(ids) is loop


def test_many_loops_of_the_reference_are_reported_and_nothing_is_wrong_with_them(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=("ar", "ss"), categories=("qa",), questions=10))
    for row in run.rows:
        row.token_ids = list(range(row.tokens or 0))

    def reported() -> list[tuple[str, str]]:
        return [(check.state, check.sentence) for check in checks(run, summarise(run)) if check.name == "repetition"]

    assert reported() == []
    first = next(row for row in run.rows if row.method == "ar")
    first.token_ids = [7] * 40
    assert reported() == [("ok", "1 of 10 outputs of ar end in a repetition, which favors methods that copy.")]
    first.method = "ss"
    assert reported() == [], "what a method makes of it is not asked"
