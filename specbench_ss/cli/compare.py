"""Command `ssbench compare`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from specbench_ss.cli.printing import filled_table, result_table, widen
from specbench_ss.cli.shared import print_json, print_text
from specbench_ss.results.compare import (
    METRICS,
    OTHER_MACHINE,
    OTHER_THREADS,
    ComparedRow,
    RunComparison,
    as_record,
    compare,
    judged,
)
from specbench_ss.results.comparison_text import NAMES, change_columns, comparison_finding, interval_text
from specbench_ss.results.limits import Limit, broken, not_judged, read_limits, undecided
from specbench_ss.results.ranking import NO_MEAN
from specbench_ss.results.summary import OVERALL
from specbench_ss.results.table import Column


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
    why = [_changed(*pair) for pair in broken(rows, limits)] + (made.regressions if limits else [])
    doubts = [_changed(*pair) for pair in undecided(rows, limits)]
    known = (judged(limit.metric, row) and row.changes[limit.metric].interval for row in rows for limit in limits)
    if any(known) and not why:
        which = "judged method" if unknown else "method"
        stated = ", ".join(limit.text for limit in limits)
        others = f"; not compared: {', '.join(made.uncompared)}" if made.uncompared else ""
        print(f"ssbench: --fail-on: {stated}: no {which} has a whole 95% CI below a limit{others}", file=sys.stderr)
    if doubts:
        stated = f"{'; '.join(doubts)}: on both sides of the limit; more questions or repeats narrow the interval"
        print(f"ssbench: --fail-on: undecided: {stated}", file=sys.stderr)
    if why:
        print(f"ssbench: --fail-on: {'; '.join(why)}", file=sys.stderr)
        raise typer.Exit(1)


def _changed(row: ComparedRow, limit: Limit) -> str:
    change = interval_text(limit.metric, row.changes[limit.metric])
    return f"{limit.metric} of {row.method} changed by {change} ({limit.text})"


def print_comparison(made: RunComparison, console: Console, verbose: bool = False) -> None:
    """Print the finding, warnings, the tables, and the differences in configuration.

    verbose: include tasks without an interval.
    """
    widen(console)
    print_text(console, f"A: {made.a}\nB: {made.b}")
    print_text(console, comparison_finding(made.rows), "bold")
    for note in _notes(made):
        print_text(console, note)
    no_mean = len(made.measures) > 1
    for metric in (name for name in NAMES if not (name == "quality" and no_mean)):
        shown = [row for row in made.rows if _shown(row, metric, verbose)]
        if any(row.changes[metric].a is not None for row in shown):
            _print_metric(metric, shown, console)
    if no_mean:
        print_text(console, f"{NO_MEAN.capitalize()} ({', '.join(made.measures)}).")
    _print_differences(made, console)


def _shown(row: ComparedRow, metric: str, verbose: bool) -> bool:
    """Return whether a row is in a table: tasks are in that of the speedup only, AR where it is not 1 by definition."""
    of_task = metric == "speedup" and (verbose or row.changes[metric].interval is not None)
    return judged(metric, row) and (of_task or row.task == OVERALL)


def _print_differences(made: RunComparison, console: Console) -> None:
    if not made.found:
        console.print("Nothing differs in configuration, versions or machine.")
        return
    table = result_table("What differs", ("what", "A", "B"))
    for column in table.columns:
        column.justify, column.no_wrap, column.overflow = "left", False, "fold"
    for one in made.found:
        table.add_row("[red]✕[/] " * one.blocking + escape(one.what), escape(one.a), escape(one.b))
    console.print(table)


def _print_metric(metric: str, rows: Sequence[ComparedRow], console: Console) -> None:
    tasks = list(dict.fromkeys(row.task for row in rows))
    several = len(tasks) > 2  # a single task is all of them
    columns = [*[Column("task", "task", lambda row: row.task)] * several, *change_columns(metric)]
    order = [*tasks[1:], tasks[0]] if several else tasks[:1]  # all tasks together come last
    groups = [[row for row in rows if row.task == task] for task in order]
    console.print(filled_table(NAMES[metric][0].format(rows[0].baseline), columns, groups, once=several))


def _notes(made: RunComparison) -> Iterator[str]:
    """Yield notes on machines, outputs, failures and doubts."""
    rows = [row for row in made.rows if row.task == OVERALL]
    rates = [row.changes["tokens_per_s"] for row in rows]
    for rate in [rate for rate in rates if rate.verdict in (OTHER_MACHINE, OTHER_THREADS)][:1]:
        where = "Same machine, other threads" if rate.verdict == OTHER_THREADS else "Other machine"
        yield f"{where} ({rate.reason}): compare speedups, not tokens/s."
    for row in rows:
        if row.n_other_outputs:
            yield f"{row.method}: {row.n_other_outputs} of {row.n_outputs} outputs have other tokens in B."
    same = [row.method for row in rows if row.n_outputs and not row.n_other_outputs]
    others = made.uncompared or any(row.n_failed_a or row.n_failed_b for row in rows)
    if same and len(same) == len(rows) and not others:
        yield "All outputs of both runs have the same tokens."
    elif same:
        yield f"{', '.join(same)}: the outputs that both runs have are of the same tokens."
    for row in rows:
        if row.n_failed_a or row.n_failed_b:
            counts = f"{row.n_failed_a} samples failed in A, {row.n_failed_b} in B"
            yield f"{row.method}: {counts} ({row.error}); no number includes them."
    yield from (f"Warning: {text}" for text in made.warnings)
