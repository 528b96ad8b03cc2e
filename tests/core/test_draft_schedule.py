"""The server that is recommended by requests in flight, and what shows it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specbench_ss.cli.printing import print_concurrency
from specbench_ss.reports.html.report import HtmlReport, page
from specbench_ss.reports.summary_files import JsonReport, MarkdownReport
from specbench_ss.results.analysis import Results, analyse
from specbench_ss.results.concurrency import concurrency_rows
from specbench_ss.results.draft_schedule import DraftSchedule, ScheduleEntry, draft_schedule
from specbench_ss.runs.records import ConcurrencyResult, Run, SampleRecord, Steps
from specbench_ss.runs.run_dir import read_run
from tests.cli import printed
from tests.conftest import MakeRun

Speedups = dict[int, dict[int, tuple[float, bool]]]  # by requests in flight and k: speedup, suitable
SINGLE = "e: k=4 at 1 in flight (4 in flight measured once: --repeats 3)"
PACE = {"e-k2": {1: 1.3, 4: 1.3}, "e-k4": {1: 1.8, 4: 0.7}, "n": {1: 1.1, 4: 0.9}}


def entries(group: str, speedups: Speedups) -> list[ScheduleEntry]:
    return [
        ScheduleEntry(level, f"{group}-k{k}", group, k, speedup, (0.9 * speedup, 1.1 * speedup), suitable)
        for level, of in speedups.items()
        for k, (speedup, suitable) in of.items()
    ]


def schedule(speedups: Speedups, *single: int) -> DraftSchedule:
    return DraftSchedule(tuple(speedups), tuple(entries("e", speedups)), ("e",), single)


OFF = {2: (1.1, False), 4: (0.8, False)}
SHORT = {2: (1.3, True), 4: (1.4, True)}
LONG = {2: (1.2, False), 4: (1.5, True)}


@pytest.mark.parametrize(
    ("speedups", "text", "ranges"),
    [
        (
            {1: LONG, 4: SHORT, 8: OFF},
            "e: k=4 at 1 in flight, k=2 at 4, off from 8",
            [[1, 3, 4], [4, 7, 2], [8, 8, 0]],
        ),
        ({1: LONG}, "e: k=4 at 1 in flight", None),
        ({1: LONG, 4: {}}, "e: k=4 at 1 in flight, off from 4", [[1, 3, 4], [4, 4, 0]]),
        ({1: LONG, 2: OFF, 4: SHORT}, "e: k=4 at 1 in flight, off at 2, k=2 at 4", [[1, 1, 4], [2, 3, 0], [4, 4, 2]]),
        ({4: LONG, 8: LONG, 16: OFF}, "e: k=4 at 4 to 8 in flight, off from 16", [[1, 15, 4], [16, 16, 0]]),
    ],
)
def test_the_smallest_suitable_k_is_chosen(speedups: Speedups, text: str, ranges: list[list[int]] | None) -> None:
    found = schedule(speedups)
    assert found.text() == text
    longest = max(choice.k or 0 for choice in found.choices.values() if choice)
    stated = {} if ranges is None else {"num_speculative_tokens_per_batch_size": ranges}
    assert found.vllm() == {"e": {"num_speculative_tokens": longest, **stated}}


def test_vllm_reads_the_choice_of_every_measured_level() -> None:
    """Of its ranges, vLLM requires that the first starts at 1 and that none overlap; the last k goes on."""
    found = schedule({2: LONG, 3: SHORT, 16: OFF, 32: OFF, 64: SHORT})
    ranges = found.vllm()["e"]["num_speculative_tokens_per_batch_size"]
    assert ranges[0][0] == 1 and all(start <= end for start, end, _ in ranges)
    assert all(before[1] < after[0] for before, after in zip(ranges, ranges[1:], strict=False))
    for level, choice in found.choices.items():
        k = next(k for start, _, k in reversed(ranges) if start <= level)
        assert k == (choice.k if choice else 0)


def test_nothing_is_recommended_without_a_significant_gain() -> None:
    found = schedule({1: OFF, 4: OFF})
    assert found.text().startswith("off at 1 to 4 in flight") and not found.vllm()
    assert found.as_dict()["choices"] == {1: None, 4: None}


def test_the_best_server_of_all_entries_of_the_file_is_chosen() -> None:
    plain_n = ScheduleEntry(4, "n", "n", None, 1.45, (1.3, 1.6), True)
    found = DraftSchedule((1, 4), (*entries("e", {1: LONG, 4: SHORT}), plain_n), ("e",))
    assert found.text() == "e k=4 at 1 in flight, n at 4"
    assert found.vllm()["e"]["num_speculative_tokens_per_batch_size"] == [[1, 3, 4], [4, 4, 2]], "of e alone"


def served(
    make_run: MakeRun, pace: dict[str, dict[int, float]], software: str = "vLLM", questions: int = 3, repeats: int = 2
) -> Run:
    """A run of servers with these throughputs over the first one's, and n, which states no k. Its repeats are equal."""
    run = read_run(make_run(labels=("ar",), questions=questions))
    plain, entry = run.rows, run.manifest["methods"][0] | {"resolved": {}, "served": {"software": software}}
    run.rows, run.steps = [], Steps.from_samples({})
    run.manifest["methods"] = [entry | {"label": label} for label in ("ar", *pace)]
    run.manifest["config"] |= {"endpoints": [_endpoint(label) for label in ("ar", *pace)], "concurrency": [4]}
    for label, at in {"ar": dict.fromkeys((1, 4), 1.0), **pace}.items():
        run.rows += [_row(row, label, at[1], i) for i, row in enumerate(plain)]
        rows = [_row(row, label, at[4] / 2, i, 4) for i, row in enumerate(plain)]
        run.requests += rows
        wall_s = sum(row.wall_s or 0.0 for row in rows) / 4
        steps = sum(row.later for row in rows) // (1 if label == "ar" else 2)
        run.concurrency.append(ConcurrencyResult(label, 4, 0, 0.0, wall_s, wall_s, len(rows), steps))
    if repeats > 1:
        repeated(run, run)
    return run


