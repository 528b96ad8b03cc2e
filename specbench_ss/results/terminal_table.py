"""The tables that end a run in the terminal: one of every task, then one of all tasks together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from specbench_ss.results.number_text import interval, number, title
from specbench_ss.results.summary import OVERALL, SummaryRow, summarise
from specbench_ss.results.verdict_text import notes, own_model, short_n, short_output, speedup
from specbench_ss.runs.environment import between_sessions
from specbench_ss.runs.rows import Run

COLUMNS = ("method", "speedup", "95% interval", "tokens/s", "τ", "output", "quality", "judged", "n")
DISPENSABLE = ("tokens/s", "τ", "output")  # left out in this order where a terminal is too narrow
LEFT = ("task", "method", "output", "configuration")
FOLDING = ("output",)  # columns that may take several lines
WIDTH = 110  # where there is no terminal to ask
MANY = 6  # tasks; with more, no blank lines between them
Line = dict[str, str]  # cells by column


def print_tables(run: Run, console: Console) -> None:
    """Print both tables, and notes on how to read them and on what is wrong."""
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    rows, config = summarise(run), run.manifest["config"]
    often = f", {config['repeats']} repeats" if config["repeats"] > 1 else ""
    overall = [row for row in rows if row.category == OVERALL]
    columns = tuple(name for name in COLUMNS if name != "judged" or run.judged_scores)
    groups = [
        [_line(row, config) for row in group]
        for category, group in groupby(rows, key=lambda row: row.category)
        if category != OVERALL
    ]
    left_out = _print(console, f"By task{often}", ("task", *columns), groups)
    console.rule(f"[bold]Overall, {len(groups)} tasks{often}[/]" if len(groups) > 1 else f"[bold]Overall{often}[/]")
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
    changed = between_sessions(run.manifest)
    if changed:
        _point_out(console, f"not all sessions had the same {', '.join(changed)}: their times do not compare")
    for row in overall:
        for finding in row.health:
            _point_out(console, f"{row.method}: {finding}")


def _point_out(console: Console, text: str) -> None:
    console.print(f"[yellow]![/] {escape(text)}", highlight=False, soft_wrap=True)


def _print(console: Console, name: str, columns: Sequence[str], groups: Sequence[Sequence[Line]]) -> dict[str, None]:
    """Print a table with as many of the columns as there is room for; return those left out."""
    left_out: dict[str, None] = {}
    for column in ("", *DISPENSABLE):
        left_out |= {column: None} if column else {}
        shown = [column for column in columns if column not in left_out]
        if _width(shown, [line for group in groups for line in group]) <= console.width:
            break
    table = result_table(name, shown)
    for group in groups:
        for i, line in enumerate(group):
            table.add_row(*("" if i and column == "task" else line[column] for column in shown))
        if len(groups) <= MANY:
            table.add_section()
    console.print(table)
    return left_out


def _width(columns: Sequence[str], lines: Sequence[Line]) -> int:
    """Return the width of a table: each column's longest text (or word, where it folds), and what is in between."""

    def longest(column: str) -> int:
        texts = [column, *(Text.from_markup(line[column]).plain for line in lines)]
        return max(cell_len(part) for text in texts for part in (text.split() if column in FOLDING else [text]))

    return 1 + sum(longest(column) + 3 for column in columns)


def result_table(name: str, columns: Sequence[str]) -> Table:
    """Return an empty table in the form that all results have."""
    table = Table(title=name, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, header_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in LEFT else "right", no_wrap=column not in FOLDING)
    return table


def _line(row: SummaryRow, config: Mapping[str, Any]) -> Line:
    return {
        "task": escape(title(row.category)),
        "method": escape(row.method),
        "speedup": f"[bold]{speedup(row)}[/]" if row.comparison in ("faster", "slower") else speedup(row),
        "95% interval": (
            "reference" if row.comparison == "reference" else interval(row.speedup_interval) or row.comparison
        ),
        "tokens/s": number(row.tokens_per_s, 1),
        "τ": number(row.tau),
        "output": escape(short_output(row, config)),
        "quality": number(row.quality),
        "judged": number(row.judged),
        "n": short_n(row),
    }
