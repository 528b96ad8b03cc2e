"""`ssbench run --config FILE.yaml`: a file's values as the defaults of the command line."""

from __future__ import annotations

from pathlib import Path

import typer

from specbench_ss import options
from specbench_ss.benchmark.build_config import as_options
from specbench_ss.files.user_files import mapping, read_bytes


def check_timeout(seconds: float | None) -> float | None:
    """Option callback: a limit is a number of seconds above 0."""
    return None if seconds is None else options.seconds("--timeout", seconds)


def stated(ctx: typer.Context) -> set[str]:
    """Return the options that the command line or the file of --config has; `set_` is `set`."""
    found = {name: ctx.get_parameter_source(name) for name in ctx.params}
    return {name.rstrip("_") for name, source in found.items() if source is not None and source.name != "DEFAULT"}


def read_config_file(ctx: typer.Context, path: Path | None) -> Path | None:
    """Option callback: the file's values become the defaults of the options not given on the command line."""
    if path is not None and not ctx.resilient_parsing:
        names = {p.opts[0].lstrip("-").replace("-", "_"): str(p.name) for p in ctx.command.params}
        values = as_options(mapping(read_bytes(path), path), set(names) - {"config", "help"}, path)
        ctx.default_map = {names[option]: value for option, value in values.items()}
    return path
