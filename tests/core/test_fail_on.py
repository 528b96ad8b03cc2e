"""`--fail-on`: exit code 1 for what was asked for and found, after everything is written; else 0 as ever."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from specbench_ss.cli import run_output
from specbench_ss.cli.main import main
from specbench_ss.results.analysis import load_run
from specbench_ss.results.findings import FINDINGS as KINDS
from specbench_ss.runs.run_options import FINDINGS
from tests.conftest import MakeRun
from tests.tiny import few

CASES: list[tuple[dict[str, Any], str, int]] = [
    ({"verdict": "mismatch"}, "mismatch", 1),
    ({"verdict": "mismatch"}, "failed,unstable", 0),
    ({"verdict": "numerical tie"}, "numerical-tie", 1),
    ({"verdict": "length differs"}, "mismatch,length-differs", 1),
    ({"failing": ("ss",)}, "failed", 1),
    ({"failing": ("ss",)}, "", 0),
    ({"references": {"ss": "medusa"}, "labels": ("ar", "ss", "medusa")}, "lossy", 0),
    ({}, ",".join(name for name in FINDINGS if name not in ("unstable", "not-checked")), 0),
    ({"questions": 1}, "not-checked", 1),
]


@few(4)
@pytest.mark.parametrize(("made", "names", "code"), CASES)
def test_the_report_fails_on_what_was_asked_for(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str], made: dict[str, Any], names: str, code: int
) -> None:
    run = make_run(**{"labels": ("ar", "ss"), "categories": ("qa",), "questions": 5, **made})
    assert main(["report", str(run), *(["--fail-on", names] if names else [])]) == code
    error = capsys.readouterr().err
    assert error.count("\n") == code and error.startswith("ssbench: --fail-on: " if code else "")
    assert (run / "report.html").is_file()


def test_a_run_fails_after_everything_is_written(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(labels=("ar", "ss"), categories=("qa",), questions=5, verdict="mismatch")
    run_output.show(load_run(run), False)
    with pytest.raises(typer.Exit) as ended:
        run_output.show(load_run(run), False, "mismatch")
    assert ended.value.exit_code == 1 and (run / "report.html").is_file()
    assert capsys.readouterr().err == "ssbench: --fail-on: mismatch (ss: 5 of 5 outputs compared with ar)\n"


def test_every_kind_of_finding_can_be_asked_for() -> None:
    assert set(KINDS) <= set(FINDINGS)
