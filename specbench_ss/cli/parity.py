"""Command `ssbench parity`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specbench_ss.cli.printing import NARROW, broken, widen
from specbench_ss.cli.shared import print_json
from specbench_ss.errors import UserError
from specbench_ss.results.analysis import load_run
from specbench_ss.results.parity import (
    Pair,
    Parity,
    both_runs,
    compare_pairs,
    differences,
    parity,
    stored_pairs,
    with_speedups,
)
from specbench_ss.results.ranking import MARKED, MARKS, marked_speedup
from specbench_ss.results.text import MISSING, format_number

SHOWN = 8  # differing prompts in the terminal


def command(
    local: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="Directory of a run of --methods and --servers, or of a run of methods in this process."
        ),
    ],
    served: Annotated[
        Path | None, typer.Argument(metavar="SERVED", help="Directory of a run of servers, if RUN has none.")
    ] = None,
    pair: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METHOD=SERVER",
            help="Labels to compare; may be given several times. Default: the pairs of RUN, or equal labels.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of the table.")] = False,
) -> None:
    """Compare a drafter in this process with the same drafter in an engine: outputs, steps and accepted tokens.

    Exit with code 1 if a pair is not exact.
    """
    pairs = list(map(_pair, pair or ()))
    if served is None:
        pairs = pairs or stored_pairs(local)
        here, there = map(load_run, both_runs(local))
        compared = compare_pairs(here.run, there.run, pairs)
    else:
        here, there = load_run(local), load_run(served)
        compared = parity(here.run, there.run, pairs)
    found = with_speedups(compared, here, there)
    if as_json:
        print_json([one.as_dict() for one in found])
    else:
        print_parity(found, Console())
    if not all(one.exact for one in found):
        raise typer.Exit(1)


def _pair(text: str) -> Pair:
    method, equals, server = text.rpartition("=")
    if not (equals and method and server):
        raise UserError(f"--pair {text}: write METHOD=SERVER, with labels of the two runs")
    return method, server


def print_parity(found: Sequence[Parity], console: Console) -> None:
    """Print a row for each pair, and the prompts that differ."""
    widen(console)
    table = Table(box=None, padding=(0, 0, 0, 2), header_style="bold")
    for name in ("local method", "server"):
        table.add_column(name, overflow="fold")
    for name in (*found[0].counts(), "τ local", "τ served", "speedup local", "speedup served"):
        table.add_column(name.replace(" ", "\n"), justify="right")
    table.add_column("parity")
    for one in found:
        labels = [escape(broken(label, NARROW)) for label in (one.method, one.server)]
        counts = [MISSING if count is None else str(count) for count in one.counts().values()]
        tau, speedup = [format_number(value, 3) for value in one.tau], map(marked_speedup, one.speedup, one.comparison)
        table.add_row(*labels, *counts, *tau, *speedup, one.verdict)
    console.print(table)
    used = {comparison for one in found for comparison in one.comparison}
    for comparison in (comparison for comparison in MARKS if comparison in used):
        console.print(f"{MARKS[comparison]} {MARKED[comparison]}", style="dim", highlight=False)
    if any(one.sampled for one in found):
        console.print("not compared: sampled outputs differ in every run; parity needs temperature 0", soft_wrap=True)
    for one in found:
        lines = list(differences(one))
        for line in lines[:SHOWN]:
            console.print(f"{one.server}: {line}", highlight=False, markup=False)
        if len(lines) > SHOWN:
            console.print(f"{one.server}: {len(lines) - SHOWN} more; --json lists all", markup=False)
