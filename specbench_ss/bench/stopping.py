"""Number of repeats until the intervals of all speedups are narrow enough. docs/design/compare.md has the rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specbench_ss.runs.config import StoppingRule
from specbench_ss.runs.records import SampleRecord
from specbench_ss.stats.intervals import FEWEST
from specbench_ss.stats.precision import MORE_PROCESSES, widest_ci

NARROWS = 0.98  # factor by which the last two repeats must have narrowed an interval for another one


def why_stop(rows: Sequence[SampleRecord], labels: Sequence[str], repeats: int, goal: StoppingRule) -> str:
    """Return the reason to stop as text, or '' if another repeat follows. rows: of complete repeats."""
    now = widest_ci(rows, labels, repeats)
    width = "" if now.half is None else f"±{now.half:.3f} ({now.method}) after {_times(repeats)}"
    if now.method == labels[0]:
        return f"there is no method to compare with {labels[0]}"
    if now.half is None:
        return f"{now.method} has no interval: that needs {FEWEST} questions (--limit)"
    if now.half <= goal.target_ci:
        return f"{width}: every interval is within --target-ci (±{goal.target_ci:g})"
    if (count := now.needed(goal.target_ci)) is None:
        cause, more = "variance between processes", f"no number of questions would do; {MORE_PROCESSES}"
    else:
        cause = "between-question variance"
        more = f"about {count} questions in place of {now.questions} would do (--limit)"
    if now.at_best is not None and now.repeats_cannot_help and now.at_best > goal.target_ci:
        return f"{width}: {cause} dominates (±{now.at_best:.3f} at best); {more}"
    before = widest_ci(rows, labels, repeats - 2).half if repeats > 2 else None
    if before is not None and now.half > NARROWS * before:
        return f"{width}: the last repeats did not narrow it (±{before:.3f} before); {more}"
    if repeats >= goal.max_repeats:
        return f"{width}: limit of repeats (--max-repeats {goal.max_repeats})"
    spent = sum(row.wall_s or 0.0 for row in rows)
    if goal.budget is not None and spent * (1 + 1 / repeats) > goal.budget:
        return f"{width}: another repeat exceeds {goal.budget:g} s of decoding (--budget)"
    return ""


def _times(repeats: int) -> str:
    return "1 repeat" if repeats == 1 else f"{repeats} repeats"


def reached(
    rows: Sequence[SampleRecord], labels: Sequence[str], repeats: int, goal: StoppingRule, why: str
) -> Mapping[str, object]:
    """Return the manifest's record of the stopping rule and the reached width."""
    width = widest_ci(rows, labels, repeats)
    return {"asked": goal.target_ci, "reached": width.half, "method": width.method, "repeats": repeats, "why": why}
