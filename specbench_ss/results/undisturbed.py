"""What a run would have found without some of its prompts: those that something disturbed, or whole tasks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from specbench_ss.results.intervals import Interval, compare
from specbench_ss.results.number_text import interval, times
from specbench_ss.results.paired_times import PairedTimes, paired
from specbench_ss.results.standings import ranked
from specbench_ss.results.summary import OVERALL, SummaryRow
from specbench_ss.runs.rows import Run

SHOWN = 3  # methods that are named in one clause
Prompt = tuple[str, int, int]  # question, turn, repeat
Found = tuple[float, Interval, str]  # speedup, its interval, method


@dataclass(frozen=True, slots=True)
class Without:
    """What would be found then. verdict: which methods would be called something else, as half a sentence; '' where too
    little would be left. line: every method. changed: what methods would be called that are called something else now.
    """

    verdict: str = ""
    line: str = ""
    changed: Mapping[str, str] = field(default_factory=dict)


def without_disturbed(run: Run, summaries: Sequence[SummaryRow]) -> Without:
    """Leave out the prompts that were disturbed for a method or the reference.

    Where less than half would be left, each method is compared on those that were not disturbed for it or for the
    reference.
    """
    labels = _ranked(summaries)
    noisy = {row.prompt for row in run.rows if row.disturbed and row.method in {run.baseline, *labels}}
    every = _prompts(run)
    many = len(every - noisy)
    left = _left(run, labels, dict.fromkeys(labels, noisy)) if 2 * many >= len(every) else []
    if left:
        return _told(left, summaries, f"the {many} of {len(every)} prompts that are left to all")
    left = _left(run, labels, {name: _noisy_for(run, name) for name in labels})
    return _told(left, summaries, "the prompts left to each")


def without_tasks(run: Run, summaries: Sequence[SummaryRow], tasks: Collection[str]) -> Without:
    """Leave out the prompts of these tasks."""
    labels = _ranked(summaries)
    theirs = {row.prompt for row in run.rows if row.category in tasks}
    every = _prompts(run)
    where = f"the {len(every - theirs)} of {len(every)} other prompts"
    return _told(_left(run, labels, dict.fromkeys(labels, theirs)), summaries, where)


def _told(left: Sequence[Found], summaries: Sequence[SummaryRow], where: str) -> Without:
    if not left:
        return Without()
    told = [f"{label} {times(value)} ({interval(around)})" for value, around, label in sorted(left, reverse=True)]
    now = {row.method: row.comparison for row in summaries if row.category == OVERALL}
    other = {label: compare(around) for _, around, label in sorted(left, reverse=True) if compare(around) != now[label]}
    verdicts = " and ".join(_changed(other, now)) or "every verdict stays the same"
    return Without(f"without them {verdicts}", f"without them, on {where}: {', '.join(told)}", other)


def _changed(other: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    """Yield which methods would be called something else, those with the same change together."""
    for verdict, before in dict.fromkeys((verdict, now[label]) for label, verdict in other.items()):
        who = [label for label, called in other.items() if (called, now[label]) == (verdict, before)]
        names = ", ".join(who) if len(who) <= SHOWN else f"{len(who)} methods"
        yield f"{names} would be called {verdict} instead of {before}"


def _ranked(summaries: Sequence[SummaryRow]) -> list[str]:
    return [row.method for row in ranked(summaries)]


def _left(run: Run, labels: Sequence[str], noisy: Mapping[str, set[Prompt]]) -> list[Found]:
    """Return what is left of every method, or nothing where one of them has no interval.

    noisy: the prompts that do not count for a method.
    """
    found = []
    for label in labels:
        own, ref = (
            [row for row in run.rows if row.method == name and row.prompt not in noisy[label]]
            for name in (label, run.baseline)
        )
        of = PairedTimes(*paired(own, ref))
        value, around = of.speedup(), of.interval()
        if value is None or not around:
            return []
        found.append((value, around, label))
    return found


def _noisy_for(run: Run, label: str) -> set[Prompt]:
    return {row.prompt for row in run.rows if row.disturbed and row.method in (run.baseline, label)}


def _prompts(run: Run) -> set[Prompt]:
    return {row.prompt for row in run.rows if row.method == run.baseline}