def repeated(run: Run, other: Run) -> None:
    """Add a repeat with the times of another run."""
    run.manifest["config"]["repeats"] = 2
    run.rows += [replace(row, repeat=1) for row in other.rows]
    run.requests += [replace(row, repeat=1) for row in other.requests]
    run.concurrency += [replace(level, repeat=1) for level in other.concurrency]


def _endpoint(label: str) -> dict[str, Any]:
    group, _, k = label.partition("-k")
    return {"label": label, "url": "", "group": group, "k": int(k) if k else None}


def _row(row: SampleRecord, label: str, times: float, number: int, concurrency: int | None = None) -> SampleRecord:
    """The row with another time, a little more or less in turn."""
    times *= 1 if label == "ar" else 1 + 0.03 * (-1) ** number
    parts = {name: getattr(row, name) / times for name in ("prefill_s", "decode_s", "wall_s")}
    return replace(row, method=label, counted="usage", concurrency=concurrency, **parts)


@pytest.mark.parametrize(("longer", "chosen"), [(1.55, "e-k4"), (1.505, "e-k2")])
def test_the_smaller_k_is_chosen_unless_it_is_slower_in_a_paired_comparison(
    longer: float, chosen: str, make_run: MakeRun
) -> None:
    """The intervals over the baseline overlap in both cases."""
    run = served(make_run, {"e-k2": dict.fromkeys((1, 4), 1.5), "e-k4": dict.fromkeys((1, 4), longer)})
    rows = {(row.method, row.concurrency): row.speedup_interval or (0.0, 0.0) for row in concurrency_rows(run)}
    assert all(rows["e-k2", level][1] > rows["e-k4", level][0] for level in (1, 4))
    assert {level: choice and choice.method for level, choice in _choices(run, set()).items()} == {1: chosen, 4: chosen}


def test_a_server_that_is_faster_in_one_repeat_alone_is_not_chosen(make_run: MakeRun) -> None:
    """Repeats of one request at a time are in one process, so the interval does not show it, that of a level does."""
    paces = ({**PACE, "e-k2": {1: 1.3, 4: at}, "e-k4": {1: at, 4: 0.7}} for at in (3.0, 0.95))
    run, other = (served(make_run, pace, repeats=1) for pace in paces)
    repeated(run, other)
    found = draft_schedule(run, concurrency_rows(run), set())
    assert found and found.text() == "e: k=2 at 1 in flight, off from 4"
    lows = {(entry.method, entry.concurrency): entry.speedup_interval[0] for entry in found.entries}
    assert lows["e-k4", 1] > 1 and lows["e-k2", 4] < 0.1


