"""Places of a ranking: every two methods are compared with each other, question by question."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from specbench_ss.cli.printing import print_answer, print_verbose
from specbench_ss.reports.html.report import page
from specbench_ss.results.analysis import Results
from specbench_ss.results.concurrency import level_rows
from specbench_ss.results.cost_model import waterfalls
from specbench_ss.results.ranking import RankRange, headline, rank_ranges
from specbench_ss.results.summary import OVERALL, SummaryRow, summarise
from specbench_ss.runs.config import Load
from specbench_ss.runs.records import OutputMatch, Run
from specbench_ss.runs.run_dir import read_run
from specbench_ss.stats.intervals import compare
from specbench_ss.stats.pairs import Pairs
from tests.cli import printed
from tests.conftest import MakeRun
from tests.tiny import few

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
    times = {row.method: Pairs(of[row.method], of["ar"]) for row in rows[1:]}
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


def test_an_order_may_be_sure_though_both_intervals_against_the_reference_are_wide(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=LABELS))
    rows = paced(run, {"ar": 1, "ss": 1.5, "medusa": 1.42, "ar[n=1]": 1.0}, {})
    bounds = {row.method: row.speedup_interval for row in rows}
    assert bounds["ss"] and bounds["medusa"] and bounds["ss"][0] < bounds["medusa"][1]  # they overlap
    assert rank_ranges(run, rows) == {
        "ss": RankRange(1, 1, (), True), "medusa": RankRange(2, 2, (), True), "ar[n=1]": RankRange(3, 3, (), False)
    }  # fmt: skip


def test_methods_that_cannot_be_reported_apart_share_their_places(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=LABELS))
    rows = paced(run, {"ar": 1, "ss": 1.5, "medusa": 1.49, "ar[n=1]": 0.5}, {"ss": 0.3, "medusa": 0.3})
    placed = rank_ranges(run, rows)
    assert {(one.best, one.worst) for label, one in placed.items() if label != "ar[n=1]"} == {(1, 2)}
    assert placed["ar[n=1]"] == RankRange(3, 3, (), False)
    first, second = sorted(("ss", "medusa"), key=lambda label: placed[label].tied_with, reverse=True)
    assert placed[first].tied_with == (second,)
    stated = headline(rows, [], placed)
    assert stated.startswith(f"Highest speedup: {first}, ") and f"; {second} is not significantly" in stated
    assert headline(rows, [], {}).startswith(f"Highest speedup: {first}, ") and "cannot be ranked" in headline(
        rows, [], {}
    )


def test_a_lead_that_one_of_many_methods_reaches_by_chance_is_not_the_headline(make_run: MakeRun) -> None:
    """Each interval alone lies above 1; all comparisons together do not show a difference from the baseline."""
    labels = ("ar", *(f"ss[k={k}]" for k in range(8)))
    run = read_run(make_run(labels=labels))
    rows = paced(run, {label: 1.0 if label == "ar" else 1.15 for label in labels}, dict.fromkeys(labels[1:], 0.5))
    assert "faster" in {row.comparison for row in rows[1:]}
    placed = rank_ranges(run, rows)
    assert not any(one.faster for one in placed.values())
    stated = headline(rows, [], placed)
    assert stated.startswith(
        "No method is significantly faster than AR if all 8 are compared at once; highest estimate"
    )
    alone = [rows[0], next(row for row in rows if row.comparison == "faster")]
    assert " is faster: " in headline(alone, [], rank_ranges(run, alone))


def test_below_four_questions_there_are_none(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=LABELS, categories=("qa",), questions=3))
    assert rank_ranges(run, summarise(run)) == {}


def test_controls_and_methods_of_another_model_have_no_place(make_run: MakeRun) -> None:
    labels = ("ar", "ss", "ss-shared", "ss-shared-ar")
    run = read_run(make_run(labels=labels, references={"ss-shared": "ss-shared-ar"}))
    assert set(rank_ranges(run, summarise(run))) == {"ss"}


@few(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_wrong_output_leaves_a_method_without_speedup_everywhere(make_run: MakeRun, dtype: str) -> None:
    """No table, figure, level, page or rank has one; the other methods keep theirs."""
    run = read_run(make_run())
    run.manifest["model"]["dtype"] = dtype
    next(one for one in run.output_match if one.method == "ss").verdict = "mismatch"
    results = Results(run)
    rows = [row for row in results.rows if row.method == "ss"]
    assert {(row.comparison, row.speedup, row.decode_speedup, row.other_factor) for row in rows} == {
        ("invalid", None, None, None)
    }
    assert set(results.rank_ranges) == {"medusa"} and results.headline.startswith("medusa is faster")
    assert results.headline.endswith("ss is invalid.")
    assert [row.decode_speedup for row in results.machine_rows if row.method == "ss"] == [None]
    assert set(waterfalls(results.pairs)) == {"medusa"} and results.plot.ranking().data[0].name == "medusa"
    assert [row.comparison for row in level_rows(run, Load(), {"ss"})] == ["baseline", "invalid", "faster"]
    made = page(results)
    assert [row.cells["speedup"] for row in made["ranking"] if row.label == "ss"] == ["invalid"]
    assert {"ss"} & {trace["name"] for trace in made["pareto"].spec()["data"]} == set()
    lines = printed(print_verbose, results, width=140).splitlines()
    assert all("×" not in line for line in lines if re.match(r"\s*(\w+ )? *ss  ", line))


def _lossy(run: Run, *labels: str) -> Results:
    for method in run.manifest["methods"]:
        method["lossless"] = method["label"] not in labels
    for row in run.rows:
        row.quality = 0.2 if row.method in labels else 0.9
    return Results(run)


def test_a_lossy_method_is_no_fastest_method_and_has_a_line_with_its_quality(make_run: MakeRun) -> None:
    results = _lossy(read_run(make_run()), "ss")
    assert results.headline.startswith("medusa is faster") and set(results.rank_ranges) == {"medusa"}
    assert re.search(
        r"  lossy  ss: \d.\d\d×, quality −0.70 .*, inferior to ar", printed(print_answer, results, width=200)
    )
    assert {check.name for check in results.checks} >= {"lossy", "inferior"}
    alone = _lossy(read_run(make_run(labels=("ar", "ss"))), "ss").headline
    assert "×" not in alone and "No lossless method" in alone


def test_findings_about_the_baseline_of_another_model_are_its_own(make_run: MakeRun) -> None:
    labels, references = ("ar", "ss", "ss-shared", "ss-shared-ar"), {"ss-shared": "ss-shared-ar"}
    run = read_run(make_run(labels=labels, references=references))
    assert "ss-shared decodes another model: 1." in (headline := Results(run).headline)
    assert headline.startswith("ss is faster") and "vs ss-shared-ar; quality " in headline
    for row in run.of("ss-shared-ar"):
        run.output_match.append(OutputMatch(*row.key, verdict="mismatch"))
    stated = Results(run)
    assert stated.headline.startswith("ss is faster") and "another model" not in stated.headline
    assert {row.method for row in stated.overall if row.comparison == "invalid"} == {"ss-shared", "ss-shared-ar"}


def test_a_method_that_fails_more_often_than_the_baseline_has_no_speedup_in_the_headline(make_run: MakeRun) -> None:
    stated = Results(read_run(make_run(labels=("ar", "ss"), failing=("ss",)))).headline
    assert stated.startswith("Unreliable (failed): ss failed on more samples") and "×" not in stated
