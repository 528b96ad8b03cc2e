"""Whether the numbers can be believed: failures, sameness of output, impossible and unstable results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from specbench_ss.config import REFERENCE
from specbench_ss.reports.answers import VERDICTS
from specbench_ss.reports.palette import Style
from specbench_ss.reports.view import Cell, Column, Notice, Table, figure
from specbench_ss.rows import Row, Run

SHOWN = 12  # lines of a list; the rest is counted


def alerts(run: Run, impossible: Sequence[str]) -> list[Notice]:
    """What must stand above the results: nothing, in a good run."""
    return [notice for notice in notices(run, impossible, ()) if notice.level == "error"]


def notices(run: Run, impossible: Sequence[str], unstable: Sequence[str]) -> list[Notice]:
    """Every check, passed or not."""
    return [_finished(run), _failures(run), _mismatches(run), _impossible(impossible), _unstable(unstable)]


def _finished(run: Run) -> Notice:
    if run.manifest["status"] == "complete":
        return Notice("ok", f"The run is complete: {len(run.rows):,} samples.")
    return Notice("error", f"The run is not complete ({run.manifest['status']}): {len(run.rows):,} samples are here.")


def _failures(run: Run) -> Notice:
    failed = [row for row in run.rows if not row.ok]
    if not failed:
        return Notice("ok", "No sample failed.")
    lines = [f"{row.method} on {_where(row)}: {row.error}" for row in failed]
    return Notice("error", f"{len(failed):,} of {len(run.rows):,} samples failed; no number includes them.", _some(lines))


def _mismatches(run: Run) -> Notice:
    bad = [s for s in run.sameness if s.verdict == "mismatch"]
    if not bad:
        return Notice("ok", "No method that promises the model's own output broke its promise.")
    lines = [
        f"{s.method} on {s.question_id}, turn {s.turn + 1}: token {s.first_difference} differs"
        + (f", {s.drop:.3g} below the best logit" if s.drop is not None else f" ({s.reason})")
        for s in bad
    ]
    return Notice("error", f"{len(bad):,} answers differ from the reference in a way that no near-tie explains.", _some(lines))


def _impossible(found: Sequence[str]) -> Notice:
    if not found:
        return Notice("ok", "No impossible result: counts add up, and no method is faster than its accepted tokens allow.")
    return Notice("error", "Impossible results: something is wrong with the measurement.", _some(found))


def _unstable(found: Sequence[str]) -> Notice:
    if not found:
        return Notice("ok", "Timing is stable.")
    return Notice("warning", "Unstable timing: other work on the machine, or clocks that change.", _some(found))


def sameness_note(run: Run) -> str:
    """How to read the table."""
    if run.manifest["config"]["temperature"]:
        return "Answers were sampled: the methods promise the same distribution, not the same tokens."
    return (
        "Greedy answers, token by token. A near-tie is a place where two tokens are equally good to the model "
        "within the rounding of its data type; only a mismatch is an error."
    )


def sameness(run: Run, styles: Mapping[str, Style]) -> Table:
    """Verdicts by method."""
    counts = {label: Counter(s.verdict for s in run.sameness if s.method == label) for label in styles}
    failed = Counter(row.method for row in run.rows if not row.ok)
    columns = [Column("method", False), *(Column(VERDICTS[v][0]) for v in VERDICTS), Column("failed")]
    rows = [
        [
            Cell(label, label, swatch=style.css),
            *(figure(counts[label].get(verdict, 0), 0) for verdict in VERDICTS),
            figure(failed[label], 0),
        ]
        for label, style in styles.items()
        if label != REFERENCE or counts[label]
    ]
    return Table("sameness", columns, rows)


def _where(row: Row) -> str:
    return f"{row.question_id}, turn {row.turn + 1}"


def _some(lines: Sequence[str]) -> list[str]:
    rest = len(lines) - SHOWN
    return [*lines[:SHOWN], *([f"and {rest:,} more"] if rest > 0 else [])]
