"""The speedup chart: whiskers where there is an interval, and only there."""

from __future__ import annotations

import pytest

from specbench_ss.reports import bars, speed
from specbench_ss.reports.palette import styles
from specbench_ss.rundir import read_run
from specbench_ss.stats import summarise


@pytest.mark.parametrize(("questions", "whiskers"), [(2, False), (8, True)])
def test_a_bar_without_an_interval_has_no_whiskers(make_run, questions: int, whiskers: bool) -> None:  # type: ignore[no-untyped-def]
    run = read_run(make_run(labels=("ar", "ss"), categories=("qa",), questions=questions))
    chart = bars.speedups(speed.by_task(summarise(run)), styles(run.labels))
    for error in (chart.data[0]["error_y"]["array"], chart.data[0]["error_y"]["arrayminus"]):
        assert len(error) == len(chart.data[0]["y"]) == 2
        assert all((end is not None and end > 0) if whiskers else end is None for end in error)
    assert all((text != "no interval") == whiskers for text in chart.data[0]["customdata"])


def test_the_reference_has_one_word_for_its_output_with_repeats_and_without(make_run) -> None:  # type: ignore[no-untyped-def]
    run = read_run(make_run(labels=("ar", "ss"), categories=("qa",), questions=2))
    again = [row for row in summarise(run) if row.method == "ar"]
    assert all(not row.sameness for row in again)
    run.sameness = [type(s)(s.question_id, s.turn, "ar", s.repeat, s.verdict) for s in run.sameness]
    for compared in (again, [row for row in summarise(run) if row.method == "ar"]):
        table = speed.everything(speed.by_task(compared), styles(["ar"]))
        column = [c.title for c in table.columns].index("output")
        assert {row[column].text for row in table.rows} == {"reference"}
