"""`ssbench run` with --methods and --servers: two runs with the same prompts, and their parity."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from specbench_ss.bench import server_run as serving
from specbench_ss.bench.build_config import asked_run, options_of_methods
from specbench_ss.cli.parity import print_parity
from specbench_ss.cli.report import write_report
from specbench_ss.cli.run_output import Form, checked, describe, exit_on, finished, make_plan, present, record
from specbench_ss.cli.shared import interrupted, print_json, to_go_on
from specbench_ss.errors import UserError
from specbench_ss.results.analysis import Results
from specbench_ss.results.parity import METHODS, SERVERS, Pair, compare_pairs, pairs_of, store, with_speedups
from specbench_ss.runs.manifest import MANIFEST
from specbench_ss.runs.run_options import SERVER, RunOptions


def run_both(options: RunOptions, form: Form) -> None:
    """Check both runs, then make them, or print their plans.

    The servers are measured before the methods: they return all their memory at the end, and this process would not.
    """
    if options.sessions > 1:
        raise UserError("--sessions does not go with --servers: leave one of them out")
    config, where, access = asked_run(options.part((SERVER,)))  # first, since the next call loads the plugins
    own_config, own, _ = asked_run(options_of_methods(options))
    assert access is not None and access.launch is not None
    out = own.out
    if (out / MANIFEST).exists():
        raise UserError(f"{out} is the directory of one run; use another --out for methods and servers")
    own, where = replace(own, out=out / METHODS), replace(where, out=out / SERVERS)
    with _naming(out):
        plan = checked(own_config, own)
        served = serving.check(config, where, plan.data)
    methods, servers = [one.label for one in plan.config.methods], [one.label for one in config.endpoints]
    pairs = pairs_of(methods, servers, access.launch.methods)
    if options.dry_run:
        describe(plan, own, runs=out.parent)
        print()
        describe(served, where, access, out.parent, plan)
        for pair in pairs:
            print(f"{'pair':<10} {' = '.join(pair)}")
        return
    try:
        with _naming(out):
            of_servers = finished(make_plan(served, where, access))
            of_methods = finished(make_plan(plan, own))
        show_both(of_methods, of_servers, pairs, options, form)
    except KeyboardInterrupt:
        raise interrupted(to_go_on(out)) from None


@contextmanager
def _naming(out: Path) -> Iterator[None]:
    """Add the --out of both runs to errors that mention --resume, which name the directory of one run."""
    try:
        yield
    except UserError as error:
        if "--resume" not in str(error):
            raise
        raise type(error)(f"{error}; --out is {out} for both runs") from None


def show_both(local: Results, served: Results, pairs: list[Pair], options: RunOptions, form: Form) -> None:
    """Print both results and the table of their parity, and write reports and table; exit as `exit_on` does."""
    found = with_speedups(compare_pairs(local.run, served.run, pairs), local, served)
    store(local.path.parent, found)
    both = {METHODS: local, SERVERS: served}
    reports = {name: write_report(results) for name, results in both.items()}
    for name, results in both.items():
        present(results, reports[name], options.open, form)
    if form == "json":
        records = {name: record(results, reports[name]) for name, results in both.items()}
        print_json(records | {"parity": [one.as_dict() for one in found]})
    else:
        print_parity(found, Console())
    for results in both.values():
        exit_on(results, options.fail_on)
