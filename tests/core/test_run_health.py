"""Checks of a run: ok only where something was looked at, the same in the terminal and the report, and never hidden."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from specbench_ss.bench import timed_sample
from specbench_ss.cli.printing import print_short, print_verbose
from specbench_ss.reports.html.report import page as page_of
from specbench_ss.results.analysis import analyse
from specbench_ss.results.checks import checks, often_noisy
from specbench_ss.results.findings import Check
from specbench_ss.results.ranking import headline, rank_ranges
from specbench_ss.results.sample_checks import comparable, spread, unstable
from specbench_ss.results.summary import OVERALL, summarise
from specbench_ss.runs.environment import is_of_times
from specbench_ss.runs.records import Run
from specbench_ss.runs.run_dir import read_run, without_verdict
from specbench_ss.stats.intervals import compare
from tests.cli import printed
from tests.conftest import MakeRun

STEADY: dict[str, Any] = {"labels": ("ar", "ss"), "categories": ("qa",), "questions": 8}


def made_of(run: Run) -> dict[str, Check]:
    return {check.name: check for check in checks(run, summarise(run))}


@pytest.mark.parametrize("model", ["m", "m-fp8"])
def test_outputs_of_another_served_model_may_differ(model: str, make_run: MakeRun) -> None:
    run = read_run(make_run(labels=("ar", "ss"), questions=8, verdict="mismatch"))
    for entry, served in zip(run.manifest["methods"], ("m", model), strict=True):
        entry |= {"resolved": {"url": "u", "model": served}, "served": {"software": "vLLM"}}
    row = next(row for row in summarise(run) if row.method == "ss" and row.task == OVERALL)
    assert (row.comparison == "invalid") == (row.speedup is None) == (model == "m")
    assert row.health[0].kind == "mismatch"
    assert reported(run)[0].startswith("Unreliable (mismatch)")


def reported(run: Run) -> list[str]:
    return printed(print_verbose, analyse(run), width=110).splitlines()


@pytest.fixture
def steady(make_run: MakeRun) -> Run:
    """A run whose reference takes the same time for every step, on a machine that was read, with nothing else on it."""
    run = read_run(make_run(**STEADY))
    for row in run.rows:
        row.decode_s = 0.01 * (row.steps or 0)
        row.noise_reason, row.host_foreign_share = "", 0.01
    return run


def fail(run: Run, *labels: str) -> None:
    for row in (row for row in run.rows if row.method in labels):
        row.status, row.error = "failed", "RuntimeError: no"


def warn(text: str) -> Callable[[Run], None]:
    return lambda run: run.manifest.update(warnings=[text])


@pytest.mark.parametrize(
    ("change", "state"),
    [
        (lambda run: None, "ok"),
        (lambda run: setattr(run, "rows", [row for row in run.rows if row.question_id < "qa-2"]), "not checked"),
        (lambda run: fail(run, "ar"), "not checked"),
        (warn("the machine is busy (load 6.1 on 2 cores): times will be unstable"), "warning"),
        (warn("ss: times had not settled"), "warning"),
        (warn("the answer holds a word sometimes, and was cut three times"), "ok"),
        (lambda run: setattr(run.rows[0], "noise_reason", "2 other processes on the device"), "warning"),
    ],
)
def test_timing_is_called_stable_only_where_it_was_seen(steady: Run, change: Callable[[Run], None], state: str) -> None:
    change(steady)
    timing = made_of(steady)["timing"]
    assert timing.state == state and timing.sentence.startswith("Timing is stable") == (state == "ok")
    assert any("Timing is stable" in line for line in reported(steady)) is False, "only what is not ok is printed"


def test_passes_that_were_not_replayed_are_reported_by_method_and_reason(steady: Run) -> None:
    assert "cuda-graphs" not in made_of(steady)  # nothing was to be replayed
    for row in steady.rows:
        row.n_eager_fallbacks, row.eager_fallback_reason = 0, ""
    assert made_of(steady)["cuda-graphs"].state == "ok"
    for row in steady.rows:
        if row.method == "ss" and row.ok:
            row.n_eager_fallbacks, row.eager_fallback_reason = 200, "more than 128 rows"
    check = made_of(steady)["cuda-graphs"]
    assert check.state == "warning"
    assert "eagerly" in check.sentence and check.sentence.endswith(": 1,600 of ss (more than 128 rows).")
    assert "1,600 of ss (more than 128 rows)" in " ".join(reported(steady))


def test_timing_without_a_good_sample_is_not_checked_nor_are_its_numbers(steady: Run) -> None:
    fail(steady, "ar", "ss")
    steady.output_match = []
    made = made_of(steady)
    assert made["timing"].state == made["impossible"].state == made["mismatch"].state == "not checked"
    assert made["failed"].state == "wrong"


def test_a_speedup_that_cannot_be_kept_against_tau_is_not_checked(make_run: MakeRun) -> None:
    assert (
        made_of(read_run(make_run(labels=("ar", "ss"), categories=("qa",), questions=1)))["lower-bound"].state
        == "not checked"
    )
    assert made_of(read_run(make_run(**STEADY)))["lower-bound"].state == "ok"


def test_a_lead_within_what_plain_decoding_seems_to_gain_is_not_reported_without_a_word(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=("ar", "ss", "ss-shared", "ss-shared-ar"), references={"ss-shared": "ss-shared-ar"}))
    bounds = {"ss": (1.05, 1.30), "ss-shared": (1.12, 1.20), "ss-shared-ar": (0.97, 1.08)}
    speed = {"ss": 1.25, "ss-shared": 1.15, "ss-shared-ar": 1.01}
    rows = [
        replace(r, speedup=speed[r.method], speedup_interval=bounds[r.method], comparison=compare(bounds[r.method]))
        if r.method in bounds
        else r
        for r in summarise(run)
    ]
    made = {check.name: check for check in checks(run, rows)}
    assert made["baseline-noise"].state == "warning" and made["baseline-noise"].lines == ("ss: 1.25× (1.05–1.30)",)
    assert "ss-shared-ar, which drafts nothing, reaches 1.08×" in headline(rows, list(made.values()), {})
    higher = [replace(row, speedup_interval=(1.09, 1.30)) if row.method == "ss" else row for row in rows]
    made = {check.name: check for check in checks(run, higher)}
    assert made["baseline-noise"].state == "ok" and "noise" not in headline(higher, list(made.values()), {})
    without = [row for row in rows if row.method != "ss-shared-ar"]
    assert "baseline-noise" not in {check.name for check in checks(run, without)}


def test_the_terminal_and_the_report_state_the_same(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=("ar", "ss", "medusa"), questions=2, failing=("medusa",), verdict="mismatch"))
    run.manifest["warnings"] = ["the machine is busy: times will be unstable"]
    made = checks(run, summarise(run))
    lines = reported(run)
    page = page_of(analyse(run))
    assert page["checks"][: len(made)] == made
    for check in made:
        shown = check.state != "ok" and (check.name, check.state) != ("invalid", "not checked")  # there are no repeats
        assert any(check.sentence in line for line in lines) == shown
    assert lines[0].startswith(page["headline"])


def test_what_is_wrong_stands_on_the_first_screen_and_in_the_last_lines(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=("ar", "ss", "medusa"), questions=2, failing=("medusa",), verdict="mismatch"))
    alerts = page_of(analyse(run))["alerts"]
    assert [alert.state for alert in alerts[:2]] == ["wrong", "wrong"]
    assert any("out of luck" in line for alert in alerts for line in alert.lines)
    text = "\n".join(reported(run))
    assert "Samples failed" in text and "without a numerical tie" in text
    assert reported(run)[0].startswith("Unreliable (failed, mismatch): The results of ss and medusa are invalid.")


def test_a_good_run_has_no_alert(steady: Run) -> None:
    for method in steady.manifest["methods"]:
        method["stateful"] = method["label"] != "ar"
    assert not page_of(analyse(steady))["alerts"]
    assert not any(line.startswith(("✕", "!", "?")) for line in reported(steady))


def test_a_machine_that_nobody_could_see_is_not_called_quiet(steady: Run) -> None:
    assert made_of(steady)["timing"].state == "ok"
    steady.manifest["model"]["device"] = "cuda"
    assert made_of(steady)["timing"].state == "not checked", "the driver's library was not asked"
    for row in steady.rows:
        row.nvml_sm_mhz = 1500.0
    assert made_of(steady)["timing"].state == "ok"
    steady.rows[3].host_foreign_share = None
    check = made_of(steady)["timing"]
    assert (check.state, "of 1 samples" in check.sentence) == ("not checked", True)
    for row in steady.rows:
        row.noise_reason = None
    assert made_of(steady)["timing"].state == "not checked"


def test_warnings_of_times_are_known_where_they_are_made() -> None:
    stated: list[str] = []
    times, none = itertools.count(), cast(Any, None)
    timed_sample.warm_up(["m"], [[1]], lambda label, prompt, most: float(2 ** next(times)), stated.append, none)
    assert stated and all(map(is_of_times, stated))
    assert is_of_times("earlier sessions of this run had other conditions: torch; times do not compare")


def test_answers_from_memory_are_not_checked_without_greedy_repeats(make_run: MakeRun) -> None:
    once, again = (read_run(make_run(**STEADY, repeats=n)) for n in (1, 2))
    old = made_of(again)["invalid"]
    assert old.state == "not checked", "an old run does not say what its methods remember"
    for run in (once, again):
        for method in run.manifest["methods"]:
            method["stateful"] = False
    assert made_of(once)["invalid"].state == "not checked"
    first = {(row.question_id, row.method): row for row in again.rows if not row.repeat}
    for row in again.rows:
        row.token_ids = first[row.question_id, row.method].token_ids
    assert comparable(again, "ss")
    again.manifest["config"]["temperature"] = 1.0
    assert made_of(again)["invalid"].state == "not checked"
    once.manifest["methods"][1]["stateful"] = True
    assert "invalid" not in made_of(once), "ss says itself that it remembers, and ar drafts nothing"


def test_failures_of_a_run_without_samples_are_not_checked(steady: Run) -> None:
    assert made_of(steady)["failed"].state == "ok"
    steady.rows, steady.output_match = [], []
    assert made_of(steady)["failed"].state == "not checked"


def test_what_was_not_checked_is_verbose(make_run: MakeRun) -> None:
    def short(run: Run) -> str:
        return printed(print_short, analyse(run), width=200)

    run = read_run(make_run(labels=("ar", "ss"), categories=("qa",), questions=2))
    unknown = [check for check in checks(run, summarise(run)) if check.state == "not checked"]
    text = "\n".join(reported(run))
    assert len(unknown) > 2
    assert all((f"· {check.sentence}" in text) == (check.name != "invalid") for check in unknown), "one needs --repeats"
    assert not any(check.sentence in short(run) for check in unknown)
    again = read_run(make_run(labels=("ar", "ss"), categories=("qa",), questions=2, repeats=2))
    assert "repeats from memory was not checked" in short(again)


def test_all_problems_of_times_are_one_check(steady: Run) -> None:
    own = [row for row in steady.rows if row.method == "ss"]
    for share, row in zip((47, 72), own, strict=False):
        row.noise_reason = f"other processes took {share}% of the processor"
    steady.manifest["warnings"] = ["times had not settled after warm-up: ss", "a fan is loud"]
    made = made_of(steady)
    timing = made["timing"]
    assert timing.sentence.startswith("Noisy timing: other processes took 47–72% of the processor in 2 of 16 samples;")
    assert timing.findings == ("noisy", "unstable", "warnings") and made["warnings"].lines == ("a fan is loud",)
    assert any("not settled" in line for line in timing.lines) and not {"noisy", "unstable"} & set(made)
    assert "without these samples the same methods are still significantly faster than ar" in timing.sentence, (
        "six prompts are left without the noisy samples"
    )
    unsure = [replace(r, comparison="not significant") if r.method == "ss" else r for r in summarise(steady)]
    (timing,) = [check for check in checks(steady, unsure) if check.name == "timing"]
    assert "without these samples ss would also be significantly faster" in timing.sentence
    for row in own:
        row.noise_reason = "other processes took 12% of the processor"
    assert "too few samples are left" in made_of(steady)["timing"].sentence
    for row in steady.rows:
        row.noise_reason = "other processes took 12% of the processor"
    assert "idle machine" in made_of(steady)["timing"].sentence


@pytest.mark.parametrize(("relative", "is_short"), [(0.6, True), (1.0, False)])
def test_steps_with_a_draft_that_are_shorter_than_without_are_a_finding(
    steady: Run, relative: float, is_short: bool
) -> None:
    for row in steady.of("ss"):
        row.wall_s = relative * (row.wall_s or 0)
    assert (made_of(steady).get("short-steps") is not None) == is_short


@pytest.mark.parametrize(("key", "tau", "named"), [
    ("drafter_hash", 1.15, True), ("heads_hash", 1.15, False), ("heads_hash", 1.05, True), ("drafter_hash", 1.3, False),
    ("gamma", 1.0, False),
])  # fmt: skip
def test_trained_drafters_that_are_hardly_accepted_are_named(steady: Run, key: str, tau: float, named: bool) -> None:
    steady.entry("ss")["resolved"] = {key: "x"}
    rows = [replace(row, mean_acceptance_length=tau) if row.method == "ss" else row for row in summarise(steady)]
    found = [check for check in checks(steady, rows) if check.name == "weak-drafter"]
    assert bool(found) == named and all("ss (τ" in check.sentence and "embedding" in check.sentence for check in found)


def test_tasks_with_low_quality_outputs_are_named(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=("ar", "ss", "medusa"), categories=("qa", "translation"), questions=8))
    assert "low-quality" not in made_of(run)
    for row in run.rows:
        row.quality = 0.03 if row.category == "translation" else 0.9
    found = made_of(run)["low-quality"]
    assert found.state == "warning" and "translation (0.03)" in found.sentence


def test_context_that_differs_is_no_unstable_timing(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=("ar",), categories=("qa",), questions=16))
    for n, row in enumerate(run.rows):
        row.prompt_tokens, row.decode_s = 100 * n, (row.steps or 1) * 0.001 * (1 + 0.1 * n)
    found = spread(run.rows, True)
    assert found is not None and found.share < 0.01 and not unstable(found)
    for n, row in enumerate(run.rows):
        row.decode_s = (row.decode_s or 0) * (1.5 if n % 2 else 1)
    assert unstable(spread(run.rows, True))
    for row in run.rows:
        row.decode_s = None  # of a server that sends an answer at once
    assert spread(run.rows, True) is None


def test_verdicts_that_are_still_to_come_are_not_missing(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=("ar", "ss"), categories=("qa",), questions=3))
    last, others = run.rows[-1].question_id, run.rows[0].question_id
    run.output_match = [one for one in run.output_match if one.question_id not in (last, others)]
    run.rows = [row for row in run.rows if row.question_id != last or row.method == "ss"]
    run.manifest["status"] = "running"
    assert {row.question_id for row in without_verdict(run)} == {others}
    run.manifest["status"] = "complete"
    assert {row.question_id for row in without_verdict(run)} == {last, others}


def test_methods_with_many_noisy_samples_are_marked(steady: Run) -> None:
    own = [row for row in steady.rows if row.method == "ss"]
    own[0].noise_reason = "other processes took 12% of the processor"
    assert often_noisy(steady) == {"ss"}, "one of eight"
    ranking = page_of(analyse(steady))["ranking"]
    marked = {row.label for row in ranking if any("noisy" in text for text, _ in row.tags)}
    assert marked == {"ss"}
    own[0].noise_reason = ""
    assert not often_noisy(steady)
    next(row for row in steady.rows if row.method == "ar").noise_reason = "other processes took 12% of the processor"
    assert often_noisy(steady) == {"ar", "ss"}, "a speedup is of both"


def test_an_answer_without_a_verdict_is_not_compared_in_an_unfinished_run_too(steady: Run) -> None:
    steady.manifest["status"] = "running"
    steady.output_match = steady.output_match[1:]
    row = next(row for row in summarise(steady) if (row.task, row.method) == ("overall", "ss"))
    assert row.output_match == {"identical": 7, "not compared": 1}
    page = page_of(analyse(steady))
    (output,) = [row.cells["output"] for row in page["ranking"] if row.label == "ss"]
    assert output == "identical, 1 not compared"
    columns = [column.title for column in page["output_match"].columns]
    assert page["output_match"].rows[0][columns.index("not compared")].text == "1"
    assert "uncompared" not in made_of(steady), "it may still come"


def test_an_unfinished_run_states_what_it_found_so_far(steady: Run) -> None:
    def stated() -> str:
        rows = summarise(steady)
        return headline(rows, checks(steady, rows), {})

    whole = stated()
    steady.manifest["status"], steady.manifest["suite"]["prompts"] = "killed", 32
    assert stated() == f"Unfinished (25% of the samples): {whole}"
    steady.rows[1].status, steady.rows[1].error = "failed", "RuntimeError: no"
    assert stated().startswith("Unreliable (incomplete, failed): "), "and more than that"
    steady.rows[1].status, steady.manifest["suite"]["prompts"] = "ok", 8
    steady.manifest["status"] = "complete"
    steady.rows = steady.rows[:-1]
    assert stated().startswith("Unreliable (incomplete): "), "it will not go on"


def test_it_is_stated_of_what_the_times_spread(steady: Run) -> None:
    for i, row in enumerate(row for row in steady.rows if row.method == "ar"):
        row.decode_s = 0.01 * (1 + i % 2) * (row.steps or 0)
    (line,) = made_of(steady)["timing"].lines
    assert line.startswith("ar: its step times over different prompts differ by ") and line.endswith(
        "(interquartile range)"
    )


def stated_of(run: Run) -> str:
    rows = summarise(run)
    return headline(rows, checks(run, rows), rank_ranges(run, rows))


@pytest.mark.parametrize("every", [True, False])
def test_a_method_that_fails_changes_nothing_about_the_others(make_run: MakeRun, every: bool) -> None:
    """Neither where all samples of `ss` failed nor where one did, and it is the fastest by the others."""
    run = read_run(make_run(labels=("ar", "ss", "medusa"), categories=("qa",), questions=8))
    assert stated_of(run).startswith(("ss ", "Highest speedup: ss, "))
    alone = replace(run, rows=[row for row in run.rows if row.method != "ss"])
    alone.output_match = [one for one in run.output_match if one.method != "ss"]
    alone.manifest = {**run.manifest, "methods": [m for m in run.manifest["methods"] if m["label"] != "ss"]}
    for row in run.rows:
        if row.method == "ss" and (every or row.question_id.endswith("-0")):
            row.status, row.error = "failed", "RuntimeError: no"
            run.output_match = [one for one in run.output_match if one.key != row.key]
    assert stated_of(alone).startswith("medusa ")
    assert stated_of(run) == f"{stated_of(alone)} ss failed."
    mine, theirs = (rank_ranges(one, summarise(one)) for one in (run, alone))
    assert mine == theirs
    made, without = made_of(run), made_of(alone)
    assert made["failed"].state == "wrong"
    differ = {name for name in made if made[name].sentence != without[name].sentence}
    if every:  # of the others every check states the same
        assert differ == {"failed", "incomplete"}


def test_failures_of_the_reference_or_of_every_method_concern_the_headline(make_run: MakeRun) -> None:
    for failing in (("ss",), ("ar",)):
        run = read_run(make_run(labels=("ar", "ss"), categories=("qa",), questions=8, failing=failing))
        assert stated_of(run).startswith("Unreliable (failed)")


@pytest.mark.parametrize(("temperature", "text"), [(0.0, "changes nothing at temperature 0"), (1.0, "sampled by the")])
def test_block_verification_is_shown_with_its_effect(make_run: MakeRun, temperature: float, text: str) -> None:
    run = read_run(make_run(labels=("ar", "ss"), temperature=temperature))

    def shown() -> tuple[int, int]:
        notes = page_of(analyse(run))["budgets"].notes
        return sum(text in line for line in reported(run)), sum(text in note for note in notes)

    assert shown() == (0, 0)
    run.manifest["config"]["verification"] = "block"
    assert shown() == (1, 1)


@pytest.mark.parametrize(("temperature", "stated"), [(0.0, 1), (1.0, 0)])
def test_filters_without_effect_are_named(make_run: MakeRun, temperature: float, stated: int) -> None:
    run = read_run(make_run(labels=("ar", "ss"), temperature=temperature))
    run.manifest["config"]["top_p"] = 0.9
    assert sum("top-p and top-k change nothing" in line for line in reported(run)) == stated
