"""Faults of a run from which a report is made."""

from __future__ import annotations

from specbench_ss.runs.records import Run, Steps


def nothing_works(run: Run) -> None:
    for row in run.rows:
        row.status, row.error, row.tokens, row.token_ids = "failed", "RuntimeError: no", None, None
        row.wall_s = row.prefill_s = row.decode_s = row.steps = row.finish = None


def methods_fail(run: Run) -> None:
    for row in run.rows:
        if row.method != "ar":
            row.status, row.error, row.tokens, row.wall_s, row.steps = "failed", "ValueError: <b>", None, None, None


def half_done(run: Run) -> None:
    run.rows = run.rows[:2]
    run.manifest["status"] = "killed"


def no_questions(run: Run) -> None:
    run.questions = []


def no_steps(run: Run) -> None:
    run.steps = Steps.from_samples({})


def only_the_reference(run: Run) -> None:
    run.rows = [row for row in run.rows if row.method == "ar"]
