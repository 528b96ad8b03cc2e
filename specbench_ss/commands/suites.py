"""`ssbench suites`: list the suites, and download their data."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(help="List the suites, or download their data.", invoke_without_command=True)


@app.callback()
def _list(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is not None:
        return
    from specbench_ss import registry

    for name, suite in registry.load_all(registry.SUITES).items():
        print(f"{name:<10} {suite.summary}\n{'':<10} categories: {', '.join(suite.categories)}")


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="Name of the suite.")],
    source: Annotated[
        str | None,
        typer.Option("--source", metavar="URL", help="Address to download the data from, in place of its usual one."),
    ] = None,
) -> None:
    """Download a suite's data and check that it is complete and unchanged."""
    from specbench_ss import registry

    print(f"{name}: {registry.load_suite(name).fetch(source)}")
