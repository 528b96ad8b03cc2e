"""The tables in the terminal: every mark in them is explained below them."""

from __future__ import annotations

from io import StringIO
from typing import Any

from rich.console import Console

from specbench_ss.rows import Run
from specbench_ss.rundir import read_run
from specbench_ss.table import print_tables
from tests.conftest import MakeRun


def told(run: Run, **console: Any) -> str:
    out = StringIO()
    print_tables(run, Console(file=out, **console))
    return out.getvalue()


def test_a_value_without_an_interval_is_marked_and_the_mark_explained(make_run: MakeRun) -> None:
    text = told(read_run(make_run(labels=("ar", "ss"), categories=("writing", "qa"), questions=2)))
    line = next(line for line in text.splitlines() if line.lstrip().startswith("qa"))
    assert "1.00×" in line and "?" not in line  # the reference bears no mark
    by_task = text[: text.index("Overall")]
    assert sum("? " in line for line in by_task.splitlines()) == 2
    assert "? no interval, since there are fewer than 4 questions" in text


def test_marks_that_no_row_bears_are_not_explained(make_run: MakeRun) -> None:
    text = told(read_run(make_run(labels=("ar",), categories=("qa",), questions=2)))
    assert "?" not in text and "≈" not in text