def test_loads_that_were_measured_once_have_no_interval_and_no_choice(make_run: MakeRun) -> None:
    run = served(make_run, PACE, repeats=1)
    rows = {(row.method, row.concurrency): row for row in concurrency_rows(run)}
    assert rows["e-k2", 1].speedup_interval and rows["e-k2", 1].comparison == "faster"
    once = rows["e-k2", 4]
    assert once.speedup == pytest.approx(1.3, abs=0.1) and once.throughput_ratio
    assert once.speedup_interval is None and once.comparison == "insufficient data"
    results = analyse(run)
    text = shown(results)
    assert "? 1.3" in text and "a load that was measured once" in text and "concurrency-verdicts" not in text
    assert results.draft_schedule and results.draft_schedule.text() == SINGLE
    assert not results.draft_schedule.vllm() and "vllm " not in text, "it sets a k for all batch sizes"
    assert results.draft_schedule.as_dict()["single_repeat_levels"] == [4]


@pytest.mark.parametrize("lost", [("ar",), ("e-k2",), ("ar", "e-k2", "e-k4", "n")])
def test_a_level_of_which_a_planned_repeat_is_missing_has_no_choice(lost: tuple[str, ...], make_run: MakeRun) -> None:
    """An interrupted run has as many planned repeats as a complete one."""
    run = served(make_run, PACE)
    run.requests = [row for row in run.requests if not (row.repeat and row.method in lost)]
    run.concurrency = [level for level in run.concurrency if not (level.repeat and level.method in lost)]
    found = draft_schedule(run, concurrency_rows(run), set())
    assert run.repeats == 2 and found and found.text() == SINGLE and not found.vllm()


def test_levels_above_the_last_choice_are_not_off_if_one_ran_once() -> None:
    assert schedule({1: LONG, 4: OFF}).text() == "e: k=4 at 1 in flight, off from 4"
    text = schedule({1: LONG, 4: OFF}, 8, 16).text()
    assert text == "e: k=4 at 1 in flight, off at 4 (8, 16 in flight measured once: --repeats 3)"


def test_a_baseline_that_drafts_has_no_schedule(make_run: MakeRun) -> None:
    stated, counted = served(make_run, PACE), served(make_run, PACE)
    stated.manifest["config"]["endpoints"][0]["k"] = 2
    counted.rows = [replace(row, draft_nodes=3) for row in counted.rows]
    for run in (stated, counted):
        assert draft_schedule(run, concurrency_rows(run), set()) is None


def test_a_level_that_no_server_finished_is_off(make_run: MakeRun) -> None:
    run = served(make_run, PACE)
    run.requests = [row for row in run.requests if row.method == "ar"]
    run.concurrency = [level for level in run.concurrency if level.method == "ar"]
    assert {level: choice and choice.method for level, choice in _choices(run, set()).items()} == {1: "e-k4", 4: None}


def shown(results: Results) -> str:
    return printed(print_concurrency, results)


TEXT = "e: k=4 at 1 in flight, k=2 at 4"
RANGES = {"num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": [[1, 3, 4], [4, 4, 2]]}


def test_the_terminal_has_intervals_tau_and_the_schedule(make_run: MakeRun) -> None:
    results = analyse(served(make_run, PACE))
    lines = shown(results).splitlines()
    head = next(line for line in lines if "load" in line and "method" in line)
    assert "× baseline" in head and "95% CI" in head and " τ " in head and "failed" not in head
    *_, text, given = lines
    assert text == f"schedule {TEXT}" and max(map(len, lines[:-3])) <= 120
    assert any(" e-k2 " in line and " 2.0" in line and "–" in line for line in lines)
    assert json.loads(given.removeprefix("vllm     e: ")) == RANGES
    other = analyse(served(make_run, PACE, "llama.cpp"))
    assert shown(other).splitlines()[-1] == text


def test_the_table_with_limits_fits_into_120_characters(make_run: MakeRun) -> None:
    run = served(make_run, {f"eagle3-qwen3-8b-k{k}": {1: 1.3, 4: 0.9} for k in (2, 4)})
    run.manifest["goodput"] = {"ttft": 500.0}
    run.requests[-1].status = "failed"
    text = shown(analyse(run))
    head = next(line for line in text.splitlines() if "load" in line and "method" in line)
    assert {"speedup", "95% CI", "τ", "ms/token", "goodput", "SLO", "failed"} <= {
        part.strip() for part in head.split("  ")
    }
    assert "…" not in text


