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


def test_n_says_how_many_questions_and_repeats_there_are(make_run: MakeRun) -> None:
    several = {"labels": ("ar", "ss"), "categories": ("qa",), "questions": 5, "failing": ("ss",)}
    text = told(read_run(make_run(turns=2, repeats=3, **several)))
    assert "10 (5 questions)" in text  # of ar
    assert "8 (4 questions, 6 failed)" in text
    assert "quality is a mean over questions" in text
    assert "answered every prompt 3 times" in text
    assert "Overall, 3 repeats" in text and "By task, 3 repeats" in text


def test_one_turn_and_one_repeat_need_no_words(make_run: MakeRun) -> None:
    text = told(read_run(make_run(labels=("ar", "ss"), categories=("qa",), questions=5)))
    assert "questions)" not in text and "mean over questions" not in text and "repeat" not in text
