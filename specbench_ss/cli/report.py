"""Command `ssbench report`."""

from __future__ import annotations

import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from specbench_ss.cli.printing import print_answer, print_concurrency, print_verbose
from specbench_ss.cli.shared import FailOn, fail, print_warning, read
from specbench_ss.errors import UserError, os_errors
from specbench_ss.registry import REPORTS, load, names
from specbench_ss.results.analysis import Results, analyse
from specbench_ss.results.compare import differences, why_incomparable
from specbench_ss.results.quality import MARGIN
from specbench_ss.results.report import Report
from specbench_ss.results.sample_checks import check_samples
from specbench_ss.runs.manifest import newest_runs
from specbench_ss.runs.run_dir import is_of_run, read_run

KINDS = ", ".join(names(REPORTS))  # those of plugins too


def command(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN...",
            help="Directory of the run; of several, the others are compared with the first. Default: the latest run "
            "in ./runs.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        str,
        typer.Option("--format", metavar="NAME", help=f"Kind of report: {KINDS}."),
    ] = "html",
    out: Annotated[
        Path | None,
        typer.Option("--out", help="File to write the report to, in place of one in the (first) run's directory."),
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Open the report in a browser.")] = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Print results by task, every check with its details, and notes."),
    ] = False,
    quality_margin: Annotated[
        float,
        typer.Option(
            help="Non-inferiority margin for the quality of a method that changes the model, on scores from 0 to 1."
        ),
    ] = MARGIN,
    fail_on: FailOn = None,
) -> None:
    """Write the report of an earlier run, or of several side by side, with a warning if one is unfinished."""
    read(fail_on)
    if not runs:
        runs = [latest_run(Path("runs"))]
        print(f"latest run: {runs[0]}")
    if len(runs) > 1 and fail_on:
        raise UserError("--fail-on takes one run; use `ssbench compare --fail-on` for the differences of two")
    done = [analyse(read_run(run), quality_margin) for run in runs]
    for other in done[1:]:
        if why := why_incomparable(differences(done[0].run, other.run)):
            print_warning(f"{done[0].path} and {other.path} are not compared: {why}")
    path = write_report(done[0], name, out) if len(done) == 1 else write_comparison(done, name, out)
    for results in done:
        if results.unfinished:
            print_warning(f"{results.path} is {results.unfinished}")
    if len(done) == 1:
        (_print_all if verbose else print_answer)(done[0], Console())
    print(f"report   {path}")
    if open_it:
        open_in_browser(path)
    fail(done[0], fail_on)


def _print_all(results: Results, console: Console) -> None:
    print_verbose(results, console)
    print_concurrency(results, console)


def latest_run(folder: Path) -> Path:
    """Return the run directory in a folder that was started last; it may be part of a run of methods and servers.

    Raises UserError if there is none.
    """
    runs = newest_runs(folder)
    if not runs:
        raise UserError(f"no run in ./{folder}; give the directory of a run: ssbench report DIRECTORY")
    return runs[0][0]


def write_report(results: Results, name: str = "html", out: Path | None = None) -> Path:
    """Write the report `name` of a run, into its directory unless `out` is given; return its path.

    Raises UserError where it cannot be written there, or where no sample has been made yet.
    """
    report = _report(name, [results])
    return _written(out or results.path / report.filename, lambda path: report.write(results, path))


def write_comparison(runs: Sequence[Results], name: str, out: Path | None) -> Path:
    """Write the report `name` of several runs, into the directory of the first unless `out` is given; return its path.

    Raises UserError as `write_report` does, and where such a report shows one run.
    """
    report = _report(name, runs)
    path = out or runs[0].path / (report.filename_of_several or report.filename)
    return _written(path, lambda path: report.write_runs(runs, path))


def _report(name: str, runs: Sequence[Results]) -> Report:
    report: Report = load(REPORTS, name)()
    for run in (results.run for results in runs):
        check_samples(run, "report")
    return report


def _written(path: Path, write: Callable[[Path], None]) -> Path:
    if is_of_run(path):
        raise UserError(f"{path} belongs to a run and is not replaced: give another --out")
    with os_errors(f"cannot write {path}"):
        write(path)
    return path


def open_in_browser(path: Path) -> None:
    """Show a file in the default browser, or print that there is none."""
    if not webbrowser.open(path.resolve().as_uri()):
        print_warning(f"--open found no browser; open {path} yourself")
