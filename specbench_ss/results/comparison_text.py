"""Changes between two runs as text: the finding, changes and their intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specbench_ss.results.compare import FAILED, INVALID, SAME, Change, ComparedRow
from specbench_ss.results.summary import OVERALL
from specbench_ss.results.text import MISSING, cut, format_speedup
from specbench_ss.stats.intervals import FEWEST

NAMES = {  # figure -> title of its table, digits
    "speedup": ("Speedup over {}", 2),
    "tokens_per_s": ("Tokens per second", 1),
    "mean_acceptance_length": ("τ, tokens per step", 2),
    "quality": ("Quality", 2),
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
