"""`ssbench report`: write the report of an earlier run."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specbench_ss.commands.fail_on import FailOn, fail
from specbench_ss.errors import UserError, os_reason
from specbench_ss.results.report import Report

if TYPE_CHECKING:
    from specbench_ss.runs.rows import Run


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run.")],
    name: Annotated[str, typer.Option("--as", metavar="NAME", help="Kind of report.")] = "html",
    out: Annotated[
        Path | None, typer.Option("--out", help="File to write the report to, in place of one in the run directory.")
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Open the report in a browser.")] = False,
    quality_margin: Annotated[
        float,
        typer.Option(
            help="How much lower than that of ar, on scores from 0 to 1, the quality of a method that changes the "
            "model may be to be called non-inferior."
        ),
    ] = Report.quality_margin,
    fail_on: FailOn = None,
) -> None:
    """Write the report of an earlier run again. The report says so where the run is not complete."""
    from specbench_ss.results.health import unfinished
    from specbench_ss.results.quality import checked_margin
    from specbench_ss.runs.run_directory import read_run

    done = read_run(run)
    path = write_report(done, name, out, checked_margin(quality_margin))
    lacking = unfinished(done)
    if lacking:
        print(f"ssbench: warning: {run} is {lacking}", file=sys.stderr)
    print(f"report: {path}")
    if open_it:
        open_in_browser(path)
    fail(done, fail_on)


def write_report(
    run: Run, name: str = "html", out: Path | None = None, quality_margin: float = Report.quality_margin
) -> Path:
    """Write the report `name` of a run, into its directory unless `out` is given; return its path.

    Raises UserError where it cannot be written there, or where no sample has been made yet.
    """
    from specbench_ss.registry import load_report

    report = load_report(name)
    report.quality_margin = quality_margin
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
