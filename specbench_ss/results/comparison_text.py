"""Changes between two runs as text: the finding, changes and their intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from specbench_ss.results.compare import FAILED, INVALID, NO_VERDICT, SAME, Change, ComparedRow
from specbench_ss.results.summary import OVERALL
from specbench_ss.results.table import Column
from specbench_ss.results.text import MISSING, cut, format_number, format_speedup
from specbench_ss.stats.intervals import FEWEST

NAMES: dict[str, tuple[str, Callable[[float | None], str]]] = {  # figure -> title of its table, its text
    "speedup": ("Speedup over {}", format_speedup),
    "tokens_per_s": ("Tokens per second", partial(format_number, digits=1)),
    "mean_acceptance_length": ("τ, tokens per step", format_number),
    "quality": ("Quality", format_number),
}
POINTS = ("quality",)  # figures whose change is a difference; that of the others is a share
ROUNDING = 1e-9  # a change by rounding alone


def change_text(metric: str, value: float | None) -> str:
    """Return a change as in '−3.1%', of quality as in '+0.02'."""
    if value is None:
        return MISSING
    value = 0.0 if abs(value) < ROUNDING else value
    return (f"{value:+.2f}" if metric in POINTS else f"{100 * value:+.1f}%").replace("-", "−")


def interval_text(metric: str, change: Change) -> str:
    """Return the interval of a change as in '−5.0% to −1.2%'."""
    return MISSING if change.interval is None else " to ".join(change_text(metric, end) for end in change.interval)


UNCHANGED = "unchanged"


def change_columns(metric: str, later: str = "B") -> list[Column]:
    """Return the columns of a table of changes of a metric. later: letter of the later run."""
    write = NAMES[metric][1]

    def column(title: str, cell: Callable[[Change], str], value: Callable[[Change], Any]) -> Column:
        return Column("", title, lambda row: cell(row.changes[metric]), value=lambda row: value(row.changes[metric]))

    return [
        Column("method", "method", lambda row: row.method, left=True),
        column("A", lambda change: write(change.a), lambda change: change.a),
        column(later, lambda change: write(change.b), lambda change: change.b),
        column("change", lambda change: change_text(metric, change.change), lambda change: change.change),
        column("95% CI", lambda change: _ends(metric, change), lambda change: change.interval),
        Column(
            "verdict",
            "verdict",
            lambda row: verdict(row.changes[metric]),
            left=True,
            strong=lambda row: verdict(row.changes[metric]) not in (SAME, UNCHANGED, *NO_VERDICT),
        ),
        Column("n_prompts", "prompts", lambda row: f"{row.n_prompts:,}"),
    ]


def verdict(change: Change) -> str:
    """Return the verdict; `unchanged` for a change of 0 with an interval of 0, as of τ with the same steps."""
    values = (change.change, *(change.interval or ()))
    return UNCHANGED if all(value is not None and abs(value) < ROUNDING for value in values) else change.verdict


def _ends(metric: str, change: Change) -> str:
    return "" if verdict(change) == UNCHANGED else interval_text(metric, change)


def comparison_finding(rows: Sequence[ComparedRow]) -> str:
    """Return the finding over all tasks in one line."""
    found = {r.method: r.changes["speedup"] for r in rows if r.task == OVERALL and r.method != r.baseline}
    known = {method: change for method, change in found.items() if change.interval}
    reasons = dict.fromkeys(change.reason for change in found.values() if change.verdict in (FAILED, INVALID))
    failed = " ".join(f"{reason}; no speedup is compared." for reason in reasons)
    if not known:
        return failed or f"Too few common prompts to compare speedups: an interval needs {FEWEST}."
    return f"{_changes(known)} {failed}".rstrip()


def _changes(known: Mapping[str, Change]) -> str:
    """Return the speedups that changed in a sentence. known: the changes that have an interval, by method."""
    changed = sorted((item for item in known.items() if item[1].verdict != SAME), key=lambda item: item[1].change or 0)
    if not changed:
        method, widest = max(known.items(), key=lambda item: (i := item[1].interval or (0, 0))[1] - i[0])
        ends = {interval_text("speedup", change) for change in known.values()}
        which = f"widest 95% CI: {cut(method)}," if len(ends) > 1 else "every 95% CI:" if len(known) > 1 else "95% CI:"
        return f"No speedup changed significantly ({which} {interval_text('speedup', widest)})."
    parts = [
        f"{cut(method)} is {c.verdict}: {format_speedup(c.a)} to {format_speedup(c.b)} "
        f"({change_text('speedup', c.change)}, 95% CI {interval_text('speedup', c)})"
        for method, c in changed
    ]
    rest = len(known) - len(changed)
    return "; ".join(parts) + (f"; {rest} not significant." if rest else ".")
