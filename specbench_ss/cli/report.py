"""Command `ssbench report`."""

from __future__ import annotations

import sys
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from specbench_ss.cli.shared import FailOn, fail
from specbench_ss.errors import UserError, os_reason
from specbench_ss.registry import REPORTS, load, names
from specbench_ss.results.quality import checked_margin
from specbench_ss.results.report import Report
from specbench_ss.results.sample_checks import unfinished
from specbench_ss.runs.records import Run
from specbench_ss.runs.run_dir import is_of_run, read_run

KINDS = ", ".join(names(REPORTS))  # those of plugins too


def command(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Directory of the run. Of several, the others are compared with the first."
        ),
    ],
    name: Annotated[
        str,
        typer.Option("--format", metavar="NAME", help=f"Kind of report: {KINDS}."),
    ] = "html",
    out: Annotated[
        Path | None,
        typer.Option("--out", help="File to write the report to, in place of one in the (first) run's directory."),
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
    """Write the report of an earlier run again, or of several beside each other. It says so where one is unfinished."""
    if len(runs) > 1 and fail_on:
        raise UserError("--fail-on looks at one run; `ssbench compare --fail-on` judges what changed between two")
    done = [read_run(run) for run in runs]
    margin = checked_margin(quality_margin)
    path = write_report(done[0], name, out, margin) if len(done) == 1 else write_comparison(done, name, out, margin)
    for run in done:
        if lacking := unfinished(run):
            print(f"ssbench: warning: {run.path} is {lacking}", file=sys.stderr)
    print(f"report: {path}")
    if open_it:
        open_in_browser(path)
    fail(done[0], fail_on)


def write_report(
    run: Run, name: str = "html", out: Path | None = None, quality_margin: float = Report.quality_margin
) -> Path:
    """Write the report `name` of a run, into its directory unless `out` is given; return its path.

    Raises UserError where it cannot be written there, or where no sample has been made yet.
    """
    report = _report(name, [run], quality_margin)
    return _written(out or run.path / report.filename, lambda path: report.write(run, path))


def write_comparison(runs: Sequence[Run], name: str, out: Path | None, quality_margin: float) -> Path:
    """Write the report `name` of several runs, into the directory of the first unless `out` is given; return its path.

    Raises UserError as `write_report` does, and where such a report shows one run.
    """
    report = _report(name, runs, quality_margin)
    path = out or runs[0].path / (report.filename_of_several or report.filename)
    return _written(path, lambda path: report.write_runs(runs, path))


def _report(name: str, runs: Sequence[Run], quality_margin: float) -> Report:
    report: Report = load(REPORTS, name)()
    report.quality_margin = quality_margin
    for run in runs:
        if not run.rows:
            raise UserError(f"nothing to report: {run.path} has none of the run's {run.samples:,} samples")
    return report


def _written(path: Path, write: Callable[[Path], None]) -> Path:
    if path.is_dir():
        raise UserError(f"cannot write {path}: it is a folder")
    if is_of_run(path):
        raise UserError(f"{path} belongs to a run and is not replaced: give another --out")
    try:
        write(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {os_reason(error)}") from error
    return path


def open_in_browser(path: Path) -> None:
    """Show a file in the default browser."""
    webbrowser.open(path.resolve().as_uri())
