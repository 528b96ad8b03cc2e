"""`ssbench import-specbench`: answer files of Spec-Bench, scored again by rules that are the same for all of them."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from specbench_ss.results.number_text import interval, number, times, title
from specbench_ss.results.rescoring import RescoredRow, cannot_tell, rescored
from specbench_ss.results.summary import OVERALL
from specbench_ss.results.terminal_table import result_table, widen

COLUMNS = (
    "method", "speedup", "95% interval", "τ", "τ−1", "written", "Spec-Bench", "same text", "tokens/s", "n",
)  # fmt: skip


def command(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILES", help="Answer files, one a method, the baseline's among them.")
    ],
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Name of the baseline's file, without .jsonl. Default: the one called ar, vanilla or baseline.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of tables.")] = False,
) -> None:
    """Score answer files of Spec-Bench again: the same counting for all, intervals, and what the files cannot tell."""
    rows = rescored(files, baseline)
    if as_json:
        said = {"notes": list(cannot_tell(rows)), "rows": [asdict(row) for row in rows]}
        print(json.dumps(said, indent=1, ensure_ascii=False))
    else:
        _print(rows)


def _print(rows: list[RescoredRow]) -> None:
    console = Console()
    widen(console)
    tasks = {category: list(group) for category, group in groupby(rows, key=lambda row: row.category)}
    shown = [*(task for task in tasks if task != OVERALL and len(tasks) > 2), OVERALL]
    for task in shown:
        _print_task(task, tasks[task], console)
    for said in cannot_tell(rows):
        console.print(said, style="dim", markup=False, highlight=False, soft_wrap=True)


def _print_task(task: str, rows: list[RescoredRow], console: object) -> None:
    table = result_table(escape(title(task)), COLUMNS)
    for row in sorted(rows, key=lambda row: (row.comparison != "reference", -(row.speedup or 0))):
        table.add_row(
            escape(row.method),
            times(row.speedup),
            interval(row.speedup_interval) or row.comparison,
            number(row.tau),
            number(None if row.tau is None else row.tau - 1),
            number(row.tau_written),
            times(row.speedup_specbench),
            "" if row.comparison == "reference" else f"{row.n_same_text} of {row.n_turns}",
            number(row.tokens_per_s, 1),
            f"{row.n_prompts:,}",
        )
    console.print(table)  # type: ignore[attr-defined]
