"""What a run would have found without the samples that something else on the machine disturbed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specbench_ss.method_spec import REFERENCE
from specbench_ss.results.intervals import Interval, compare
from specbench_ss.results.number_text import interval, times
from specbench_ss.results.paired_times import PairedTimes, paired
from specbench_ss.results.standings import RANKED
from specbench_ss.results.summary import OVERALL, SummaryRow
from specbench_ss.runs.rows import Row, Run


def without_disturbed(run: Run, summaries: Sequence[SummaryRow]) -> str:
    """Say what the fastest method would be, and which verdicts would be others. '' where too little would be left.

    Methods are compared on the prompts that were disturbed for none of them; where these are less than half, each on
    those that were not disturbed for it or for the reference.
    """
    rows = [row for row in summaries if row.category == OVERALL and row.comparison in RANKED and not row.reference_of]
    labels = [row.method for row in rows]
    noisy = {_prompt(row) for row in run.rows if row.disturbed and row.method in {REFERENCE, *labels}}
    every = {_prompt(row) for row in run.rows if row.method == REFERENCE}
    many = len(every - noisy)
    left = _left(run, labels, dict.fromkeys(labels, noisy)) if 2 * many >= len(every) else []
    where = f"the {many} of {len(every)} prompts that are left to all"
    if not left:
        where = "the prompts left to each"
        left = _left(run, labels, {name: _noisy_for(run, name) for name in labels})
    if not left:
        return ""
    value, around, fastest = max(left)
    now = {row.method: row.comparison for row in rows}
    other = {label: compare(around) for _, around, label in left if compare(around) != now[label]}
    best = f"{fastest} would be the fastest, {times(value)} ({interval(around)})"
    said = f" Without them, on {where}, {best}, and "
    if not other:
        return f"{said}no method would be called otherwise than it is."
    told = [f"{label} would be called {verdict} instead of {now[label]}" for label, verdict in other.items()]
    return f"{said}{'; '.join(told)}."


Prompt = tuple[str, int, int]  # question, turn, repeat


def _left(run: Run, labels: Sequence[str], noisy: Mapping[str, set[Prompt]]) -> list[tuple[float, Interval, str]]:
    """Return (speedup, interval, label) of every method, or nothing where one of them has no interval.

    noisy: the prompts that do not count for a method.
    """
    found = []
    for label in labels:
        own, ref = (
            [row for row in run.rows if row.method == name and _prompt(row) not in noisy[label]]
            for name in (label, REFERENCE)
        )
        of = PairedTimes(*paired(own, ref))
        value, around = of.speedup(), of.interval()
        if value is None or not around:
            return []
        found.append((value, around, label))
    return found


def _noisy_for(run: Run, label: str) -> set[Prompt]:
    return {_prompt(row) for row in run.rows if row.disturbed and row.method in (REFERENCE, label)}


def _prompt(row: Row) -> Prompt:
    return row.question_id, row.turn, row.repeat
