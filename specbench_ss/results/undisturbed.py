"""What a run would have found without the samples that something else on the machine disturbed."""

from __future__ import annotations

from collections.abc import Sequence

from specbench_ss.method_spec import REFERENCE
from specbench_ss.results.intervals import Interval, compare
from specbench_ss.results.number_text import interval, times
from specbench_ss.results.paired_times import PairedTimes, paired
from specbench_ss.results.standings import RANKED
from specbench_ss.results.summary import OVERALL, SummaryRow
from specbench_ss.runs.rows import Run


def without_disturbed(run: Run, summaries: Sequence[SummaryRow]) -> str:
    """Say what the fastest method would be, and which verdicts would be others. '' where too little would be left.

    A pair is left out where the method's sample or the reference's was disturbed.
    """
    rows = [row for row in summaries if row.category == OVERALL and row.comparison in RANKED and not row.reference_of]
    quiet = {row.method: _quiet(run, row.method) for row in rows}
    left = [(value, around, label) for label, (value, around) in quiet.items() if value is not None and around]
    if not left or len(left) < len(rows):
        return ""
    value, around, fastest = max(left)
    now = {row.method: row.comparison for row in rows}
    other = {label: compare(around) for _, around, label in left if compare(around) != now[label]}
    best = f"{fastest} would be the fastest, {times(value)} ({interval(around)})"
    said = f" Without them, on the prompts that are left to each, {best}, and "
    if not other:
        return f"{said}no method would be called otherwise than it is."
    told = [f"{label} would be called {verdict} instead of {now[label]}" for label, verdict in other.items()]
    return f"{said}{'; '.join(told)}."


def _quiet(run: Run, label: str) -> tuple[float | None, Interval | None]:
    """Return a method's speedup and its interval on the samples that were not disturbed."""
    own, ref = ([row for row in run.rows if row.method == name and not row.disturbed] for name in (label, REFERENCE))
    of = PairedTimes(*paired(own, ref))
    return of.speedup(), of.interval()
