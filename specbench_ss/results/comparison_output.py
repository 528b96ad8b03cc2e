"""A comparison of two runs in the terminal: what differs, what changed with its interval, and the finding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.markup import escape

from specbench_ss.results.compare_runs import RunComparison
from specbench_ss.results.comparison import FAILED, OTHER_MACHINE, OTHER_THREADS, SAME, UNJUDGED, Change, ComparedRow
from specbench_ss.results.number_text import MISSING, number, title
from specbench_ss.results.regression import judged
from specbench_ss.results.summary import OVERALL
from specbench_ss.results.terminal_table import result_table, widen

COLUMNS = ("method", "A", "B", "change", "95% interval", "verdict", "n")
NAMES = {  # figure -> title of its table, digits
    "speedup": ("Speedup over {}", 2),
    "tokens_per_s": ("Tokens per second", 1),
    "tau": ("τ, tokens per step", 2),
    "quality": ("Quality", 2),
}
POINTS = ("quality",)  # figures whose change is a difference; that of the others is a share
UNSAID = 1e-9  # a change of rounding


def print_comparison(made: RunComparison, console: Console) -> None:
    """Print both runs' differences, the tables, warnings and the finding."""
    widen(console)
    _print_differences(made, console)
    for metric in NAMES:
        shown = [row for row in made.rows if _shown(row, metric)]
        if any(row.changes[metric].a is not None for row in shown):
            _print_metric(metric, shown, console)
    for said in _notes(made):
        console.print(escape(said), highlight=False, soft_wrap=True)
    console.print(escape(finding(made.rows)), style="bold", highlight=False, soft_wrap=True)


def _shown(row: ComparedRow, metric: str) -> bool:
    """Tasks are shown of the speedup alone, plain decoding only where it is no 1 by definition."""
    return judged(metric, row) and (metric == "speedup" or row.category == OVERALL)


def _print_differences(made: RunComparison, console: Console) -> None:
    console.print(f"A: {escape(str(made.a))}\nB: {escape(str(made.b))}", highlight=False, soft_wrap=True)
    if not made.found:
        console.print("Nothing differs in configuration, versions or machine.")
        return
    table = result_table("What differs", ("what", "in A", "in B"))
    for column in table.columns:
        column.justify, column.no_wrap, column.overflow = "left", False, "fold"
    for one in made.found:
        table.add_row(
            f"[red]✕[/] {escape(one.what)}" if one.hinders else escape(one.what), escape(one.a), escape(one.b)
        )
    console.print(table)


def _print_metric(metric: str, rows: Sequence[ComparedRow], console: Console) -> None:
    tasks = list(dict.fromkeys(row.category for row in rows))
    tasks = tasks if len(tasks) > 2 else tasks[:1]  # a single task is all of them
    table = result_table(NAMES[metric][0].format(rows[0].baseline), COLUMNS if len(tasks) == 1 else ("task", *COLUMNS))
    for task in [*tasks[1:], tasks[0]]:  # all tasks together come last
        for i, row in enumerate(row for row in rows if row.category == task):
            name = title(task) if i == 0 else ""
            cells = _cells(metric, row)
            table.add_row(*(cells if len(tasks) == 1 else (escape(name), *cells)))
        table.add_section()
    console.print(table)


def _cells(metric: str, row: ComparedRow) -> tuple[str, ...]:
    change, digits = row.changes[metric], NAMES[metric][1]
    told = change.verdict if change.verdict in (SAME, *UNJUDGED) else f"[bold]{change.verdict}[/]"
    return (
        escape(row.method),
        number(change.a, digits),
        number(change.b, digits),
        change_text(metric, change.change),
        interval_text(metric, change),
        told,
        f"{row.n_prompts:,}",
    )


def change_text(metric: str, value: float | None) -> str:
    """Return a change as in '−3.1%', of quality as in '+0.02'."""
    if value is None:
        return MISSING
    value = 0.0 if abs(value) < UNSAID else value
    return (f"{value:+.2f}" if metric in POINTS else f"{100 * value:+.1f}%").replace("-", "−")


def interval_text(metric: str, change: Change) -> str:
    """Return the interval of a change as in '−5.0% to −1.2%'."""
    return MISSING if change.interval is None else " to ".join(change_text(metric, end) for end in change.interval)


def _notes(made: RunComparison) -> Iterator[str]:
    """Yield what the tables leave unsaid."""
    rows = [row for row in made.rows if row.category == OVERALL]
    rates = [row.changes["tokens_per_s"] for row in rows]
    for rate in [rate for rate in rates if rate.verdict in (OTHER_MACHINE, OTHER_THREADS)][:1]:
        yield (
            f"{rate.verdict.capitalize()} ({rate.reason}): times do not compare; speedups do, since each is relative "
            "to autoregressive decoding there."
        )
    for row in rows:
        if row.n_other_answers:
            yield f"{row.method}: {row.n_other_answers} of {row.n_answers} answers have other tokens in B."
    answered = [row for row in rows if row.n_answers]
    if answered and not any(row.n_other_answers for row in answered):
        yield "All answers that are in both runs have the same tokens."
    for row in rows:
        if row.n_failed_a or row.n_failed_b:
            counts = f"{row.n_failed_a} samples failed in A, {row.n_failed_b} in B"
            yield f"{row.method}: {counts} ({row.error}); no number includes them."
    yield from (f"Warning: {said}" for said in made.warnings)


def finding(rows: Sequence[ComparedRow]) -> str:
    """Return the finding over all tasks in a sentence."""
    rows = [row for row in rows if row.category == OVERALL and row.method != row.baseline]
    told = [(row, row.changes["speedup"]) for row in rows if row.changes["speedup"].interval]
    failed = " ".join(
        f"{reason}; no speedup is compared." for reason in dict.fromkeys(_failure(row) for row in rows) if reason
    )
    if not told:
        return failed or "Too few questions are in both runs to tell whether a speedup changed."
    return f"{_changes(rows, told)} {failed}".rstrip()


def _failure(row: ComparedRow) -> str:
    change = row.changes["speedup"]
    return change.reason if change.verdict == FAILED else ""


def _changes(rows: Sequence[ComparedRow], told: Sequence[tuple[ComparedRow, Change]]) -> str:
    """Return the speedups that changed in a sentence. told: the changes that have an interval."""
    changed = sorted(((r, c) for r, c in told if c.verdict != SAME), key=lambda pair: pair[1].change or 0)
    if not changed:
        return f"No speedup changed from A to B by more than noise ({_widest(told)})."
    said = [
        f"{row.method} is {c.verdict}, {number(c.a)}× in A and {number(c.b)}× in B "
        f"({change_text('speedup', c.change)}, 95% interval {interval_text('speedup', c)})"
        for row, c in changed
    ]
    rest = len(told) - len(changed)
    return f"Speedup over {rows[0].baseline}: {'; '.join(said)}." + (f" {rest} not distinguishable." if rest else "")


def _widest(told: Sequence[tuple[ComparedRow, Change]]) -> str:
    row, change = max(told, key=lambda pair: (pair[1].interval or (0, 0))[1] - (pair[1].interval or (0, 0))[0])
    return f"the widest interval is {row.method}'s, {interval_text('speedup', change)}"
