"""The tables in the terminal: every mark in them is explained below them."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from specbench_ss.reports.html.report import page
from specbench_ss.results.analysis import analyse
from specbench_ss.results.ranking import config_of, quality
from specbench_ss.results.summary import summarise
from specbench_ss.results.terminal import DISPENSABLE, print_tables
from specbench_ss.runs.records import Run
from specbench_ss.runs.run_dir import read_run
from tests.conftest import MakeRun


def told(run: Run, **console: Any) -> str:
    out = StringIO()
    print_tables(analyse(run), Console(file=out, **console))
    return out.getvalue()


def test_a_value_without_an_interval_is_marked_and_the_mark_explained(make_run: MakeRun) -> None:
    text = told(read_run(make_run(labels=("ar", "ss"), categories=("writing", "qa"), questions=2)))
    line = next(line for line in text.splitlines() if line.lstrip().startswith("qa"))
    assert "1.00×" in line and "?" not in line  # the reference bears no mark
    by_task = text[: text.index("Overall")]
    assert sum("? " in line for line in by_task.splitlines()) == 2
    assert "? no interval, since there are fewer than 4 questions" in text


def test_n_says_how_many_questions_and_repeats_there_are(make_run: MakeRun) -> None:
    several = {"labels": ("ar", "ss"), "categories": ("qa",), "questions": 5, "failing": ("ss",)}
    text = told(read_run(make_run(turns=2, repeats=3, **several)))
    assert "10 (5 q)" in text  # of ar
    assert "8 (4 q, 6 failed)" in text
    assert "quality is a mean over questions" in text
    assert "answered every prompt 3 times" in text
    assert " Overall, 3 repeats " in text and "By task, 3 repeats" in text


def test_measures_that_differ_have_no_common_mean(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=("ar", "ss"), categories=("qa", "translation"), questions=5))
    one = "left out: the tasks are scored by different measures (bleu, rouge_l)"
    assert one not in told(run)
    run.questions = [replace(q, metric="bleu" if q.category == "translation" else q.metric) for q in run.questions]
    assert one in " ".join(told(run).split())
    rows, config = summarise(run), config_of(run)
    shown = {(row.category, quality(row, config) is None) for row in rows}
    assert shown == {("overall", True), ("qa", False), ("translation", False)}
    table = page(analyse(run))["everything"]
    column = [c.title for c in table.columns].index("quality")
    assert {(row[0].text, row[column].text == "–") for row in table.rows} == shown


SHARED: dict[str, Any] = {"labels": ("ar", "ss-shared", "ss-shared-ar"), "references": {"ss-shared": "ss-shared-ar"}}


@pytest.mark.parametrize(("temperature", "output"), [(0.0, "identical"), (0.7, "sampled")])
def test_what_is_promised_when_sampling_is_said(make_run: MakeRun, temperature: float, output: str) -> None:
    text = told(read_run(make_run(labels=("ar", "ss"), categories=("qa",), questions=5, temperature=temperature)))
    assert output in text and "not compared" not in text
    assert ("the same distribution, not the same text" in text) == bool(temperature)


def test_a_method_that_changes_the_model_names_its_own_reference(make_run: MakeRun) -> None:
    text = told(read_run(make_run(**SHARED, questions=5)))
    assert "identical †" in text and "reference †" in text and "† a method that changes the model" in text
    assert "not compared" not in text
    assert "ss-shared over ss-shared-ar, its own model: " in text
    assert "(ss-shared-ar); in every row speedup and quality are relative to ar" in text


def test_a_mismatch_names_the_reference_that_it_is_against(make_run: MakeRun) -> None:
    text = told(read_run(make_run(**SHARED, questions=5, verdict="mismatch")), width=200)
    assert "ss-shared: 20 of 20 answers against the reference, ss-shared-ar" in text
    assert "Something is wrong (mismatch); until it is explained, do not rely on this: " in text.splitlines()[-1]
    assert "20 mismatches of 20 †" in text


def test_what_a_method_does_not_promise_is_said(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=("ar", "ss"), questions=5, verdict="not compared"))
    run.manifest["methods"][1]["lossless"] = False
    assert "not compared: the method does not promise the output of its reference" in told(run)


@pytest.mark.parametrize(("width", "missing"), [(80, {"tokens/s", "quality"}), (95, {"tokens/s"}), (130, set())])
def test_a_narrow_terminal_lacks_whole_columns_and_never_half_a_number(
    make_run: MakeRun, width: int, missing: set[str]
) -> None:
    run = read_run(make_run(labels=("ar", "medusa"), questions=3, turns=2))
    text = told(run, width=width, force_terminal=True, no_color=True)
    assert "…" not in text
    heads = text[: text.index("writing")]
    assert {column for column in DISPENSABLE if column not in heads} - {"judged"} == missing
    assert ("terminal is too narrow" in text) == bool(missing)
    assert "questions" in text


WIDE = ("ar", "ss[k=4,prune=on,tree=wide]", "medusa[nodes=63,typical=off,temperature=0.7,tree=a]", "ss", "medusa")


def test_long_labels_fold_at_80_columns_and_the_columns_that_matter_stay(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=WIDE, questions=5, categories=("qa", "math_reasoning"), references=None))
    lines = re.sub("\x1b[^m]*m", "", told(run, width=80, force_terminal=True)).splitlines()
    tables = lines[: next(i for i, line in enumerate(lines) if line.startswith("not shown"))]
    assert max(len(line.rstrip()) for line in tables) <= 80 and not any("…" in line for line in tables)
    heads = [line for line in tables if "speedup" in line]
    assert len(heads) == 2 and all(w in head for head in heads for w in ("method", "95% interval", "τ", "output"))
    assert sum("identical" in line for line in tables) == 3 * 4


def test_the_reference_comes_first_then_the_fastest(make_run: MakeRun) -> None:
    text = told(read_run(make_run(labels=("ar", "medusa", "ss"), questions=5)))
    overall = [
        line.split()[0] for line in text[text.index("Overall") :].splitlines() if "×" in line and "fast" not in line
    ]
    assert overall == ["ar", "ss", "medusa"]


def test_many_methods_get_one_row_a_task(make_run: MakeRun) -> None:
    labels = ("ar", "ss", "medusa", *(f"ar[n={i}]" for i in range(16)))
    categories = tuple(f"task_{i}" for i in range(13))
    text = told(read_run(make_run(labels=labels, categories=categories, questions=1)), width=80, force_terminal=True)
    by_task = re.sub("\x1b[^m]*m", "", text[: text.index("Overall")])
    rows = [line for line in by_task.splitlines() if line.strip().startswith("task ") and "×" in line]
    assert len(rows) == 13 and all("0 of 18" in row for row in rows)
    assert "the fastest of 18 methods" in by_task
    assert len(text.splitlines()) < 80


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"labels": ("ar", "ss", "medusa")}, r"^ss is \d\.\d\d× as fast as ar \(95% interval .*, the fastest of 2 m"),
        ({"labels": ("ar", "ar[n=1]")}, r"^ar\[n=1\] is not significantly different from ar \("),
        ({"labels": ("ar", "ar[n=1]", "ar[n=2]")}, r"^No method is distinguishable from ar \(the fastest of 2 is "),
        ({"labels": ("ar", "ss"), "questions": 2, "categories": ("qa",)}, r"^Too few questions to tell"),
        ({"labels": ("ar",)}, r"^Only ar was measured"),
    ],
)  # fmt: skip
def test_the_last_line_is_the_finding(make_run: MakeRun, changes: dict[str, Any], sentence: str) -> None:
    last = told(read_run(make_run(**{"questions": 5, **changes}))).splitlines()[-1]
    assert re.match(sentence, last), last


def test_quality_of_a_changed_model_is_judged_against_a_margin(make_run: MakeRun) -> None:
    run = read_run(make_run(**SHARED, questions=8))
    for row in run.rows:
        odd = int(row.question_id[-1]) % 2
        by_method = {"ss-shared": -0.1, "ss-shared-ar": 0.011 if odd else -0.011}
        row.quality = 0.5 + by_method.get(row.method, 0.0)
    text = told(run)
    assert re.search(r"ss-shared: quality −0\.10 \(.*\), inferior to ar \(margin 0\.02\)", text)
    assert "ss-shared-ar: quality" in text and "non-inferior to ar (margin 0.02)" in text


def test_a_width_that_the_user_states_is_kept_without_a_terminal(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = read_run(make_run(labels=("ar", "medusa"), questions=3, turns=2))
    for columns, missing in (("80", True), ("200", False)):
        monkeypatch.setenv("COLUMNS", columns)
        console = Console(file=io.StringIO(), no_color=True)
        print_tables(analyse(run), console)
        assert console.width == int(columns)
        assert ("terminal is too narrow" in console.file.getvalue()) == missing  # type: ignore[attr-defined]
