"""`ssbench export`: a run in the forms of other tools."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from specbench_ss.errors import UserError, os_reason
from specbench_ss.results import exports
from specbench_ss.results.health import unfinished
from specbench_ss.results.summary import summarise
from specbench_ss.runs.rows import Run
from specbench_ss.runs.run_directory import read_run, run_around

Form = Literal["specbench", "csv", "parquet", "markdown"]


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run.")],
    form: Annotated[
        Form,
        typer.Option(
            help="specbench: an answer file for each method, as Spec-Bench has them. csv, parquet: samples, steps, "
            "sameness and summary. markdown: the summary as a table."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Folder outside of run directories, RUN/FORM if not given; of markdown a file, the terminal if not "
            "given.",
        ),
    ] = None,
) -> None:
    """Write a run in the form of another tool. Says so where the run is not complete."""
    done = read_run(run)
    if not done.rows:
        raise UserError(f"nothing to export: {run} has no sample")
    if lacking := unfinished(done):
        print(f"ssbench: warning: {run} is {lacking}", file=sys.stderr)
    try:
        _write(done, form, out)
    except OSError as error:
        raise UserError(f"cannot write {out or run}: {os_reason(error)}") from error


def _write(run: Run, form: Form, out: Path | None) -> None:
    if form == "markdown":
        text = exports.markdown(summarise(run), run.manifest["config"])
        if out is None:
            print(text, end="")
            return
        _check_outside(out)
        out.write_text(text, encoding="utf-8")
        return
    folder = out or run.path / form
    if folder.resolve() != run.path.resolve() / form:
        _check_outside(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for said in exports.FOLDERS[form](run, folder):
        print(f"ssbench: warning: {said}", file=sys.stderr)
    print(f"written: {folder}")


def _check_outside(out: Path) -> None:
    """Raise UserError for a path that is a run directory or lies in one: a method may be called as one of its files."""
    if run := run_around(out):
        raise UserError(f"--out {out} lies in the run directory {run}: give a path outside of it")
