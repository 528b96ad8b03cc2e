"""The table of requests in flight, in the terminal and in Markdown."""

from __future__ import annotations

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape

from specbench_ss.results import markdown_table
from specbench_ss.results.concurrency import LevelRow, level_rows
from specbench_ss.results.number_text import interval, number, times
from specbench_ss.results.terminal_table import result_table, widen
from specbench_ss.results.verdict_text import MARKS
from specbench_ss.runs.rows import Run

COLUMNS = (
    "in flight",
    "method",
    "tokens/s",
    "× baseline",
    "speedup",
    "95% interval",
    "first ms",
    "ms/token",
    "s",
    "failed",
)


TITLE = "By requests in flight: throughput, and medians over requests"
EXPLAINED = (
    "× baseline: throughput over the baseline's with as many in flight, which has no interval; speedup: of single "
    "requests, by the time per token from when each was begun; first ms, ms/token and s: medians of a request's first "
    "token, later tokens and whole time"
)


def print_levels(run: Run, console: Console) -> None:
    """Print a row for each number of requests in flight and server; nothing where one was in flight alone."""
    found = level_rows(run)
    if not found:
        return
    widen(console)
    table, before = result_table(TITLE, COLUMNS), 0
    table.columns[1].min_width = min(16, max(cell_len(row.method) for row in found))
    for row in found:
        if before not in (0, row.concurrency):
            table.add_section()
        count, *cells = map(escape, _cells(row))
        table.add_row("" if row.concurrency == before else count, *cells)
        before = row.concurrency
    console.print(table)
    console.print(EXPLAINED, soft_wrap=True, highlight=False)


def markdown_levels(run: Run) -> str:
    """Return the same as a Markdown table with its heading; nothing where one request was in flight alone."""
    found = level_rows(run)
    if not found:
        return ""
    table = markdown_table.table(COLUMNS, [_cells(row) for row in found], ("method",))
    return f"## {TITLE}\n\n{table}\n{EXPLAINED[0].upper()}{EXPLAINED[1:]}.\n"


def _cells(row: LevelRow) -> list[str]:
    waits = [row.waits[f"{name}_s_p50"] for name in ("ttft", "tpot", "latency")]
    return [
        str(row.concurrency),
        row.method,
        number(row.tokens_per_s, 1),
        times(row.throughput_ratio),
        "reference"
        if row.comparison == "reference"
        else f"{MARKS.get(row.comparison, '')} {times(row.speedup)}".strip(),
        interval(row.speedup_interval) or ("" if row.comparison == "reference" else row.comparison),
        *(number(None if s is None else s * scale, 2) for s, scale in zip(waits, (1000, 1000, 1), strict=True)),
        str(row.failed),
    ]
