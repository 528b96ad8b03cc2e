"""`ssbench suites`: list them, download their data."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(help="List the suites; fetch their data.", invoke_without_command=True)


@app.callback()
def _list(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is not None:
        return
    from specbench_ss import registry

    for name, suite in registry.load_all(registry.SUITES).items():
        print(f"{name:<10} {suite.summary}\n{'':<10} categories: {', '.join(suite.categories)}")


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="The suite.")],
    source: Annotated[
        str | None, typer.Option("--source", metavar="URL", help="Take the data from here instead of its usual home.")
    ] = None,
) -> None:
    """Download a suite's data and check it."""
    from specbench_ss import registry

    print(f"{name}: {registry.load_suite(name).fetch(source)}")
