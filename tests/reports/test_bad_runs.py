"""Runs of which little or nothing is known: a report with that fact, never a blank page or a traceback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from specbench_ss.cli import report
from specbench_ss.errors import UserError
from specbench_ss.reports.html import assets
from specbench_ss.reports.html.report import SCRIPTS, page
from specbench_ss.results.analysis import analyse
from specbench_ss.runs.records import Run
from specbench_ss.runs.run_dir import read_run
from tests.conftest import MakeRun
from tests.reports.bad_runs import (
    half_done,
    methods_fail,
    no_questions,
    no_steps,
    nothing_works,
    only_the_reference,
)
from tests.tiny import few

EXPECTED: dict[Callable[[Run], None], str] = {
    nothing_works: "failed",
    methods_fail: "failed",
    half_done: "not complete",
    no_questions: "× vs AR (95% CI ",
    no_steps: "Unreliable (impossible",
    only_the_reference: "not complete",
}


@few(3)
@pytest.mark.parametrize("harm", EXPECTED, ids=lambda harm: harm.__name__)
def test_there_is_a_page_that_names_what_is_missing(make_run: MakeRun, harm: Callable[[Run], None]) -> None:
    run = read_run(make_run(categories=("qa", "writing"), questions=4))
    harm(run)
    made = page(analyse(run))
    text = assets.render("report.html.jinja", [assets.joined(SCRIPTS)], page=made)
    above = text[text.index('class="headline"') : text.index('id="samples"')]
    assert made["headline"] and (EXPECTED[harm] in above or EXPECTED[harm] in made["headline"])
    assert len(made["ranking"]) == 3 and made["samples"]["methods"]


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("steps.jsonl", "", "samples; steps.jsonl lacks their steps"),
        ("manifest.json", '{"format": 99}', "newer version of ssbench: its format is 99"),
    ],
)
def test_an_empty_a_newer_and_a_damaged_run_are_one_line(make_run: MakeRun, file: str, text: str, message: str) -> None:
    path: Path = make_run(categories=("qa",), questions=1)
    if '"format"' in text:
        text = json.dumps({**json.loads((path / file).read_text()), **json.loads(text)})
    (path / file).write_text(text)
    with pytest.raises(UserError) as raised:
        report.command([path])
    assert len(str(raised.value).splitlines()) == 1 and message in str(raised.value)
    assert not (path / "report.html").exists()


def test_a_method_without_a_sample_has_no_badge_of_its_answers(make_run: MakeRun) -> None:
    run = read_run(make_run(categories=("qa",), questions=4))
    half_done(run)
    tags = {row.label: [text.split(":")[0] for text, _ in row.tags] for row in page(analyse(run))["ranking"]}
    assert tags["medusa"] == ["insufficient data"] and "identical" in tags["ss"]


def test_a_run_without_recorded_drafts_names_the_option_that_records_them(make_run: MakeRun) -> None:
    path = make_run(categories=("qa",), questions=2)
    run = read_run(path)
    made = page(analyse(run))
    text = assets.render("report.html.jinja", [], page=made)
    assert made["replay"] is None and made["kinds"] is None
    assert "<code>ssbench run --record-drafts first</code>" in text
    assert 'id="replay-data"' not in text
