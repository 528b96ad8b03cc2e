"""Command `ssbench compare`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from specbench_ss.cli.shared import print_json
from specbench_ss.results.compare import METRICS, as_record, broken, compare, judged, not_judged, read_limits
from specbench_ss.results.summary import OVERALL
from specbench_ss.results.terminal import interval_text, print_comparison


def command(
    run_a: Annotated[Path, typer.Argument(metavar="RUN_A", help="Directory of run A, the earlier one.")],
    run_b: Annotated[Path, typer.Argument(metavar="RUN_B", help="Directory of run B, the later one.")],
    fail_on: Annotated[
        str | None,
        typer.Option(
            "--fail-on",
            metavar="METRIC<CHANGE,...",
            help="Exit with code 1 if, for all tasks together, the whole CI of a method's change is below this limit: "
            f"speedup<-5%. Metrics: {', '.join(METRICS)}; tau is mean_acceptance_length; for quality, the change is a "
            "difference. Methods that are missing, failed, wrong or invalid in run B alone fail too.",
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Compare runs with different models, questions or decoding settings."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of tables.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print tasks with too few questions for an interval too.")
    ] = False,
) -> None:
    """Compare two runs: significant changes of speedup from A to B, and differences in configuration.

    Methods are paired by name, options included.
    """
    limits = read_limits(fail_on)
    made = compare(run_a, run_b, force=force)
    if as_json:
        record = {
            "a": str(made.a),
            "b": str(made.b),
            "differences": [asdict(one) for one in made.found],
            "warnings": list(made.warnings),
            "regressions": made.regressions,
            "rows": [as_record(row) for row in made.rows],
        }
        print_json(record)
    else:
        print_comparison(made, Console(), verbose)
    rows = [row for row in made.rows if row.task == OVERALL]
    if unknown := not_judged(rows, limits):
        print(f"ssbench: --fail-on: not judged: {'; '.join(unknown)}", file=sys.stderr)
    why = [
        f"{limit.metric} of {row.method} changed by {interval_text(limit.metric, row.changes[limit.metric])} "
        f"({limit.text})"
        for row, limit in broken(rows, limits)
    ]
    why += made.regressions if limits else []
    known = (judged(limit.metric, row) and row.changes[limit.metric].interval for row in rows for limit in limits)
    if any(known) and not why:
        which = "judged method" if unknown else "method"
        stated = ", ".join(limit.text for limit in limits)
        others = f"; not compared: {', '.join(made.uncompared)}" if made.uncompared else ""
        print(f"ssbench: --fail-on: {stated}: no {which} has a whole 95% CI below a limit{others}", file=sys.stderr)
    if why:
        print(f"ssbench: --fail-on: {'; '.join(why)}", file=sys.stderr)
        raise typer.Exit(1)
