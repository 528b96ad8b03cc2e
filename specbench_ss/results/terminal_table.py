"""What ends a run in the terminal: a table of every task, one of all tasks together, what is wrong, the finding."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from specbench_ss.results.finding import finding
from specbench_ss.results.number_text import interval, number, title
from specbench_ss.results.run_health import Check, State, checks, worst_first
from specbench_ss.results.standings import standings
from specbench_ss.results.summary import OVERALL, SummaryRow, summarise
from specbench_ss.results.verdict_text import (
    config_of,
    non_inferiority,
    notes,
    own_model,
    quality,
    quality_difference,
    short_n,
    short_output,
    speedup,
)
from specbench_ss.runs.rows import Run

COLUMNS = ("method", "speedup", "95% interval", "τ", "output", "quality", "judged", "tokens/s", "n")
DISPENSABLE = ("tokens/s", "judged", "quality", "n")  # left out in this order where a terminal is too narrow
FOLDED = ("task", "fastest", "speedup", "95% interval", "τ", "faster", "n")  # one row a task, of many methods
LEFT = ("task", "method", "fastest", "output", "configuration")
FOLDING = ("output",)  # columns that may take several lines
LABELS = ("method", "fastest")  # these too, but they break where a label has commas
NARROW = 28  # characters that a label may take before other columns are left out for it
WIDTH = 110  # where there is no terminal to ask
MANY = 6  # tasks; with more, no blank lines between them
MOST = 40  # rows of all tasks; with more, each task has one
SHOWN = 8  # details of a check
MARKS: dict[State, str] = {"wrong": "[red]✕[/]", "warning": "[yellow]![/]", "not checked": "[dim]?[/]", "ok": "✓"}
Line = dict[str, str]  # cells by column


def widen(console: Console, width: int = WIDTH) -> None:
    """Give tables room where there is no terminal and the variable COLUMNS does not state a width."""
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = max(console.width, width)


def print_tables(run: Run, console: Console) -> None:
    """Print both tables, notes on how to read them, what is wrong or was not checked, and the finding."""
    widen(console)
    rows, config = summarise(run), config_of(run)
    often = f", {config['repeats']} repeats" if config["repeats"] > 1 else ""
    columns = tuple(name for name in COLUMNS if name != "judged" or run.judged_scores)
    overall = ranked([row for row in rows if row.category == OVERALL])
    tasks = [
        ranked(list(group)) for category, group in groupby(rows, key=lambda row: row.category) if category != OVERALL
    ]
    left_out = _print_tasks(console, columns, tasks, often, config)
    console.rule(f"[bold]Overall, {len(tasks)} tasks{often}[/]" if len(tasks) > 1 else f"[bold]Overall{often}[/]")
    left_out |= _print(console, "", columns, [[_line(row, config) for row in overall]])
    if left_out:
        console.print(
            f"not shown since the terminal is too narrow (see the report): {', '.join(left_out)}", style="dim"
        )
    for note in notes(rows, config, short=True):
        console.print(note, style="dim", markup=False, highlight=False, soft_wrap=True)
    if run.judged_scores:
        console.print(f"judged: rating over ten by {run.judge}, a mean over questions", style="dim", markup=False)
    for row in overall:
        if row.reference_speedup is not None:
            console.print(f"{row.method} over {row.reference}, its own model: {own_model(row)}", markup=False)
        if row.quality_verdict is not None:
            told = f"{row.method}: quality {quality_difference(row)}, {non_inferiority(row)}"
            console.print(told, markup=False, highlight=False, soft_wrap=True)
    made = checks(run, rows)
    for check in reversed(one_line(worst_first(made))):
        _print_check(console, check)
    console.print(
        finding(rows, made, standings(run, rows)), style="bold", markup=False, highlight=False, soft_wrap=True
    )


def ranked(rows: Sequence[SummaryRow]) -> list[SummaryRow]:
    """Return the rows of a task with the reference first, then the fastest first."""
    return sorted(rows, key=lambda row: (row.comparison != "reference", row.speedup is None, -(row.speedup or 0)))


def _print_tasks(
    console: Console,
    columns: Sequence[str],
    tasks: Sequence[Sequence[SummaryRow]],
    often: str,
    config: Mapping[str, Any],
) -> dict[str, None]:
    if sum(map(len, tasks)) <= MOST:
        return _print(console, f"By task{often}", ("task", *columns), [[_line(r, config) for r in t] for t in tasks])
    name = f"By task{often}: the fastest of {len(tasks[0]) - 1} methods (the report has all of them)"
    return _print(console, name, FOLDED, [[_folded(rows, config)] for rows in tasks])


def _folded(rows: Sequence[SummaryRow], config: Mapping[str, Any]) -> Line:
    """Return a task's row: its fastest method, and how many are faster than the reference. rows: ranked."""
    others = [row for row in rows if row.comparison != "reference"]
    faster = sum(row.comparison == "faster" for row in others)
    line = _line(others[0], config)
    return line | {"fastest": line["method"], "faster": f"{faster} of {len(others)}"}


