"""The first screen, the matrix and their drawings: intervals where there are some, order, and what to believe."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specbench_ss.reports.html import speed
from specbench_ss.reports.html.report import page as page_of
from specbench_ss.results.analysis import analyse
from specbench_ss.runs.run_dir import read_run
from specbench_ss.stats.intervals import FEWEST
from specbench_ss.suite import Question
from tests.conftest import MakeRun


def test_methods_are_ranked_by_speedup_and_invalid_ones_come_last(make_run: MakeRun) -> None:
    results = analyse(read_run(make_run(labels=("ar", "medusa", "ss"), categories=("qa",), questions=8)))
    speeds = {row.method: row.speedup or 0 for row in results.overall}
    rows = page_of(results)["ranking"]
    assert [row.label for row in rows] == [*sorted(speeds, key=lambda label: -speeds[label])]
    assert [row.rank for row in rows] == ["1–2", "1–2", ""] and rows[-1].label == "ar"
    best = rows[0].label
    results.rows = [
        replace(row, comparison="invalid", speedup=None, speedup_interval=None) if row.method == best else row
        for row in results.rows
    ]
    last = page_of(results)["ranking"][-1]
    assert (
        last.label == best
        and last.cells["speedup"] == "invalid"
        and last.rank == ""
        and last.tags[0] == ("invalid", "bad")
    )


def test_decode_speedup_is_tau_over_relative_step_time(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=("ar", "ss"), categories=("qa",), questions=8))
    row = next(r for r in page_of(analyse(run))["ranking"] if r.label == "ss")
    keys = ("mean_acceptance_length", "relative_step_time", "decode_speedup")
    tau, step_time, decode = (float(row.cells[key].removesuffix("×")) for key in keys)
    assert tau / step_time == pytest.approx(decode, rel=0.02)


def test_what_is_wrong_with_a_method_is_its_first_badge(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=("ar", "ss"), categories=("qa",), questions=8, failing=("ss",), verdict="mismatch"))
    row = next(row for row in page_of(analyse(run))["ranking"] if row.label == "ss")
    assert [kind for _, kind in row.tags[:2]] == ["bad", "bad"] and row.icon == "✕"
    assert {text for text, kind in row.tags if kind == "bad"} >= {"1 failed", "7 mismatches of 7"}


def test_a_cell_of_the_matrix_has_its_interval_and_is_tinted_only_where_it_is_sure(make_run: MakeRun) -> None:
    results = analyse(read_run(make_run(labels=("ar", "ss", "ar[n=1]"), categories=("qa", "writing"), questions=8)))
    table, cells = page_of(results)["matrix"], {(row.method, row.task): row for row in results.rows}
    assert {"faster", "not significant"} <= {row.comparison for row in cells.values()}
    assert [column.title for column in table.columns] == ["method", "overall", "qa", "writing"]
    for row in table.rows:
        for cell, task in zip(row[1:], ("overall", "qa", "writing"), strict=True):
            of = cells[row[0].text, task]
            assert bool(cell.tint) == (of.comparison in ("faster", "slower"))
            assert cell.note.startswith(f"{of.method}, {task}: ") and ("95% CI" in cell.note) == (of.method != "ar")


def test_the_baseline_has_one_word_for_its_output_with_repeats_and_without(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=("ar", "ss"), categories=("qa",), questions=2))
    for verdicts in (
        run.output_match,
        [type(s)(s.question_id, s.turn, "ar", s.repeat, s.verdict) for s in run.output_match],
    ):
        run.output_match = verdicts
        table = page_of(analyse(run))["everything"]
        column = [c.title for c in table.columns].index("output")
        assert {row[column].text for row in table.rows if row[1].text == "ar"} == {"baseline"}


def test_a_value_without_an_interval_is_marked_and_is_not_in_the_task_map(make_run: MakeRun) -> None:
    made = page_of(analyse(read_run(make_run(labels=("ar", "ss"), categories=("qa", "rag"), questions=2))))
    cells = [row[2] for row in made["everything"].rows if row[1].text == "ss" and row[0].text != "overall"]
    assert cells and all(cell.text.startswith("? ") and not cell.strong for cell in cells)
    assert any(note.startswith("? no confidence interval") for note in made["everything"].notes)
    assert made["matrix"] is None and any("per task" in text for text in made["absent"])


def test_tasks_of_mt_bench_are_one_column_that_unfolds(make_run: MakeRun) -> None:
    results = analyse(read_run(make_run(labels=("ar", "ss"), categories=("qa", "writing", "stem"), questions=6)))
    table, rows = page_of(results)["matrix"], {(row.method, row.task): row for row in results.rows}
    titles = ["method", "overall", "chat (as MT-Bench)", "writing", "stem", "qa"]
    assert [c.title for c in table.columns] == titles
    results.manifest["suite"]["edition"] = "official"
    assert page_of(results)["matrix"].columns[2].title == "MT-Bench"
    assert [c.part for c in table.columns] == [False, False, False, True, True, False]
    assert [c.unfolds for c in table.columns].index(True) == 2
    both = [rows["ss", task].speedup for task in ("writing", "stem")]
    group = next(row for row in table.rows if row[0].text == "ss")[2]
    assert min(both) <= group.sort <= max(both) and "n 12" in group.note


def test_tasks_with_too_few_questions_are_named_below_the_task_map(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=("ar", "ss"), categories=("qa", "writing", "stem"), questions=3, turns=2))
    assert page_of(analyse(run))["matrix"].notes == [f"Fewer than {FEWEST} questions: writing, stem, qa."]


def test_columns_of_milliseconds_and_of_factors_have_different_titles(make_run: MakeRun) -> None:
    made = page_of(analyse(read_run(make_run(questions=4))))
    of_steps, of_waterfall = ({c.title for c in made[name].columns} for name in ("steps", "waterfall_table"))
    assert of_steps & of_waterfall == {"method"}


def test_questions_stand_below_the_prompts_where_there_are_fewer(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=("ar", "ss"), categories=("qa",), questions=5, turns=2, repeats=2))
    made = page_of(analyse(run))
    table, chips = made["everything"], dict(made["chips"])
    assert {(row[-1].text, *row[-1].small) for row in table.rows} == {("10", "5 questions")}
    assert any("quality is a mean over questions" in note for note in table.notes)
    assert any("every prompt has 2 repeats" in note for note in table.notes)
    assert chips["Number of prompts"] == "10 prompts of 5 questions, 2 repeats"


def test_the_measure_of_quality_of_each_task_is_named() -> None:
    asked = [
        Question("1", "translation", ("a",), (("b",),), "bleu"),
        Question("2", "math_reasoning", ("a",), (("b",),), "numeric"),
        Question("3", "writing", ("a",)),
        Question("4", "qa", ("a",)),
        Question("5", "qa", ("b",)),
    ]
    text = "Quality is bleu for translation, numeric for math reasoning; no score for writing and qa"
    assert speed.scored_by(asked, {"translation", "math_reasoning"}) == text
    assert speed.scored_by(asked[2:3], {"qa"}) == "No score for writing"
    assert speed.scored_by(asked[:1], set()) == "No score for translation"
    assert speed.scored_by([], set()) == ""


def test_the_places_that_a_method_may_have_stand_below_its_place(make_run: MakeRun) -> None:
    found = {row.label: row for row in page_of(analyse(read_run(make_run())))["ranking"]}
    assert {row.rank for row in found.values()} == {"", "1", "2"}, "ss and medusa are far apart"
    run = read_run(make_run(labels=("ar", "ar[n=1]", "ar[n=2]")))
    found = {row.label: row for row in page_of(analyse(run))["ranking"]}
    assert {label: row.rank for label, row in found.items()} == {"ar": "", "ar[n=1]": "1–2", "ar[n=2]": "1–2"}


def test_a_method_slower_than_the_baseline_has_no_rank(make_run: MakeRun) -> None:
    results = analyse(read_run(make_run()))
    results.rows = [
        replace(row, comparison="slower", speedup=0.9) if row.method == "medusa" else row for row in results.rows
    ]
    ranks = {row.label: row.rank for row in page_of(results)["ranking"]}
    assert ranks == {"ss": "1", "medusa": "–", "ar": ""}


def test_the_status_of_every_method_shows_that_all_samples_are_noisy(make_run: MakeRun) -> None:
    run = read_run(make_run())
    assert {row.icon for row in page_of(analyse(run))["ranking"] if row.rank} == {"✓"}
    for row in run.rows:
        row.noise_reason = "other processes used 50% of the CPU"
    assert {row.icon for row in page_of(analyse(run))["ranking"] if row.rank} == {"!"}


def test_drafted_nodes_per_step_stand_in_the_ranking(make_run: MakeRun) -> None:
    found = {row.label: row.nodes for row in page_of(analyse(read_run(make_run())))["ranking"]}
    assert found == {"ss": "12.0", "medusa": "12.0", "ar": "–"}


def test_nodes_and_training_of_each_method_stand_in_a_table(make_run: MakeRun) -> None:
    run = read_run(make_run())
    run.manifest["methods"][1]["training_info"] = {
        "tokens": 1024, "steps": 8, "lr": 0.01, "regenerate_responses": True, "parameters": 7
    }  # fmt: skip
    run.manifest["methods"][2]["training_info"] = {"searched": {"tokens": 12345, "made_of": "answers"}}
    bounded = read_run(make_run())
    bounded.manifest["methods"][1]["training_info"] = {"token_positions": 2048}
    assert "≤ 2,048" in [cell.text for row in page_of(analyse(bounded))["budgets"].rows for cell in row]
    rows = {row[0].text: [cell.text for cell in row[1:]] for row in page_of(analyse(run))["budgets"].rows}
    assert rows["ss"][2:] == ["7", "1,024", "8", "0.01", "the model's outputs", ""]
    assert rows["medusa"][6] == "datastore of 12,345 tokens: answers" and rows["ar"][6] == "not recorded"
