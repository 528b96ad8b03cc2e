"""Commands `ssbench export` and `ssbench import-specbench`."""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape

from specbench_ss.cli.printing import filled_table, widen
from specbench_ss.cli.shared import print_json, print_text, print_warning
from specbench_ss.errors import UserError, os_errors
from specbench_ss.results import exchange
from specbench_ss.results.acceptance_profile import write_profiles
from specbench_ss.results.analysis import analyse
from specbench_ss.results.exchange import RescoredRow, limitations, rescored
from specbench_ss.results.sample_checks import check_samples, unfinished
from specbench_ss.results.summary import OVERALL
from specbench_ss.results.table import Column, summary_latex, summary_markdown
from specbench_ss.results.text import format_number, format_speedup, interval, title
from specbench_ss.runs.records import Run
from specbench_ss.runs.run_dir import read_run, run_around
from specbench_ss.storage import write_text

Form = Literal["specbench", "csv", "parquet", "profile", "markdown", "latex"]
FOLDERS = exchange.FOLDERS | {"profile": write_profiles}  # forms of several files
TABLES = {"markdown": summary_markdown, "latex": summary_latex}


def _accepted(row: RescoredRow) -> str:
    return format_number(None if row.mean_acceptance_length is None else row.mean_acceptance_length - 1)


def _same_text(row: RescoredRow) -> str:
    return "" if row.comparison == "baseline" else f"{row.n_same_text} of {row.n_turns}"


COLUMNS = (
    Column("method", "method", lambda row: row.method),
    Column("speedup", "speedup", lambda row: format_speedup(row.speedup)),
    Column("speedup_interval", "95% CI", lambda row: interval(row.speedup_interval) or row.comparison),
    Column("mean_acceptance_length", "τ", lambda row: format_number(row.mean_acceptance_length)),
    Column("accepted", "τ−1", _accepted),
    Column("mean_accept_lengths", "stored τ", lambda row: format_number(row.mean_accept_lengths)),
    Column("speedup_specbench", "Spec-Bench", lambda row: format_speedup(row.speedup_specbench)),
    Column("n_same_text", "same text", _same_text),
    Column("tokens_per_s", "tok/s", lambda row: format_number(row.tokens_per_s, 1)),
    Column("n_prompts", "prompts", lambda row: f"{row.n_prompts:,}"),
)


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
    check_samples(stored, "export")
    if lacking := unfinished(stored):
        print_warning(f"{run} is {lacking}")
    with os_errors(f"cannot write {out or run}"):
        _write(stored, form, out)


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
        print_warning(problem)
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
    for task in (*(task for task in tasks if task != OVERALL and len(tasks) > 2), OVERALL):
        ranked = sorted(tasks[task], key=lambda row: (row.comparison != "baseline", -(row.speedup or 0)))
        console.print(filled_table(escape(title(task)), COLUMNS, [ranked]))
    for note in limitations(rows):
        print_text(console, note, "dim")
