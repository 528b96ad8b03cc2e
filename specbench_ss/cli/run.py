"""Command `ssbench run`. Its options: `runs/run_options.py`."""

from __future__ import annotations

import sys
from typing import Any

import typer

from specbench_ss.bench.build_config import asked_run
from specbench_ss.bench.sessions import run_sessions
from specbench_ss.cli import run_output
from specbench_ss.cli.run_both import run_both
from specbench_ss.cli.shared import interrupted, read, take_options, to_go_on
from specbench_ss.errors import UserError
from specbench_ss.redaction import redacted_words
from specbench_ss.runs.run_options import FILE, RunOptions, given_options
from specbench_ss.user_files import mapping, read_bytes


def command(ctx: typer.Context, **given: Any) -> None:
    """Compare the speed of methods on the prompts of a suite, with AR decoding as the baseline."""
    options = RunOptions(**_with_file(ctx, given))
    if options.dry_run and options.json:
        raise UserError("--dry-run prints its plan as text: leave out --json")
    read(options.fail_on)
    if options.has_both:
        run_both(options, _form(options))
        return
    config, where, access = asked_run(options)
    if options.dry_run:
        run_output.describe(run_output.plan_of(config, where, access), where, access)
        return
    try:
        if where.sessions > 1:
            run_sessions(options, where, ["ssbench", *sys.argv[1:]], shown=True)
            run_output.show(run_output.finished(where.out), options.open, options.fail_on, _form(options))
            return
        run_output.run(config, where, access, options.open, options.fail_on, _form(options))
    except KeyboardInterrupt:
        raise interrupted(to_go_on(where.out, access.hidden if access else redacted_words)) from None


take_options(command, RunOptions)


def _form(options: RunOptions) -> run_output.Form:
    if options.json:
        return "json"
    return "quiet" if options.quiet else "verbose" if options.verbose else "short"


def _with_file(ctx: typer.Context, given: dict[str, Any]) -> dict[str, Any]:
    """Return the options with those of the file of --config that the command line does not have."""
    path = given["config"]
    if path is None:
        return given
    values = given_options(RunOptions, mapping(read_bytes(path), path), FILE, path)
    stated = (name for name in values if ctx.get_parameter_source(name).name != "DEFAULT")  # type: ignore[union-attr]
    return given | values | {name: given[name] for name in stated}
