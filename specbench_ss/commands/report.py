"""`ssbench report`: write the report of a run that is already there."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer


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
    """Write the report `name` of a run directory; returns where it is."""
    from specbench_ss.registry import load_report
    from specbench_ss.rundir import read_run

    report = load_report(name)
    path = out or run_dir / report.filename
    report.write(read_run(run_dir), path)
    return path


def open_in_browser(path: Path) -> None:
    """Show a file in the default browser."""
    webbrowser.open(path.resolve().as_uri())
