"""What a run would have found without the samples that something else on the machine disturbed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from specbench_ss.results.intervals import Interval, compare
from specbench_ss.results.number_text import interval, times
from specbench_ss.results.paired_times import PairedTimes, paired
from specbench_ss.results.standings import RANKED
from specbench_ss.results.summary import OVERALL, SummaryRow
from specbench_ss.runs.rows import Row, Run

SHOWN = 3  # methods in the sentence


def without_disturbed(run: Run, summaries: Sequence[SummaryRow]) -> tuple[str, tuple[str, ...]]:
    """Say how fast the methods would be, and which verdicts would be others; '' where too little would be left.

    With it comes a line with all methods, where the sentence has only the fastest.

    Methods are compared on the prompts that were disturbed for none of them; where these are less than half, each on
    those that were not disturbed for it or for the reference.
    """
    rows = [row for row in summaries if row.category == OVERALL and row.comparison in RANKED and not row.reference_of]
    labels = [row.method for row in rows]
    noisy = {_prompt(row) for row in run.rows if row.disturbed and row.method in {run.baseline, *labels}}
    every = {_prompt(row) for row in run.rows if row.method == run.baseline}
    many = len(every - noisy)
    left = _left(run, labels, dict.fromkeys(labels, noisy)) if 2 * many >= len(every) else []
    where = f"the {many} of {len(every)} prompts that are left to all"
    if not left:
        where = "the prompts left to each"
        left = _left(run, labels, {name: _noisy_for(run, name) for name in labels})
    if not left:
        return "", ()
    left.sort(reverse=True)
    now = {row.method: row.comparison for row in rows}
    other = {label: compare(around) for _, around, label in left if compare(around) != now[label]}
    told = [f"{label} {times(value)} ({interval(around)})" for value, around, label in left]
    rest = f", and {len(told) - SHOWN} slower ones" if len(told) > SHOWN else ""
    said = f" Without them, on {where}: {', '.join(told[:SHOWN])}{rest}; "
    all_of_them: tuple[str, ...] = (f"without the disturbed samples, on {where}: {', '.join(told)}",) if rest else ()
    if not other:
        return f"{said}no method would be called otherwise than it is.", all_of_them
    return f"{said}{'; '.join(_changed(other, now))}.", all_of_them


def _changed(other: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    """Yield which methods would be called something else, those with the same change together."""
    for verdict, before in dict.fromkeys((verdict, now[label]) for label, verdict in other.items()):
        who = [label for label, called in other.items() if (called, now[label]) == (verdict, before)]
        names = ", ".join(who) if len(who) <= SHOWN else f"{len(who)} methods"
        yield f"{names} would be called {verdict} instead of {before}"


Prompt = tuple[str, int, int]  # question, turn, repeat


def _left(run: Run, labels: Sequence[str], noisy: Mapping[str, set[Prompt]]) -> list[tuple[float, Interval, str]]:
    """Return (speedup, interval, label) of every method, or nothing where one of them has no interval.

    noisy: the prompts that do not count for a method.
    """
    found = []
    for label in labels:
        own, ref = (
            [row for row in run.rows if row.method == name and _prompt(row) not in noisy[label]]
            for name in (label, run.baseline)
        )
        of = PairedTimes(*paired(own, ref))
        value, around = of.speedup(), of.interval()
        if value is None or not around:
            return []
        found.append((value, around, label))
    return found


def _noisy_for(run: Run, label: str) -> set[Prompt]:
    return {_prompt(row) for row in run.rows if row.disturbed and row.method in (run.baseline, label)}


def _prompt(row: Row) -> Prompt:
    return row.question_id, row.turn, row.repeat
