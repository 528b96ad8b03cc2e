"""`ssbench compare`: planted changes are found and named, nothing else is; what does not compare is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specbench_ss import UserError, compare, load_run
from specbench_ss.cli.compare import print_comparison
from specbench_ss.cli.main import main
from specbench_ss.results.analysis import Results, analyse
from specbench_ss.results.compare import COMPARISON, DIFFERENCES, METRICS, ComparedRow, compared
from specbench_ss.results.summary import OVERALL, summarise
from specbench_ss.runs.records import Run
from specbench_ss.runs.run_dir import read_run
from specbench_ss.stats.intervals import ratio_interval, speedup_interval
from tests.cli import failing, printed
from tests.conftest import MakeRun
from tests.core.test_a_a import recorded
from tests.core.test_frames import documented
from tests.tiny import few, thorough

Change = Callable[[dict[str, Any]], None]
TOO_SLOW = "--fail-on", "speedup<-5%"


def rewritten(run: Path, method: str, change: Change, name: str = "samples.jsonl") -> Path:
    """The run, with every sample of a method changed. name: of the file that has it."""
    file = run / name
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        if method in ("", row["method"]):
            change(row)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def restated(run: Path, *keys: str, value: Any) -> Path:
    """The run, with another entry of its manifest."""
    manifest = json.loads((run / "manifest.json").read_text())
    part = manifest
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = value
    (run / "manifest.json").write_text(json.dumps(manifest))
    return run


def slower(run: Path, method: str, factor: float) -> Path:
    """The run, with all times of a method longer by a factor."""

    def change(row: dict[str, Any]) -> None:
        for name in [name for name in row if name.endswith("_s") and row[name] is not None]:
            row[name] *= factor

    return rewritten(rewritten(run, method, change), method, change, "steps.jsonl")


def overall(a: Run, b: Run) -> dict[str, ComparedRow]:
    return {row.method: row for row in compared(analyse(a), analyse(b))[1] if row.task == OVERALL}


def test_a_method_that_became_slower_is_found_and_no_other(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = make_run(), slower(make_run(), "ss", 1.25)
    rows = overall(read_run(a), read_run(b))
    assert rows["ss"].changes["speedup"].change == pytest.approx(-0.2)
    assert [rows[m].changes["speedup"].verdict for m in ("ss", "medusa")] == ["slower", "not significant"]
    assert main(["compare", str(a), str(b), *TOO_SLOW]) == 1
    captured = capsys.readouterr()
    assert "ss is slower" in captured.out and captured.err.startswith("ssbench: --fail-on: speedup of ss changed by")
    assert "medusa" not in captured.err and captured.err.count("\n") == 1
    for limit in ("speedup<-30%", "speedup<-0.3", "mean_acceptance_length<-1%,quality<-0.01"):
        assert main(["compare", str(a), str(b), "--fail-on", limit]) == 0
    low, high = rows["ss"].changes["speedup"].interval or (0.0, 0.0)
    for limit, code in (((low + high) / 2, 0), (high + 0.001, 1)):  # the whole interval must lie below it
        capsys.readouterr()
        assert main(["compare", str(a), str(b), "--fail-on", f"speedup<{limit:.4f}"]) == code
        undecided = "--fail-on: undecided: speedup of ss changed by" in capsys.readouterr().err
        assert undecided == (limit < high)
    assert main(["compare", str(b), str(a), *TOO_SLOW]) == 0  # a gain is no regression
    assert capsys.readouterr().err == "ssbench: --fail-on: speedup<-5%: no method has a whole 95% CI below a limit\n"
    with_another = make_run(labels=("ar", "ss", "medusa", "sd"))
    assert main(["compare", str(b), str(with_another), "--fail-on", "speedup<-90%"]) == 0
    assert capsys.readouterr().err.endswith("; not compared: sd (only in run B)\n")


def test_a_slower_machine_cancels_in_the_speedup_and_not_in_the_times(make_run: MakeRun) -> None:
    a, b = make_run(), slower(make_run(), "", 2)
    rows = overall(read_run(a), read_run(b))
    assert {row.changes["speedup"].verdict for row in rows.values()} == {"not significant"}
    assert {row.changes["tokens_per_s"].verdict for row in rows.values()} == {"slower"}
    assert rows["ar"].changes["tokens_per_s"].change == pytest.approx(-0.5)
    assert main(["compare", str(a), str(b), "--fail-on", "speedup<-5%"]) == 0
    assert main(["compare", str(a), str(b), "--fail-on", "tokens_per_s<-5%"]) == 1


def test_times_of_another_machine_are_not_judged(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = make_run(), restated(make_run(), "environment", "cpu", value={"model": "Another", "cores": 64})
    assert main(["compare", str(a), str(b), "--fail-on", "tokens_per_s<-5%"]) == 0
    captured = capsys.readouterr()
    reason = "processor model A processor → Another, cores 2 → 64"
    assert f"Other machine ({reason}, available 2 → –): compare speedups" in captured.out
    assert f"not judged: tokens_per_s of ar: other machine ({reason}" in captured.err
    row = overall(read_run(a), read_run(b))["ss"]
    assert row.changes["tokens_per_s"].interval is None and row.changes["speedup"].interval is not None


def test_another_number_of_threads_is_no_other_machine(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = make_run(), restated(make_run(), "environment", "threads", "intra_op", value=1)
    assert main(["compare", str(a), str(b), "--fail-on", "tokens_per_s<-5%"]) == 0
    captured = capsys.readouterr()
    assert "Same machine, other threads (intra_op 2 → 1): compare speedups" in captured.out
    assert "other machine" not in captured.out.lower()
    cpu = {"model": "A processor", "cores": 2, "available": 1}
    c = restated(make_run(), "environment", "cpu", value=cpu)
    assert overall(read_run(a), read_run(c))["ss"].changes["tokens_per_s"].verdict == "other threads"
    assert "not judged: tokens_per_s of ar: other threads (intra_op 2 → 1)" in captured.err


@few(1)
@pytest.mark.parametrize("method", ["ss", "ar"])
def test_a_method_that_failed_is_named_with_its_error(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    def fail(row: dict[str, Any]) -> None:
        row |= {"status": "failed", "error": "RuntimeError: no luck\nsecond line"}

    a, b = make_run(), rewritten(make_run(), method, fail)
    assert main(["compare", str(a), str(b), "--fail-on", "speedup<-5%"]) == 1
    captured = capsys.readouterr()
    assert f"{method} failed in B: RuntimeError: no luck; no speedup is compared." in captured.out
    assert ("All outputs" in captured.out) is False and f"{method} in B: failed: 24 samples" in captured.err
    assert "0 samples failed in A, 24 in B (RuntimeError: no luck)" in captured.out
    assert "insufficient data" not in captured.out.lower() and "second line" not in captured.out
    assert f"not judged: speedup of ss: failed ({method} failed in B: RuntimeError: no luck)" in captured.err
    rows = overall(read_run(a), read_run(b))
    assert rows["ss"].changes["speedup"].verdict == rows["ss"].changes["mean_acceptance_length"].verdict == "failed"
    assert (rows["medusa"].changes["speedup"].interval is None) == (method == "ar")


def _lossy(run: Path) -> Path:
    methods = json.loads((run / "manifest.json").read_text())["methods"]
    return restated(run, "methods", value=[method | {"lossless": method["label"] != "ss"} for method in methods])


@few(3)
@pytest.mark.parametrize(
    ("change", "stated"),
    [
        (lambda make: make(verdict="mismatch"), "ss in B: mismatch: 24 of 24"),
        (lambda make: make(verdict="length differs"), "ss in B: length-differs: 24 of 24"),
        (lambda make: make(failing=("ss",)), "ss in B: failed: 4 samples"),
        (lambda make: make(labels=("ar", "medusa")), "ss is missing in B"),
        (lambda make: _lossy(make()), "ss in B: lossy: quality"),
        (lambda make: restated(make(), "status", value="interrupted"), "B is not complete"),
    ],
)
def test_a_gate_fails_for_what_is_wrong_in_the_second_run_alone(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str], change: Callable[[MakeRun], Path], stated: str
) -> None:
    """For every limit, however fast the method is, and not where the first run has the same fault."""
    a, b = make_run(), slower(change(make_run), "ss", 0.5)
    assert main(["compare", str(a), str(b), "--fail-on", "tau<-90%"]) == 1
    captured = capsys.readouterr()
    assert stated in captured.err and captured.err.count("\n") == 1 + ("not judged" in captured.err)
    if stated.startswith("ss in B") and "lossy" not in stated:
        assert "ss is faster" not in captured.out and "ss is invalid in B" in captured.out or "failed" in captured.out
    assert main(["compare", str(b), str(b), "--fail-on", "tau<-90%"]) == 0


def test_a_gate_fails_for_a_new_method_that_is_wrong(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    a, sound, wrong = make_run(labels=("ar", "medusa")), make_run(), make_run(verdict="mismatch")
    assert main(["compare", str(a), str(sound), "--fail-on", "speedup<-90%"]) == 0
    capsys.readouterr()
    assert main(["compare", str(a), str(wrong), "--fail-on", "speedup<-90%"]) == 1
    assert "ss, in B alone: mismatch" in capsys.readouterr().err


def test_only_questions_that_both_runs_have_count(make_run: MakeRun) -> None:
    """A run of fewer questions compares with the same questions of the other, whatever the rest of them did."""
    whole, part = (
        read_run(make_run(categories=("qa",), questions=12)),
        read_run(make_run(categories=("qa",), questions=5)),
    )
    found, rows = compared(analyse(whole), analyse(part))
    assert ("questions in both", "5 of 12", "5 of 5") in [(d.what, d.a, d.b) for d in found]
    row = next(row for row in rows if row.method == "ss")
    assert (row.n_questions, row.n_outputs) == (5, 5)
    summary = next(s for s in summarise(part) if s.method == "ss")
    for name in ("speedup", "mean_acceptance_length", "quality", "tokens_per_s"):
        change = row.changes[name]
        assert change.a == pytest.approx(getattr(summary, name)) and change.b == pytest.approx(getattr(summary, name))
    failed = replace(whole, rows=[replace(r, status="failed") if r.question_id == "qa-0" else r for r in whole.rows])
    assert overall(failed, part)["ss"].n_questions == 4 and overall(failed, part)["ss"].n_failed_a == 1


def test_tokens_per_step_and_answers_that_changed_are_counted(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = read_run(make_run()), read_run(make_run())
    for row in b.rows:
        if row.method == "medusa":
            row.token_ids, row.steps = [*(row.token_ids or [])[:-1], 99], 2 * (row.steps or 0)
    rows = overall(a, b)
    assert (rows["medusa"].n_other_outputs, rows["medusa"].n_outputs, rows["ss"].n_other_outputs) == (24, 24, 0)
    assert rows["medusa"].changes["mean_acceptance_length"].change == pytest.approx(-0.5)
    assert (
        rows["medusa"].changes["mean_acceptance_length"].verdict,
        rows["ss"].changes["mean_acceptance_length"].verdict,
    ) == (
        "lower",
        "not significant",
    )


def test_what_does_not_compare_is_refused_unless_reported(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = str(make_run(questions=1)), str(restated(make_run(questions=1), "model", "hash", value="f" * 64))
    assert "model hash (0123456789ab and ffffffffffff)" in failing(["compare", a, b], capsys)
    assert main(["compare", a, b, "--force"]) == 0
    assert "✕" in capsys.readouterr().out


def test_other_questions_under_the_same_ids_are_refused(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = make_run(questions=2), restated(make_run(questions=2), "suite", "content_hash", value="0" * 64)
    assert main(["compare", str(a), str(b)]) == 0  # another set of questions: these are the same
    questions = json.loads((b / "questions.json").read_text())
    questions[3]["turns"] = ["Something else"]
    (b / "questions.json").write_text(json.dumps(questions))
    assert "1 of 8 with another text, first translation-1" in failing(["compare", str(a), str(b)], capsys)


def test_configurations_that_differ_are_reported_in_words(make_run: MakeRun) -> None:
    a, b = make_run(questions=1), make_run(questions=1)
    restated(b, "environment", "packages", value={"torch": "2.14.0", "transformers": "5.23.0", "numpy": "3.0"})
    restated(b, "config", "seed", value=3)
    manifest = json.loads((b / "manifest.json").read_text())
    manifest["methods"][1]["options"]["k"] = 8
    restated(b, "methods", value=manifest["methods"])
    found = [(d.what, d.a, d.b, d.blocking) for d in compare(a, b).found]
    assert found == [
        ("seed", "0", "3", False),
        ("version of torch", "2.13.0", "2.14.0", False),
        ("version of numpy", "–", "3.0", False),
        ("ss: k", "4", "8", False),
    ]


def test_nothing_in_common_is_a_mistake(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = make_run(questions=1, labels=("ar", "ss")), make_run(questions=1, labels=("ar", "medusa"))
    assert "no method with the same name and options" in failing(["compare", str(a), str(b)], capsys)
    b = make_run(questions=1, categories=("rag",))
    assert "common questions (0 of" in failing(["compare", str(a), str(b)], capsys)
    assert "no question in common" in failing(["compare", str(a), str(b), "--force"], capsys)
    with pytest.raises(UserError, match="compare takes run directories"):
        compare(3, a)  # type: ignore[arg-type]


def test_json_and_frames_hold_the_documented_columns(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = make_run(), make_run(seed=1, questions=3)
    made = compare(a, load_run(b))
    assert {n: str(kind) for n, kind in made.table.dtypes.items()} == {c.name: c.dtype for c in COMPARISON}
    assert documented("`compare().table`") == list(COMPARISON)
    assert documented("`compare().differences`") == list(DIFFERENCES)
    capsys.readouterr()
    assert main(["compare", str(a), str(b), "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert len(reported["rows"]) == len(made.table) and set(reported["rows"][0]) == {c.name for c in COMPARISON}
    assert [d["what"] for d in reported["differences"]] == list(made.differences["what"])


def test_doubts_about_a_run_are_reported(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(make_run()), str(make_run(verdict="mismatch"))]) == 0
    assert "Warning: run B: Outputs differ from the baseline's" in capsys.readouterr().out


def test_a_report_of_runs_that_do_not_compare_warns(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = make_run(), restated(make_run(), "model", "hash", value="another")
    assert main(["report", str(a), str(b)]) == 0
    assert "are not compared: the runs differ in model hash" in capsys.readouterr().err


def test_measures_that_differ_have_no_common_mean(make_run: MakeRun) -> None:
    def text_of(results: Results) -> str:
        return printed(print_comparison, compare(results, results))

    results = load_run(make_run())
    same = text_of(results)
    assert re.search("^Quality ", same, re.MULTILINE) and "every 95% CI: " in same and "widest" not in same
    questions = results.run.questions
    results.run.questions = [replace(q, metric="bleu" if q.category == "translation" else q.metric) for q in questions]
    mixed = text_of(results)
    assert not re.search("^Quality  ", mixed, re.MULTILINE) and "left out" in mixed and "(bleu, rouge_l)" in mixed


@thorough  # the quick suite has those of one run: test_a_a.py
def test_recorded_timings_of_the_same_work_are_not_distinguishable() -> None:
    """Each recorded A/A comparison against the next one: autoregressive decoding twice, in two stretches of time."""
    runs = list(recorded().values())
    pairs = [(a, b) for a, b in pairwise(runs) if {r.question_id for r in a.rows} & {r.question_id for r in b.rows}]
    for run in runs:
        run.manifest.update(FACTS)
    verdicts = [overall(a, b)["ar#2"].changes["speedup"].verdict for a, b in pairs]
    judged = [verdict for verdict in verdicts if verdict != "insufficient data"]
    assert len(judged) > 50 and judged.count("not significant") >= 0.95 * len(judged)


FACTS: dict[str, Any] = {
    "config": {"temperature": 0.0, "repeats": 1},
    "suite": {"name": "", "edition": "", "content_hash": "", "size": 0, "prompts": 0},
    "model": {"name": "", "hash": "", "dtype": "float32", "device": "cpu"},
    "environment": {"python": "", "packages": {}, "platform": "", "gpus": []},
    "version": "",
    "status": "complete",
}


def test_the_interval_of_a_ratio_holds_that_of_a_speedup() -> None:
    rng = np.random.default_rng(0)
    a, b, c, d = (rng.uniform(1, 2, 12) for _ in range(4))
    assert speedup_interval(a, b, c, d) == ratio_interval((a, d), (b, c), processes=1)
    once, twice = ratio_interval((a, d), (b, c), 1), ratio_interval((a, d), (b, c), 2)
    assert once and twice and twice[0] < once[0] < once[1] < twice[1]
    assert ratio_interval((a[:3],), (b[:3],)) is None


def test_every_figure_has_its_change(make_run: MakeRun) -> None:
    run = read_run(make_run(questions=1))
    assert all(set(row.changes) == set(METRICS) for row in compared(*[analyse(run)] * 2)[1])


def test_times_that_must_not_be_used_are_invalid(make_run: MakeRun) -> None:
    """The answers of a method have another number of tokens than its steps."""
    a, b = read_run(make_run()), read_run(make_run())
    for row in b.rows:
        if row.method == "ss":
            row.token_ids = [1]
    rows = overall(a, b)
    for metric in ("speedup", "tokens_per_s"):
        verdicts = {method: row.changes[metric].verdict for method, row in rows.items()}
        assert verdicts == {"ar": "not significant", "ss": "invalid", "medusa": "not significant"}
