"""`ssbench report`: write the report of a run that is already there."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from specbench_ss.errors import UserError


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run directory.")],
    name: Annotated[str, typer.Option("--as", metavar="NAME", help="Which report.")] = "html",
    out: Annotated[Path | None, typer.Option("--out", help="Write it here instead of into the run directory.")] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
) -> None:
    """Write the report of a run again, or in another form."""
    path = write_report(run, name, out)
    print(f"report: {path}")
    if open_it:
        open_in_browser(path)


def write_report(run_dir: Path, name: str = "html", out: Path | None = None) -> Path:
    """Write the report `name` of a run directory; returns where it is. Raises UserError where it cannot go there."""
    from specbench_ss.registry import load_report
    from specbench_ss.rundir import check_manifest, read_run

    report = load_report(name)
    path = out or run_dir / report.filename
    run = read_run(run_dir)
    check_manifest(run)
    if path.is_dir():
        raise UserError(f"cannot write {path}: it is a folder")
    try:
        report.write(run, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {(error.strerror or str(error)).lower()}") from error
    return path


def open_in_browser(path: Path) -> None:
    """Show a file in the default browser."""
    webbrowser.open(path.resolve().as_uri())