def one_line(made: Sequence[Check]) -> list[Check]:
    """Return the checks with all that was not checked as one, which comes last."""
    rest = [check.sentence for check in made if check.state == "not checked"]
    told = [check for check in made if check.state != "not checked"]
    return [*told, *([Check("not checked", "not checked", " ".join(rest))] if rest else [])]


def _print_check(console: Console, check: Check) -> None:
    style = "dim" if check.state == "not checked" else ""
    console.print(f"{MARKS[check.state]} {escape(check.sentence)}", style=style, highlight=False, soft_wrap=True)
    rest = len(check.lines) - SHOWN
    for line in (*check.lines[:SHOWN], *([f"and {rest} more"] if rest > 0 else [])):
        console.print(f"    {escape(line)}", highlight=False, soft_wrap=True)


def _print(console: Console, name: str, columns: Sequence[str], groups: Sequence[Sequence[Line]]) -> dict[str, None]:
    """Print a table with as many of the columns as there is room for; return those left out."""
    left_out: dict[str, None] = {}
    lines = [line for group in groups for line in group]
    for column in ("", *DISPENSABLE):
        left_out |= {column: None} if column in columns else {}
        shown = [column for column in columns if column not in left_out]
        if _width(shown, lines) <= console.width:
            break
    room = NARROW + console.width - _width(shown, lines, labels=NARROW)
    table = result_table(name, shown)
    for group in groups:
        for i, line in enumerate(group):
            table.add_row(*("" if i and column == "task" else _cell(line, column, room) for column in shown))
        if len(groups) <= MANY:
            table.add_section()
    console.print(table)
    return left_out


def _cell(line: Line, column: str, room: int) -> str:
    return escape(broken(Text.from_markup(line[column]).plain, room)) if column in LABELS else line[column]


def broken(label: str, width: int) -> str:
    """Return a label in lines of at most this many characters, broken after commas where it has any."""
    lines = [""]
    for part in re.findall(r"[^,]*,|[^,]+$", label):
        if lines[-1] and cell_len(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _width(columns: Sequence[str], lines: Sequence[Line], labels: int = 0) -> int:
    """Return the width of a table: each column's longest text (or word, where it folds), and what is in between.

    labels: the width of a column of labels, where it is given.
    """

    def longest(column: str) -> int:
        texts = [column, *(Text.from_markup(line[column]).plain for line in lines)]
        widest = max(cell_len(part) for text in texts for part in (text.split() if column in FOLDING else [text]))
        return (labels or min(widest, NARROW)) if column in LABELS else widest

    return 1 + sum(longest(column) + 3 for column in columns)


def result_table(name: str, columns: Sequence[str]) -> Table:
    """Return an empty table in the form that all results have."""
    table = Table(title=name, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, header_style="bold")
    for column in columns:
        wraps = column in FOLDING + LABELS
        table.add_column(
            column,
            justify="left" if column in LEFT else "right",
            no_wrap=not wraps,
            overflow="fold" if wraps else "ellipsis",
        )
    return table


def _around(row: SummaryRow) -> str:
    if row.comparison in ("reference", "void"):
        return row.comparison
    return interval(row.speedup_interval) or row.comparison


def _line(row: SummaryRow, config: Mapping[str, Any]) -> Line:
    return {
        "task": escape(title(row.category)),
        "method": escape(row.method),
        "speedup": f"[bold]{speedup(row)}[/]" if row.comparison in ("faster", "slower") else speedup(row),
        "95% interval": _around(row),
        "tokens/s": number(row.tokens_per_s, 1),
        "τ": number(row.tau),
        "output": escape(short_output(row, config)),
        "quality": number(quality(row, config)),
        "judged": number(row.judged),
        "n": short_n(row),
    }
