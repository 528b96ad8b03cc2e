"""Commands `ssbench export` and `ssbench import-specbench`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape

from specbench_ss.cli.printing import result_table, widen
from specbench_ss.cli.shared import print_json
from specbench_ss.errors import UserError, os_reason
from specbench_ss.results import exchange
from specbench_ss.results.acceptance_profile import write_profiles
from specbench_ss.results.analysis import analyse
from specbench_ss.results.exchange import RescoredRow, limitations, rescored
from specbench_ss.results.sample_checks import unfinished
from specbench_ss.results.summary import OVERALL
from specbench_ss.results.table import summary_latex, summary_markdown
from specbench_ss.results.text import format_number, format_speedup, interval, title
from specbench_ss.runs.records import Run
from specbench_ss.runs.run_dir import read_run, run_around
from specbench_ss.storage import write_text

Form = Literal["specbench", "csv", "parquet", "profile", "markdown", "latex"]
FOLDERS = exchange.FOLDERS | {"profile": write_profiles}  # forms of several files
TABLES = {"markdown": summary_markdown, "latex": summary_latex}
COLUMNS = (
    "method", "speedup", "95% CI", "τ", "τ−1", "stored τ", "Spec-Bench", "same text", "tok/s", "prompts",
)  # fmt: skip


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run.")],
    form: Annotated[
        Form,
        typer.Option(
            help="specbench: one answer file per method in Spec-Bench's format. csv, parquet: samples, steps, output "
            "matches and summary. profile: acceptance by position (speculation_profile.json) and by draft length "
            "(golden_al.yaml). markdown, latex: the summary as a table."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Folder outside of run directories. Default: RUN/FORM. For a table: a file, by default the terminal.",
        ),
    ] = None,
) -> None:
    """Write a run in the format of another tool, with a warning if the run is incomplete."""
    stored = read_run(run)
    if not stored.rows:
        raise UserError(f"nothing to export: {run} has no samples")
    if lacking := unfinished(stored):
        print(f"ssbench: warning: {run} is {lacking}", file=sys.stderr)
    try:
        _write(stored, form, out)
    except OSError as error:
        raise UserError(f"cannot write {out or run}: {os_reason(error)}") from error


def _write(run: Run, form: Form, out: Path | None) -> None:
    if table := TABLES.get(form):
        text = table(analyse(run))
        if out is None:
            print(text, end="")
            return
        _check_outside(out)
        write_text(out, text)
        print(f"written: {out}")
        return
    folder = out or run.path / form
    if out is None and folder.is_symlink():
        raise UserError(f"{folder} of the run directory is a link; give another folder as --out")
    if folder.resolve() != run.path.resolve() / form:
        _check_outside(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for problem in FOLDERS[form](analyse(run), folder):
        print(f"ssbench: warning: {problem}", file=sys.stderr)
    print(f"written: {folder}")


def _check_outside(out: Path) -> None:
    """Raise UserError for a path in a run directory: a method may have the name of one of its files."""
    if run := run_around(out):
        raise UserError(f"--out {out} is in the run directory {run}; give a path outside of it")


def import_specbench(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILES", help="Answer files, one per method, including the baseline's.")
    ],
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Name of the baseline's file, without .jsonl. Default: the one called ar, vanilla or baseline.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Score answer files of Spec-Bench, EAGLE or Medusa: one way of counting, intervals, notes on missing data."""
    rows = rescored(files, baseline)
    if as_json:
        print_json({"notes": list(limitations(rows)), "rows": [asdict(row) for row in rows]})
    else:
        _print_rescored(rows)


def _print_rescored(rows: list[RescoredRow]) -> None:
    console = Console()
    widen(console)
    tasks = {task: list(group) for task, group in groupby(rows, key=lambda row: row.task)}
    shown = [*(task for task in tasks if task != OVERALL and len(tasks) > 2), OVERALL]
    for task in shown:
        _print_task(task, tasks[task], console)
    for note in limitations(rows):
        console.print(note, style="dim", markup=False, highlight=False, soft_wrap=True)


def _print_task(task: str, rows: list[RescoredRow], console: object) -> None:
    table = result_table(escape(title(task)), COLUMNS)
    for row in sorted(rows, key=lambda row: (row.comparison != "baseline", -(row.speedup or 0))):
        table.add_row(
            escape(row.method),
            format_speedup(row.speedup),
            interval(row.speedup_interval) or row.comparison,
            format_number(row.mean_acceptance_length),
            format_number(None if row.mean_acceptance_length is None else row.mean_acceptance_length - 1),
            format_number(row.mean_accept_lengths),
            format_speedup(row.speedup_specbench),
            "" if row.comparison == "baseline" else f"{row.n_same_text} of {row.n_turns}",
            format_number(row.tokens_per_s, 1),
            f"{row.n_prompts:,}",
        )
    console.print(table)  # type: ignore[attr-defined]
