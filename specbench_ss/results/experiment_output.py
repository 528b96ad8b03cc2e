"""Show what an experiment found, in the terminal and as files. No experiment is known by name."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from specbench_ss.errors import UserError, os_reason
from specbench_ss.results.experiment import Column, Grid, Mark, Part, Result, Span, Value
from specbench_ss.results.markdown_table import safe, table
from specbench_ss.results.number_text import MISSING, number, percent, scientific, times
from specbench_ss.results.terminal_table import widen

TABLE, RESULT, FIGURE = "table.csv", "result.json", "figure.html"
WIDTH = 140  # where there is no terminal to ask
STYLES: dict[Mark, str] = {"plain": "", "accepted": "green", "rejected": "red strike", "next": "bold"}
BRACKETS: dict[Mark, tuple[str, str]] = {  # where there are no colours
    "plain": ("", ""),
    "accepted": ("", ""),
    "rejected": ("[-", "-]"),
    "next": ("*", "*"),
}


def cell(value: Value, column: Column) -> str:
    """Return a value as text for people."""
    if value is None:
        return MISSING
    if isinstance(value, str):
        return value
    if column.form in ("count", "text"):
        return f"{value:,}"
    written = {"number": number, "times": lambda v, _: times(v), "percent": percent, "scientific": scientific}
    return written[column.form](value, column.digits)


def print_result(result: Result, console: Console) -> None:
    """Print the lines, tables and notes of a result."""
    widen(console, WIDTH)
    for line in result.lines:
        console.print(marked(line, console.is_terminal), soft_wrap=True)
    for grid in result.all_grids():
        console.print(_table(grid))
    for note in result.notes:
        console.print(note, style="dim", markup=False, highlight=False, soft_wrap=True)


def marked(line: Sequence[Span], colours: bool) -> Text:
    """Show accepted text green, rejected text red and struck out, the next token bold; use brackets without colours."""
    text = Text()
    for span in line:
        before, after = ("", "") if colours else BRACKETS[span.mark]
        text.append(before + span.text + after, STYLES[span.mark] if colours else "")
    return text


def _table(grid: Grid) -> Table:
    table = Table(
        title=grid.caption or grid.name, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD,
        header_style="bold",
    )  # fmt: skip
    for column in grid.columns:
        table.add_column(column.title, justify="left" if column.form == "text" else "right")
    for row in grid.rows:
        table.add_row(*(escape(cell(v, c)) for v, c in zip(row, grid.columns, strict=True)))
    return table


def markdown(result: Result, most: int) -> Iterator[str]:
    """Yield the lines of a result as Markdown: marked text, tables of `most` rows each, and notes."""
    if result.lines:
        yield from ("", "```text", *(marked(line, False).plain for line in result.lines), "```")
    for grid in result.all_grids():
        rows = [[cell(v, c) for v, c in zip(row, grid.columns, strict=True)] for row in grid.rows[:most]]
        left = [c.title for c in grid.columns if c.form == "text"]
        yield from ("", f"{grid.caption or grid.name}:", "", table([c.title for c in grid.columns], rows, left))
        if len(grid.rows) > most:
            yield f"These are the first {most} of {len(grid.rows):,} rows."
    if result.notes:
        yield from ("", *(f"- {safe(note)}" for note in result.notes))


def status(parts: Sequence[Part]) -> list[str]:
    """Return 'runs: a, b' and, for each missing piece X, 'needs X: c, d'."""
    lacking: dict[str, list[str]] = {}
    for part in parts:
        lacking.setdefault(part.missing, []).append(part.name)
    lines = [f"runs: {', '.join(lacking.pop(''))}"] if "" in lacking else []
    return lines + [f"needs {what}: {', '.join(names)}" for what, names in lacking.items()]


def write_result(result: Result, about: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write table.csv (and NAME.csv for each further table) and result.json; return their paths. Raises UserError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for i, grid in enumerate(result.all_grids()):
            paths.append(folder / (TABLE if i == 0 else f"{grid.name}.csv"))
            _write_csv(grid, paths[-1])
        paths.append(folder / RESULT)
        text = json.dumps({**about, **asdict(result)}, indent=1, ensure_ascii=False, default=str)
        paths[-1].write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {os_reason(error)}") from error
    return paths


def _write_csv(grid: Grid, path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(column.title for column in grid.columns)
        writer.writerows(["" if value is None else value for value in row] for row in grid.rows)
