"""The speedup chart: whiskers where there is an interval, and only there."""

from __future__ import annotations

from specbench_ss.reports.html import bars, run_record, speed
from specbench_ss.reports.html.page_parts import Chart
from specbench_ss.reports.html.palette import styles
from specbench_ss.results.summary import summarise
from specbench_ss.runs.rows import Run
from specbench_ss.runs.run_directory import read_run
from tests.conftest import MakeRun


def chart_of(run: Run) -> Chart:
    return bars.speedups(speed.by_task(summarise(run)), styles(run.labels))


def drawn(chart: Chart) -> set[tuple[str, str, bool, bool]]:
    """Every bar: method, task, whether it has a whisker, whether it is filled."""
    return {
        (trace["name"], x, "error_y" in trace, trace["marker"]["pattern"]["fillmode"] == "overlay")
        for trace in chart.data
        for x in trace["x"]
    }


def test_a_bar_without_an_interval_is_hollow_and_has_no_whisker(make_run: MakeRun) -> None:
    """Beside one that has: 2 questions of writing give no interval, 2 + 2 of both tasks do."""
    run = read_run(make_run(labels=("ar", "ss"), categories=("writing", "qa"), questions=2))
    chart = chart_of(run)
    assert drawn(chart) == {
        ("ss", "<b>overall</b>", True, True),
        ("ss", "writing", False, False),
        ("ss", "qa", False, False),
    }
    filled, hollow = chart.data
    for side in ("array", "arrayminus"):
        assert len(filled["error_y"][side]) == len(filled["y"])
        assert all(length > 0 for length in filled["error_y"][side])
    assert (filled.get("showlegend", True), hollow["showlegend"]) == (True, False)
    assert filled["offsetgroup"] == hollow["offsetgroup"]
    assert chart.layout["xaxis"]["categoryarray"] == ["<b>overall</b>", "writing", "qa"]
    assert all("no interval" in text for text in hollow["customdata"])
    assert "hatched" in chart.note


def test_bars_with_intervals_are_all_filled_and_the_caption_speaks_of_no_others(make_run: MakeRun) -> None:
    chart = chart_of(read_run(make_run(labels=("ar", "ss"), categories=("qa",), questions=8)))
    assert {bar[2:] for bar in drawn(chart)} == {(True, True)}
    assert "hatched" not in chart.note


def test_where_nothing_has_an_interval_every_method_is_still_in_the_legend(make_run: MakeRun) -> None:
    chart = chart_of(read_run(make_run(categories=("qa",), questions=2)))
    assert [(trace["name"], trace["showlegend"]) for trace in chart.data] == [("ss", True), ("medusa", True)]


def test_the_reference_has_one_word_for_its_output_with_repeats_and_without(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=("ar", "ss"), categories=("qa",), questions=2))
    again = [row for row in summarise(run) if row.method == "ar"]
    assert all(not row.sameness for row in again)
    run.sameness = [type(s)(s.question_id, s.turn, "ar", s.repeat, s.verdict) for s in run.sameness]
    for compared in (again, [row for row in summarise(run) if row.method == "ar"]):
        table = speed.everything(speed.by_task(compared), styles(["ar"]), run.manifest["config"])
        column = [c.title for c in table.columns].index("output")
        assert {row[column].text for row in table.rows} == {"reference"}


def test_a_value_without_an_interval_is_marked_in_both_tables_and_the_mark_explained(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=("ar", "ss"), categories=("qa",), questions=2))
    cells, look = speed.by_task(summarise(run)), styles(run.labels)
    for table, column in (
        (speed.matrix(cells, look, run.manifest["config"]), 2),
        (speed.everything(cells, look, run.manifest["config"]), 2),
    ):
        shown = [row[column] for row in table.rows if row[1].text != "ar"]
        assert shown and all(cell.text.startswith("? ") and not cell.strong for cell in shown)
        assert any(note.startswith("? no interval") for note in table.notes)


def test_questions_stand_below_the_prompts_where_there_are_fewer(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=("ar", "ss"), categories=("qa",), questions=5, turns=2, repeats=2))
    cells, look = speed.by_task(summarise(run)), styles(run.labels)
    for table in (
        speed.matrix(cells, look, run.manifest["config"]),
        speed.everything(cells, look, run.manifest["config"]),
    ):
        assert {(row[-1].text, *row[-1].small) for row in table.rows} == {("10", "5 questions")}
        assert any("quality is a mean over questions" in note for note in table.notes)
        assert any("every prompt 2 times" in note for note in table.notes)
    help = {column.title: column.help for column in speed.everything(cells, look, run.manifest["config"]).columns}
    assert "Mean over questions, not over prompts" in help["quality"]
    assert dict(run_record.chips(run))["Repeats"] == "2"
    assert "10 prompts (5 questions)" in dict(run_record.chips(run))["Suite"]
