"""Whether a run's numbers can be believed: a list of checks, which the terminal and every report show.

What is found wrong with a single method's numbers is in `health`; here this is gathered, and what could not be checked
is said. A check is ok only where something was looked at.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from specbench_ss.method_spec import REFERENCE
from specbench_ss.results.health import unfinished
from specbench_ss.results.intervals import FEWEST
from specbench_ss.results.summary import OVERALL, SummaryRow
from specbench_ss.runs.environment import between_sessions
from specbench_ss.runs.rows import Run

State = Literal["ok", "warning", "wrong", "not checked"]
STATES: tuple[State, ...] = ("wrong", "warning", "not checked", "ok")  # the worst first

NUMBERS = re.compile(r"[\d.,]*\d")

FOUND: dict[str, tuple[State, str]] = {  # kind of a finding (`health`) -> how bad it is, and what is said
    "impossible": ("wrong", "Impossible results: a bug, or a measurement that must not be believed."),
    "void": ("wrong", "Results that must not be used."),
    "failed": ("wrong", "Samples failed; no number includes them."),
    "mismatch": ("wrong", "Answers differ from their reference's in a way that no near-tie explains."),
    "length": ("warning", "Answers end earlier or later than their reference's."),
    "near-tie": ("warning", "Near-ties in float32, where they should be rare."),
    "unjudged": ("warning", "Answers were not compared with their reference's: the verdicts are lost."),
    "unstable": ("warning", "Unstable timing: other work on the machine, or clocks that change."),
}


@dataclass(frozen=True, slots=True)
class Check:
    """What became of one check. name: the kind of finding, or `incomplete`, `warnings`, `sessions`, `tau`.

    sentence: what was found, or why nothing could be. lines: its details, one for each method or warning.
    """

    name: str
    state: State
    sentence: str
    lines: tuple[str, ...] = ()


def checks(run: Run, summaries: Sequence[SummaryRow]) -> list[Check]:
    """Return every check of a run, passed or not. summaries: as `summarise` gives them; those of all tasks count."""
    rows = [row for row in summaries if row.category == OVERALL]
    found: dict[str, list[str]] = {}
    for row in rows:
        for sentence in row.health:
            kind, _, text = sentence.partition(": ")
            found.setdefault(kind, []).append(f"{row.method}: {text}")
    passed = {check.name: check for check in _not_found(run, rows)}
    bad = {
        kind: Check(kind, *FOUND.get(kind, ("warning", f"{kind.capitalize()}.")), tuple(lines))
        for kind, lines in found.items()
    }
    return [_finished(run), *_warned(run), *_disturbed(run), *{**passed, **bad}.values(), *_bound(rows)]


def worst_first(made: Sequence[Check]) -> list[Check]:
    """Return the checks in which something was found or nothing could be, the worst first."""
    return [check for state in STATES[:-1] for check in made if check.state == state]


def _finished(run: Run) -> Check:
    lacking = unfinished(run)
    if lacking:
        return Check("incomplete", "wrong", f"The run is {lacking}.")
    return Check("incomplete", "ok", f"The run is complete: {len(run.rows):,} samples.")


def _warned(run: Run) -> Iterator[Check]:
    said = tuple(run.manifest.get("warnings", []))
    if said:
        yield Check("warnings", "warning", "Warnings of the run.", said)
    changed = between_sessions(run.manifest)
    if changed:
        what = ", ".join(changed)
        yield Check("sessions", "warning", f"Not all sessions had the same {what}: their times do not compare.")


def _disturbed(run: Run) -> Iterator[Check]:
    """Say how many samples something else on the machine disturbed, where the machine was watched."""
    watched = [row for row in run.rows if row.disturbed is not None]
    bad = Counter(NUMBERS.sub("…", row.disturbed) for row in watched if row.disturbed)
    again = sum(row.remade or 0 for row in watched)
    if bad:
        remade = f" {again} times one was made again." if again else ""
        said = f"{bad.total():,} of {len(run.rows):,} samples were disturbed by something else on the machine.{remade}"
        yield Check("disturbed", "warning", said, tuple(f"{n:,} times: {why}" for why, n in bad.most_common()))
    elif watched:
        yield Check("disturbed", "ok", "Nothing else on the machine was seen to disturb a sample.")


def _not_found(run: Run, rows: Sequence[SummaryRow]) -> Iterator[Check]:
    """Yield what each check says where no method has a finding of its kind."""
    good = any(row.ok for row in run.rows)
    if good:
        yield Check("impossible", "ok", "No impossible result: all counts and times add up.")
    else:
        yield Check("impossible", "not checked", "Counts and times were not checked: there is no good sample.")
    yield Check("failed", "ok", "No sample failed.")
    yield _same(rows)
    yield _timing(run, rows)


def _same(rows: Sequence[SummaryRow]) -> Check:
    verdicts = {row.method: row.sameness for row in rows if row.comparison != "reference"}
    compared = {m for m, of in verdicts.items() if any(n for verdict, n in of.items() if verdict != "not compared")}
    rest = [method for method in verdicts if method not in compared]
    if not compared:
        return Check("mismatch", "not checked", "No answer was compared with its reference's.")
    others = f" Not compared: {', '.join(rest)}." if rest else ""
    return Check("mismatch", "ok", f"No answer that was compared differs without a near-tie.{others}")


def _timing(run: Run, rows: Sequence[SummaryRow]) -> Check:
    if any("times" in said for said in run.manifest.get("warnings", [])) or between_sessions(run.manifest):
        return Check("unstable", "warning", "Timing cannot be called stable: the run has warnings of its times.")
    if not any(row.unstable is False for row in rows):
        takes = f"that takes repeats, or {FEWEST} prompts that {REFERENCE} answered"
        return Check("unstable", "not checked", f"Whether timing is stable was not checked: {takes}.")
    work = "repeats of an answer" if run.repeats > 1 else f"steps of {REFERENCE}"
    return Check("unstable", "ok", f"Timing is stable: the times of {work} differ by less than a tenth.")


def _bound(rows: Sequence[SummaryRow]) -> Iterator[Check]:
    """Say of which methods nobody knows whether they are faster than tau allows."""
    rows = [row for row in rows if row.comparison != "reference"]
    unknown = [row.method for row in rows if row.within_tau is None]
    if unknown:
        why = f"there are fewer than {FEWEST} questions, or answers of another length than the reference's"
        what = "Whether a method is faster than its tokens per step allow was not checked"
        yield Check("tau", "not checked", f"{what} of {', '.join(unknown)}: {why}.")
    elif rows and all(row.within_tau for row in rows):
        yield Check("tau", "ok", "No method is faster than its tokens per step allow.")
