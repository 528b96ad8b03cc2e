"""`ssbench suites`: list the suites, show their questions, download their data, and hold them to the laws."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specbench_ss import registry
from specbench_ss.benchmark.build_config import suite_and_data
from specbench_ss.benchmark.requests import suite_request
from specbench_ss.commands import help_texts
from specbench_ss.commands.suite_output import print_data
from specbench_ss.models.loading import outline_of
from specbench_ss.models.model_folder import check_model
from specbench_ss.runs.suite import SuiteRequest
from specbench_ss.testing.suite_laws import suite_results

app = typer.Typer(
    help="List the suites, show their questions, download their data, or check one.", invoke_without_command=True
)
Name = Annotated[
    str, typer.Argument(metavar="NAME[:FILE]", help="Name of the suite, with its data where it needs any.")
]
Data = Annotated[Path | None, typer.Option("--data", help="File or folder to read the suite's questions from.")]
Model = Annotated[str, typer.Option("--model", help=help_texts.MODEL)]


@app.callback()
def _list(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is not None:
        return

    for name, suite in registry.load_all(registry.SUITES).items():
        known = ", ".join(suite.categories) or "those of the file"
        print(f"{name:<12} {suite.summary}\n{'':<12} categories: {known}")


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="Name of the suite.")],
    source: Annotated[
        str | None,
        typer.Option("--source", metavar="URL", help="Address to download the data from, in place of its usual one."),
    ] = None,
) -> None:
    """Download a suite's data and check that it is complete and unchanged."""
    print(f"{name}: {registry.load_suite(name).fetch(source)}")


@app.command()
def show(
    name: Name,
    sample: Annotated[int, typer.Option("--sample", min=0, help="Questions of each task to print.")] = 1,
    categories: Annotated[str | None, typer.Option(metavar="A,B", help=help_texts.CATEGORIES)] = None,
    limit: Annotated[
        int | None, typer.Option(min=0, help="Questions of each task to take; 0 takes all. Default: the suite's own.")
    ] = None,
    data: Data = None,
    model: Model = "lab",
    whole: Annotated[bool, typer.Option("--whole", help="Print whole questions, however long they are.")] = False,
) -> None:
    """Show what a run of this suite would ask: how many questions of each task, and some of them."""
    plain, request = _asked(name, categories, limit, data, model)
    print_data(registry.load_suite(plain).load(request), sample, whole)


@app.command()
def check(name: Name, data: Data = None, model: Model = "lab") -> None:
    """Hold a suite to the laws that results rely on (docs/suites.md). The exit code is 1 where one is broken."""
    plain, request = _asked(name, None, None, data, model)
    kind = type(registry.load_suite(plain))
    broken = 0
    for law, what in suite_results(kind, request):
        broken += bool(what)
        print(f"{'broken' if what else 'ok':<7} {law.name:<12} {law.text}" + (f"\n{'':<20} {what}" if what else ""))
    if broken:
        raise typer.Exit(1)


def _asked(
    name: str, categories: str | None, limit: int | None, data: Path | None, model: str
) -> tuple[str, SuiteRequest]:
    """Return the suite's name, and what a run with this model would ask of it."""
    plain, carried = suite_and_data(name, data)
    check_model(model)
    asked = [part.strip() for part in (categories or "").split(",") if part.strip()]
    return plain, suite_request(asked, limit, carried, outline_of(model))
