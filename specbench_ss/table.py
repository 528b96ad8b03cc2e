"""The tables that end a run in the terminal: every task, then all of them together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specbench_ss.environment import between_sessions
from specbench_ss.remarks import n, notes, output, own_model, speedup
from specbench_ss.rows import Run
from specbench_ss.stats import OVERALL, SummaryRow, summarise
from specbench_ss.words import interval, number, title

COLUMNS = ("method", "speedup", "95% interval", "tokens/s", "τ", "output", "quality", "n")
LEFT = ("task", "method", "output", "configuration")
WIDTH = 110  # where there is no terminal to ask


def print_tables(run: Run, console: Console) -> None:
    """Both tables, and what the reader must know about them."""
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    rows = summarise(run)
    config = run.manifest["config"]
    repeats = config["repeats"]
    often = f", {repeats} repeats" if repeats > 1 else ""
    overall = [row for row in rows if row.category == OVERALL]
    console.print(_by_task([row for row in rows if row.category != OVERALL], f"By task{often}", config))
    console.print(_overall(overall, f"Overall{often}", config))
    for note in notes(rows, config):
        console.print(note, style="dim", markup=False, highlight=False, soft_wrap=True)
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


def _by_task(rows: Sequence[SummaryRow], name: str, config: Mapping[str, Any]) -> Table:
    table = result_table(name, ("task", *COLUMNS))
    for category, group in groupby(rows, key=lambda row: row.category):
        for i, row in enumerate(group):
            table.add_row(title(category) if i == 0 else "", *_cells(row, config))
        table.add_section()
    return table


def _overall(rows: Sequence[SummaryRow], name: str, config: Mapping[str, Any]) -> Table:
    table = result_table(name, COLUMNS)
    for row in rows:
        table.add_row(*_cells(row, config))
    return table


def result_table(name: str, columns: Sequence[str]) -> Table:
    """An empty table in the form that all results have."""
    table = Table(title=name, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, header_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in LEFT else "right", no_wrap=column != "output")
    return table


def _cells(row: SummaryRow, config: Mapping[str, Any]) -> list[str]:
    return [
        escape(row.method),
        f"[bold]{speedup(row)}[/]" if row.comparison in ("faster", "slower") else speedup(row),
        "reference" if row.comparison == "reference" else interval(row.speedup_interval) or row.comparison,
        number(row.tokens_per_s, 1),
        number(row.tau),
        output(row, config),
        number(row.quality),
        n(row),
    ]
