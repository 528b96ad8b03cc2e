"""Whether the numbers can be believed: failures, sameness of output, impossible and unstable results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specbench_ss.method_spec import REFERENCE
from specbench_ss.reports.html.answers import VERDICTS
from specbench_ss.reports.html.page_parts import Column, Notice, Table, figure, plain
from specbench_ss.reports.html.palette import Style
from specbench_ss.results.health import unfinished
from specbench_ss.results.summary import SummaryRow
from specbench_ss.runs.rows import Run

SHOWN = 12  # lines of a list; the rest is counted

# Kind of finding (specbench_ss/results/health.py): how bad, what is said where there is one, what where there is none.
KINDS = {
    "impossible": (
        "error",
        "Impossible results: a bug, or a measurement that must not be believed.",
        "No impossible result: all counts and times add up, no method is faster than its accepted tokens allow.",
    ),
    "failed": ("error", "Samples failed; no number includes them.", "No sample failed."),
    "mismatch": (
        "error",
        "Answers differ from their reference's in a way that no near-tie explains.",
        "No method that promises the output of its reference broke its promise.",
    ),
    "length": ("warning", "Answers end earlier or later than their reference's.", ""),
    "unjudged": ("warning", "Answers were not compared with their reference's: the verdicts are lost.", ""),
    "near-tie": ("warning", "Near-ties in float32, where they should be rare.", ""),
    "unstable": ("warning", "Unstable timing: other work on the machine, or clocks that change.", "Timing is stable."),
}


def notices(run: Run, summaries: Sequence[SummaryRow]) -> list[Notice]:
    """Return every check, passed or not, over all tasks."""
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for row in summaries:
        for sentence in row.health:
            kind, _, text = sentence.partition(": ")
            found.setdefault(kind, []).append(f"{row.method}: {text}")
    made = [_finished(run), _warned(run), *(_notice(kind, lines) for kind, lines in found.items())]
    return [notice for notice in made if notice.title]


def alerts(found: Sequence[Notice]) -> list[Notice]:
    """Return what must stand above the results. In a good run there is nothing."""
    return [notice for notice in found if notice.level == "error"]


def _notice(kind: str, lines: Sequence[str]) -> Notice:
    level, bad, good = KINDS.get(kind, ("warning", kind.capitalize(), ""))
    return Notice(level, bad, _some(lines)) if lines else Notice("ok", good)


def _finished(run: Run) -> Notice:
    lacking = unfinished(run)
    if lacking:
        return Notice("error", f"The run is {lacking}.")
    return Notice("ok", f"The run is complete: {len(run.rows):,} samples.")


def _warned(run: Run) -> Notice:
    said = run.manifest.get("warnings", [])
    return Notice("warning", "Warnings of the run.", _some(said)) if said else Notice("ok", "")


def differences(run: Run, overall: Mapping[str, SummaryRow]) -> Sequence[str]:
    """Describe every answer that differs without a good reason, and where it differs."""
    return _some(
        [
            f"{_held(overall[s.method])} on {s.question_id}, turn {s.turn + 1}: "
            + f"{VERDICTS[s.verdict][0]} at token {s.first_difference}"
            + (f", {s.drop:.3g} below the best logit" if s.drop is not None else f" ({s.reason})" if s.reason else "")
            for s in run.sameness
            if s.verdict in ("mismatch", "near-tie", "length")
        ]
    )


def _held(row: SummaryRow) -> str:
    """Name the method, and what it is compared with where that is not the run's reference."""
    return row.method if row.reference == REFERENCE else f"{row.method} against {row.reference}"


def sameness_note(run: Run) -> str:
    """Say how to read the table of verdicts."""
    if run.manifest["config"]["temperature"]:
        return "Answers were sampled: the methods promise the same distribution, not the same tokens."
    return (
        "Greedy answers, compared token by token. A near-tie is a place where two tokens are equally good to the model "
        "within the rounding of its data type; only a mismatch is an error."
    )


def sameness(overall: Mapping[str, SummaryRow], styles: Mapping[str, Style]) -> Table:
    """Return the table of verdicts by method."""
    columns = [
        Column("method", False),
        Column("against", False),
        *(Column(text) for text, _ in VERDICTS.values()),
        Column("failed"),
    ]
    rows = [
        [
            style.cell(),
            plain(_against(overall[label])),
            *(figure(overall[label].sameness.get(v, 0), 0) for v in VERDICTS),
            figure(overall[label].n_failed, 0),
        ]
        for label, style in styles.items()
        if label != REFERENCE or overall[label].sameness
    ]
    return Table("sameness", columns, rows)


def _against(row: SummaryRow) -> str:
    if row.comparison == "reference":
        return "its first repeat"
    if row.reference_of:
        return f"nothing: it is the reference of {', '.join(row.reference_of)}"
    return row.reference if row.lossless else f"nothing: it does not promise the output of {row.reference}"


def _some(lines: Sequence[str]) -> list[str]:
    rest = len(lines) - SHOWN
    return [*lines[:SHOWN], *([f"and {rest:,} more"] if rest > 0 else [])]
