"""Command `ssbench parity`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specbench_ss.errors import UserError
from specbench_ss.results.parity import Parity, differences, parity
from specbench_ss.results.text import format_number
from specbench_ss.runs.run_dir import read_run

SHOWN = 8  # differing prompts in the terminal


def command(
    local: Annotated[Path, typer.Argument(metavar="LOCAL", help="Directory of a run of methods in this process.")],
    served: Annotated[Path, typer.Argument(metavar="SERVED", help="Directory of a run of servers.")],
    pair: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METHOD=SERVER", help="Labels to compare; may be given several times. Default: equal ones."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of the table.")] = False,
) -> None:
    """Compare a drafter in this process with the same drafter in an engine: outputs, steps and accepted tokens.

    Exit with code 1 if a pair is not exact.
    """
    found = parity(read_run(local), read_run(served), list(map(_pair, pair or ())))
    if as_json:
        print(json.dumps([one.as_dict() for one in found], indent=1, ensure_ascii=False))
    else:
        _print(found, Console())
    if not all(one.exact for one in found):
        raise typer.Exit(1)


def _pair(text: str) -> tuple[str, str]:
    method, equals, server = text.rpartition("=")
    if not (equals and method and server):
        raise UserError(f"--pair {text}: write METHOD=SERVER, with labels of the two runs")
    return method, server


def _print(found: list[Parity], console: Console) -> None:
    table = Table("method", "server", "parity", box=box.SIMPLE_HEAD)
    for name in (*found[0].counts(), "τ here", "τ served"):
        table.add_column(name, justify="right", min_width=8)
    for one in found:
        tau = [format_number(value, 3) for value in one.tau]
        verdict = "exact" if one.exact else "differs"
        table.add_row(escape(one.method), escape(one.server), verdict, *map(str, one.counts().values()), *tau)
    console.print(table)
    for one in found:
        lines = list(differences(one))
        for line in lines[:SHOWN]:
            console.print(f"{one.method}: {line}", highlight=False, markup=False)
        if len(lines) > SHOWN:
            console.print(f"{one.method}: {len(lines) - SHOWN} more; --json lists all", markup=False)
