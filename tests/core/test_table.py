"""Results in the terminal: a short form of some 20 lines, and a verbose one with its marks explained."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from specbench_ss.cli.printing import DISPENSABLE, print_short, print_verbose
from specbench_ss.errors import failure_text
from specbench_ss.reports.html.report import page
from specbench_ss.results.analysis import analyse
from specbench_ss.results.ranking import config_of, quality
from specbench_ss.results.summary import summarise
from specbench_ss.runs.records import Run
from specbench_ss.runs.run_dir import read_run
from tests.cli import printed
from tests.conftest import MakeRun
from tests.tiny import few


def reported(run: Run, **console: Any) -> str:
    return printed(print_verbose, analyse(run), **console)


def short(run: Run, width: int = 80) -> list[str]:
    text = printed(print_short, analyse(run), width=width, force_terminal=True, no_color=True)
    return re.sub("\x1b[^m]*m", "", text).splitlines()


def test_a_value_without_an_interval_is_marked_and_the_mark_explained(make_run: MakeRun) -> None:
    text = reported(read_run(make_run(labels=("ar", "ss"), categories=("writing", "qa"), questions=2)))
    line = next(line for line in text.splitlines() if " ar " in line)
    assert "1.00×" in line and "?" not in line  # the reference bears no mark
    by_task = text[: text.index("Overall")]
    assert sum("? " in line for line in by_task.splitlines()) == 2
    assert "? no confidence interval (for fewer than 4 questions, or " in " ".join(text.split())
    lines = short(read_run(make_run(labels=("ar", "ss"), categories=("qa",), questions=2)))
    assert "? no confidence interval" in lines[1] and "? " in next(line for line in lines if line.startswith("  ss "))
    legend = short(read_run(make_run(labels=("ar", "ss"), questions=5)))[1].strip()
    assert legend.startswith("decode: ") and "τ: tokens per step" in legend and "accept: " in legend, "no mark"


def test_n_states_how_many_questions_and_repeats_there_are(make_run: MakeRun) -> None:
    several = {"labels": ("ar", "ss"), "categories": ("qa",), "questions": 5, "failing": ("ss",)}
    text = reported(read_run(make_run(turns=2, repeats=3, **several)))
    assert "10 (5 q)" in text  # of ar
    assert "8 (4 q, 6 failed)" in text
    assert "quality is a mean over questions" in text
    assert "every prompt has 3 repeats" in text
    assert "Overall, 3 repeats" in text and "By task" not in text, "one task is all of them"


def test_measures_that_differ_have_no_common_mean(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=("ar", "ss"), categories=("qa", "translation"), questions=5))
    one = "left out: the tasks are scored by different measures (bleu, rouge_l)"
    assert one not in reported(run)
    run.questions = [replace(q, metric="bleu" if q.category == "translation" else q.metric) for q in run.questions]
    assert one in " ".join(reported(run).split())
    rows, config = summarise(run), config_of(run)
    shown = {(row.task, quality(row, config) is None) for row in rows}
    assert shown == {("overall", True), ("qa", False), ("translation", False)}
    table = page(analyse(run))["everything"]
    column = [c.title for c in table.columns].index("quality")
    assert {(row[0].text, row[column].text == "–") for row in table.rows} == shown


SHARED: dict[str, Any] = {"labels": ("ar", "ss-shared", "ss-shared-ar"), "references": {"ss-shared": "ss-shared-ar"}}


@pytest.mark.parametrize(("temperature", "output"), [(0.0, "identical"), (0.7, "sampled")])
def test_what_is_promised_when_sampling_is_stated(make_run: MakeRun, temperature: float, output: str) -> None:
    text = reported(read_run(make_run(labels=("ar", "ss"), categories=("qa",), questions=5, temperature=temperature)))
    assert output in text and "not compared" not in text
    assert ("the same distribution, not the same text" in text) == bool(temperature)


def test_a_method_that_changes_the_model_names_its_own_reference(make_run: MakeRun) -> None:
    text = reported(read_run(make_run(**SHARED, questions=5)))
    assert "identical †" in text and "baseline †" in text and "† a method that changes the model" in text
    assert "not compared" not in text
    assert "ss-shared over ss-shared-ar, its own model: " in text
    assert "(ss-shared-ar); in every row speedup and quality are relative to ar" in text


def test_a_mismatch_names_the_reference_that_it_is_against(make_run: MakeRun) -> None:
    text = reported(read_run(make_run(**SHARED, questions=5, verdict="mismatch")), width=200)
    assert "ss-shared: 20 of 20 outputs compared with ss-shared-ar" in text
    assert text.startswith("Unreliable (mismatch): ")
    assert "20 mismatches of 20 †" in text


def test_what_a_method_does_not_promise_is_stated(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=("ar", "ss"), questions=5, verdict="not compared"))
    run.manifest["methods"][1]["lossless"] = False
    assert "not compared: the method does not preserve the output of the baseline" in reported(run)


@pytest.mark.parametrize(("width", "missing"), [(80, {"quality"}), (60, {"tok/s", "quality", "accept"}), (130, set())])
def test_a_narrow_terminal_lacks_whole_columns_and_never_half_a_number(
    make_run: MakeRun, width: int, missing: set[str]
) -> None:
    run = read_run(make_run(labels=("ar", "medusa"), questions=3, turns=2))
    lines = short(run, width)
    table = lines[2:5]
    assert not any("…" in line for line in table) and max(map(len, lines)) <= width
    assert {name for name in DISPENSABLE if name not in table[0]} - {"judge", "n", "decode"} == missing
    verbose = reported(run, width=width)
    assert ("not shown in a terminal" in verbose) == (width < 130)


WIDE = ("ar", "ss[k=4,prune=on,tree=wide]", "medusa[nodes=63,typical=off,temperature=0.7,tree=a]", "ss", "medusa")


def test_long_labels_fold_and_the_columns_that_matter_stay(make_run: MakeRun) -> None:
    lines = short(read_run(make_run(labels=WIDE, questions=5, categories=("qa", "math_reasoning"))))
    table = lines[2 : lines.index("", 2)]
    assert max(map(len, table)) <= 80 and not any("…" in line for line in table)
    assert all(name in table[0] for name in ("method", "speedup", "95% CI", "τ", "output"))
    assert sum("identical" in line for line in table) == 4


def test_a_label_of_200_characters_is_cut_in_its_middle(make_run: MakeRun) -> None:
    label = f"ss[{'x' * 100},{'y' * 90},k=4]"
    run = read_run(make_run(labels=("ar", label, "medusa"), questions=5))
    for width in (80, 60):
        lines = short(run, width)
        assert len(lines) <= 25 and len(lines[0]) <= 160 and "k=4]" in lines[0]
        assert any("…" in line for line in lines) and max(map(len, lines[1:])) <= width


def test_methods_are_ordered_by_speed(make_run: MakeRun) -> None:
    lines = short(read_run(make_run(labels=("ar", "medusa", "ss"), questions=5)))
    assert [line.split()[0] for line in lines[3:6]] == ["ss", "medusa", "ar"]


FOUR = ("ar", "ss", "medusa", "sd", "ss-shared")
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


def propose() -> None:
    raise TypeError("expected a Tensor")


def failure_of(function: Callable[[], None]) -> str:
    with pytest.raises(TypeError) as caught:
        function()
    return failure_text(caught.value)


@pytest.mark.parametrize("failing", [(), ("medusa",)])
def test_a_run_of_four_methods_takes_at_most_20_lines(make_run: MakeRun, failing: tuple[str, ...]) -> None:
    """Two more lines are those of the report and of `load_run`."""
    run = read_run(make_run(labels=FOUR, questions=1, categories=(*MT_BENCH, "qa", "rag"), verdict="numerical tie"))
    run.manifest["warnings"] = ["the machine is busy: times will be unstable", "a disk is full", "a fan is loud"]
    for row in run.rows:
        row.quality, row.noise_reason = 0.01, f"other processes took {row.index}% of the processor"
        if row.method in failing:
            row.status, row.error = "failed", failure_of(propose)
    lines = short(run)
    assert len(lines) <= 18 and max(map(len, lines[1:])) <= 80
    assert sum(line.startswith(("  x", "  !")) for line in lines) == 4 and "more warning" in lines[-1]
    assert any("10 questions, 1 per task" in line and "--limit 4" in line for line in lines)
    assert lines[0].startswith("Timing unreliable, all samples are noisy. ")
    if failing:
        at = next(i for i, line in enumerate(lines) if line.startswith("  x"))
        assert "medusa failed on 10 of 10 prompts: TypeError: expected a Tensor" in lines[at]
        assert re.search(r"test_table\.py:\d+ in propose   ->  ssbench check medusa", lines[at + 1])


SPEC_BENCH = (*MT_BENCH, "translation", "summarization", "qa", "math_reasoning", "rag")


@few(1)
@pytest.mark.parametrize("failing", [(), ("medusa",)])
def test_a_table_by_task_has_a_row_per_method_and_keeps_the_20_lines(
    make_run: MakeRun, failing: tuple[str, ...]
) -> None:
    run = read_run(make_run(labels=FOUR, questions=4, categories=SPEC_BENCH, verdict="numerical tie", failing=failing))
    run.manifest["warnings"] = ["the machine is busy: times will be unstable", "a disk is full", "a fan is loud"]
    for row in run.rows:
        row.quality, row.noise_reason = 0.01, f"other processes took {row.index}% of the processor"
    for width, head in ((80, "math_reasoning"), (60, "rag")):
        lines = short(run, width)
        assert len(lines) <= 18 and max(map(len, lines[1:])) <= width and "more warning" in lines[-1]
        at = lines.index(next(line for line in lines if line.startswith("  by task")))
        assert head in lines[at] and {line.split()[0] for line in lines[at + 1 : at + 5]} == set(FOUR) - {"ar"}
        assert all(line.count("×") == 6 and "…" not in line for line in lines[at + 1 : at + 5])


def test_a_task_needs_four_prompts_for_the_table_by_task(make_run: MakeRun) -> None:
    lines = short(read_run(make_run(labels=("ar", "ss"), categories=("qa", "rag"), questions=3)))
    assert any("3 per task: too few for results by task" in line for line in lines)
    assert not any(line.startswith("  by task") for line in lines)


def test_the_cause_of_a_speedup_and_of_a_lost_one_is_named(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=("ar", "ss", "medusa"), questions=5))
    results = analyse(run)
    ss, medusa = (next(row for row in results.overall if row.method == name) for name in ("ss", "medusa"))
    slow = replace(medusa, mean_acceptance_length=3.0, relative_step_time=2.0, draft_s=0.02, verify_s=0.01)
    fast = replace(ss, mean_acceptance_length=2.0, relative_step_time=1.25)
    results.__dict__["rows"] = [fast, slow, next(row for row in results.overall if row.method == "ar")]
    why = [line.strip() for line in printed(print_short, results, width=80).splitlines() if "tokens per step, " in line]
    assert why[0].startswith("why  ss: 2.00 tokens per step, a step is 1.25× as long")
    assert why[1] == "medusa: 3.00 tokens per step, a step is 2.00× as long, mostly by drafting"


@few(3)
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"labels": ("ar", "ss", "medusa")}, r"^(ss is fastest|Highest speedup): .*\d× vs AR \(95% CI .*\)"),
        ({"labels": ("ar", "ss")}, r"^ss is faster: \d\.\d\d× vs AR \(95% CI .*\)"),
        ({"labels": ("ar", "ar[n=1]")}, r"^ar\[n=1\] is not significantly different from AR: \d"),
        ({"labels": ("ar", "ar[n=1]", "ar[n=2]")}, r"^No method is significantly different .* highest estimate: ar"),
        ({"labels": ("ar", "ss"), "questions": 2, "categories": ("qa",)}, r"^Too few questions to compare"),
        ({"labels": ("ar",)}, r"^Only AR was measured"),
    ],
)  # fmt: skip
def test_the_first_line_is_the_finding(make_run: MakeRun, changes: dict[str, Any], sentence: str) -> None:
    run = read_run(make_run(**{"questions": 5, **changes}))
    for first in (reported(run).splitlines()[0], short(run)[0]):
        assert re.match(sentence, first), first


def test_a_file_without_further_questions_needs_more_of_them(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=("ar", "ss"), categories=("qa",), questions=2))
    assert "needs 4 (use --limit 4)" in short(run)[0]
    run.manifest["suite"]["edition"] = "custom"
    assert "the file has 2 questions; add questions" in short(run)[0]
    run.manifest["config"]["limit"] = 2
    assert "needs 4 (use --limit 4)" in short(run)[0], "the file may have more"


def test_acceptance_is_that_of_the_report(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=("ar", "ss"), questions=5))
    row = next(row for row in summarise(run) if (row.task, row.method) == ("overall", "ss"))
    lines = short(run, 120)
    assert " accept " in lines[2] and f" {100 * (row.acceptance_rate or 0):.0f}% " in lines[3]


def test_quality_of_a_changed_model_is_judged_against_a_margin(make_run: MakeRun) -> None:
    run = read_run(make_run(**SHARED, questions=8))
    for row in run.rows:
        odd = int(row.question_id[-1]) % 2
        by_method = {"ss-shared": -0.1, "ss-shared-ar": 0.011 if odd else -0.011}
        row.quality = 0.5 + by_method.get(row.method, 0.0)
    text = reported(run)
    assert re.search(r"ss-shared: quality −0\.10 \(.*\), inferior to ar \(margin 0\.02\)", text)
    assert "ss-shared-ar: quality" in text and "non-inferior to ar (margin 0.02)" in text


def test_a_width_that_the_user_states_is_kept_without_a_terminal(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = read_run(make_run(labels=("ar", "medusa"), questions=3, turns=2))
    for columns, missing in (("60", True), ("200", False)):
        monkeypatch.setenv("COLUMNS", columns)
        console = Console(file=io.StringIO(), no_color=True)
        print_verbose(analyse(run), console)
        assert console.width == int(columns)
        assert ("not shown in a terminal" in console.file.getvalue()) == missing  # type: ignore[attr-defined]
