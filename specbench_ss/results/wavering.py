"""How far the times of single samples waver: steps that drafted, verified and still took less than plain ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from specbench_ss.runs.rows import Row, Run

BEYOND = 1.05  # times as fast a step as the reference's, from where a prompt is counted


def faster_steps(run: Run, labels: Sequence[str]) -> Iterator[str]:
    """Yield in how many samples a method's mean step took less than the reference's, a line a method that drafts.

    labels: methods that give the reference's answers.
    """
    plain = {row.prompt: row for row in run.rows if row.method == run.baseline and _timed(row)}
    for label in labels:
        own = [row for row in run.rows if row.method == label and _timed(row) and row.drafted and row.prompt in plain]
        fast = sum(_step_s(plain[row.prompt]) > BEYOND * _step_s(row) for row in own)
        if fast:
            yield (
                f"{label}: in {fast:,} of {len(own):,} samples a step took less than one of {run.baseline}, "
                "by 5 % or more: so far do the times of single samples waver"
            )


def _timed(row: Row) -> bool:
    return bool(row.ok and row.decode_s and row.steps)


def _step_s(row: Row) -> float:
    return (row.decode_s or 0.0) / (row.steps or 1)
