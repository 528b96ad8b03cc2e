"""`ssbench report`: write the report of a run that is already there."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specbench_ss.errors import UserError, os_reason

if TYPE_CHECKING:
    from specbench_ss.runs.rows import Run


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run.")],
    name: Annotated[str, typer.Option("--as", metavar="NAME", help="Kind of report.")] = "html",
    out: Annotated[
        Path | None, typer.Option("--out", help="File to write the report to, in place of one in the run directory.")
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Open the report in a browser.")] = False,
) -> None:
    """Write the report of an earlier run again. The report says so where the run is not complete."""
    from specbench_ss.results.health import unfinished
    from specbench_ss.runs.run_directory import read_run

    done = read_run(run)
    path = write_report(done, name, out)
    lacking = unfinished(done)
    if lacking:
        print(f"ssbench: warning: {run} is {lacking}", file=sys.stderr)
    print(f"report: {path}")
    if open_it:
        open_in_browser(path)


def write_report(run: Run, name: str = "html", out: Path | None = None) -> Path:
    """Write the report `name` of a run, into its directory unless `out` is given; returns where it is.

    Raises UserError where it cannot go there, or where no sample has been made yet.
    """
    from specbench_ss.registry import load_report

    report = load_report(name)
    path = out or run.path / report.filename
    if not run.rows:
        raise UserError(f"nothing to report: {run.path} has none of the run's {run.samples:,} samples")
    if path.is_dir():
        raise UserError(f"cannot write {path}: it is a folder")
    try:
        report.write(run, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {os_reason(error)}") from error
    return path


def open_in_browser(path: Path) -> None:
    """Show a file in the default browser."""
    webbrowser.open(path.resolve().as_uri())
