"""Drawings show the n of their marks, and a quantity has one name wherever it stands."""

from __future__ import annotations

import csv
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest

from specbench_ss.reports import charts
from specbench_ss.reports.html import assets
from specbench_ss.reports.html.report import page
from specbench_ss.results.analysis import analyse
from specbench_ss.results.cost_model import pairs
from specbench_ss.results.summary import OVERALL, summarise
from specbench_ss.runs.run_dir import read_run
from tests.conftest import MakeRun
from tests.tiny import thorough


def test_acceptance_shows_how_often_a_position_is_reached(make_run: MakeRun) -> None:
    results = analyse(read_run(make_run(labels=("ar", "ss"), questions=2)))
    steps = {pair.method.label: pair.method.tally.steps for pair in pairs(results.run)}["ss"]
    results.rows = [
        replace(
            row,
            acceptance_rate_per_pos=(0.8, 0.5, 0.1),
            acceptance_rate_per_pos_n=(200, 100, 20),
            conditional_acceptance_rate=(0.8, 0.6, 0.2),
            conditional_acceptance_rate_n=(200, 20, 19),
        )
        if row.method == "ss"
        else row
        for row in results.rows
    ]
    made = page(results)["acceptance"][1]
    assert [cells[-1].text for cells in made.table.rows] == [f"{100 * n / steps:.1f}%" for n in (200, 100, 20)]


def test_acceptance_from_too_few_steps_is_not_drawn(make_run: MakeRun) -> None:
    results = analyse(read_run(make_run(labels=("ar", "ss"), questions=2)))
    assert [chart.name for chart in page(results)["acceptance"]] == ["tokens-per-step", "acceptance"]
    few = {"conditional_acceptance_rate": (0.8,), "conditional_acceptance_rate_n": (charts.FEW - 1,)}
    results.rows = [replace(row, **few) if row.method == "ss" else row for row in results.rows]
    assert [chart.name for chart in page(results)["acceptance"]] == ["tokens-per-step"]


def test_shares_of_steps_are_of_the_samples_that_acceptance_is_of(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=("ar", "ss"), failing=("ar",)))
    counts = {pair.method.label: pair.method.tally.steps for pair in pairs(run)}
    rows = {r.method: r for r in summarise(run) if r.task == OVERALL}
    assert (
        rows["ss"].acceptance_rate_per_pos_n[0]
        == counts["ss"]
        < sum(r.steps or 0 for r in run.rows if r.method == "ss")
    )


def test_relative_step_time_is_the_same_on_the_first_screen_and_in_the_time_of_a_step(make_run: MakeRun) -> None:
    run = read_run(make_run())
    overall = {row.method: row.relative_step_time or 0 for row in summarise(run) if row.task == OVERALL}
    made = page(analyse(run))
    table = made["steps"]
    at = [column.title for column in table.columns].index("relative step time")
    shown = {cells[0].text: cells[at].text for cells in table.rows}
    for ranked in made["ranking"]:
        assert shown[ranked.label] == ranked.cells["relative_step_time"] == f"{overall[ranked.label]:.2f}×"
    read = {line["method"]: float(line["relative step time"]) for line in csv.DictReader(StringIO(table.csv()))}
    assert read == pytest.approx(overall)


def trace(wall_s: float, shares: list[float]) -> dict[str, Any]:
    gaps = {"number": 3, "mean_s": 2e-6, "longest_s": 4e-6}
    return {
        "what": "kernels",
        "tokens": 20,
        "wall_s": wall_s,
        "busy_share": sum(shares) / len(shares),
        "launches_per_token": 70.0,
        "gaps": gaps,
        "span_s": wall_s / len(shares),
        "timeline": shares,
    }


def test_the_timeline_shows_when_kernels_ran_as_long_as_the_request_took(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=("ar", "ss"), questions=1))
    made = page(analyse(run))
    assert made["timeline"] is None
    assert "ssbench run --trace" in assets.render("report.html.jinja", [], page=made)
    run.manifest["traces"] = {"ss": trace(0.5, [1.0, 0.25]), "ar": trace(1.0, [0.0, 1.0])}
    made = page(analyse(run))
    assert [max(trace["x"]) for trace in made["timeline"].figure["data"]] == [500.0, 1000.0]
    rows = [[cell.text for cell in row] for row in made["timeline"].table.rows]
    assert rows[0] == ["ss", "kernels", "62%", "500.0", "20", "70", "3", "2.0", "0.00"]
    text = assets.render("report.html.jinja", [], page=made)
    assert "ssbench run --trace" not in text and 'id="timeline"' in text


@thorough
def test_a_lead_that_may_be_noise_has_a_badge(make_run: MakeRun) -> None:
    results = analyse(read_run(make_run(labels=("ar", "ss", "ss-shared-ar"), references={"ss": "ss-shared-ar"})))
    found = {row.method: row for row in results.overall}

    def badges(high: float) -> list[str]:
        results.rows = [
            replace(row, speedup_interval=(0.9, high)) if row.method == "ss-shared-ar" else row for row in results.rows
        ]
        return [text.split(":")[0] for text, _ in next(r for r in page(results)["ranking"] if r.label == "ss").tags]

    low = (found["ss"].speedup_interval or (0, 0))[0]
    assert "faster" in badges(low * 0.99) and "within baseline noise" not in badges(low * 0.99)
    assert "within baseline noise" in badges(low * 1.01)