def test_a_server_alone_is_not_compared_with_itself(make_run: MakeRun) -> None:
    results = analyse(served(make_run, {}))
    text = shown(results)
    assert "tokens/s" in text and "baseline" not in text and "schedule" not in text
    assert not any("baseline" in column.title for column in page(results)["in_flight"].columns)


def test_every_report_has_the_schedule(make_run: MakeRun, tmp_path: Path) -> None:
    results = analyse(served(make_run, PACE))
    table = page(results)["draft_schedule"]
    assert [column.title for column in table.columns] == ["server", "1 in flight", "4 in flight"]
    bold = {row[0].sort: [cell.strong for cell in row[1:]] for row in table.rows}
    assert bold == {"e-k2": [False, True], "e-k4": [True, False], "n": [False, False]}
    assert all(cell.small and "–" in cell.small[0] for row in table.rows for cell in row[1:])
    assert table.notes[0] == f"{TEXT}." and json.dumps(RANGES) in table.notes[1]
    HtmlReport().write(results, tmp_path / "page.html")
    assert 'id="draft-schedule-table"' in (tmp_path / "page.html").read_text()
    assert TEXT in MarkdownReport().content(results).decode()
    made = json.loads(JsonReport().content(results))["draft_schedule"]
    assert made["choices"] == {"1": "e-k4", "4": "e-k2"} and made["vllm"] == {"e": RANGES}
    assert {(entry["concurrency"], entry["method"]) for entry in made["entries"]} == {
        (level, label) for level in (1, 4) for label in PACE
    }


def test_a_schedule_needs_no_concurrency_and_leaves_out_what_is_invalid_or_failed(make_run: MakeRun) -> None:
    run = served(make_run, PACE)
    choices = {level: choice and choice.method for level, choice in _choices(run, set()).items()}
    assert choices == {1: "e-k4", 4: "e-k2"}
    assert [choice and choice.method for choice in _choices(run, {"e-k4"}).values()] == ["e-k2", "e-k2"]
    next(row for row in run.requests if row.method == "e-k2").status = "failed"
    assert [choice and choice.method for choice in _choices(run, set()).values()] == ["e-k4", None]
    run.concurrency, run.requests = [], []
    assert [choice and choice.method for choice in _choices(run, set()).values()] == ["e-k4"]


def test_open_loops_are_not_in_the_schedule(make_run: MakeRun) -> None:
    run = served(make_run, PACE)
    run.requests += [replace(row, concurrency=None, rate=2.0) for row in run.requests]
    run.concurrency += [replace(level, concurrency=None, rate=2.0) for level in run.concurrency]
    assert [*_choices(run, set())] == [1, 4]


def _choices(run: Run, invalid: set[str]) -> dict[int, ScheduleEntry | None]:
    found = draft_schedule(run, concurrency_rows(run), invalid)
    assert found
    return found.choices


@pytest.mark.parametrize(("labels", "questions"), [(("e-k2", "n"), 3), (("e-k2", "e-k4"), 0)])
def test_without_several_k_or_enough_questions_there_is_no_schedule(
    make_run: MakeRun, labels: tuple[str, ...], questions: int
) -> None:
    run = served(make_run, {label: PACE[label] for label in labels}, questions=questions or 3)
    if not questions:
        few = set(list(dict.fromkeys(row.question_id for row in run.rows))[:3])
        run.rows = [row for row in run.rows if row.question_id in few]
        run.requests = [row for row in run.requests if row.question_id in few]
    assert draft_schedule(run, concurrency_rows(run), set()) is None


def test_outputs_at_load_are_compared_with_the_baselines_of_one_request_at_a_time(make_run: MakeRun) -> None:
    run = served(make_run, PACE)
    changed = next(row for row in run.requests if row.method == "e-k2" and not row.turn)
    changed.text, changed.token_ids = changed.text + " more", None
    of_first_turns = [row for row in run.of("ar") if not row.turn]
    rows = {(row.method, row.concurrency): row.same_output for row in concurrency_rows(run)}
    assert rows["ar", 1] is None and rows["ar", 4] == rows["e-k4", 4] == 1
    assert rows["e-k2", 4] == pytest.approx(1 - 1 / len(of_first_turns))
    run.manifest["config"]["temperature"] = 0.7
    assert {row.same_output for row in concurrency_rows(run)} == {None}
