"""Command `ssbench suites`."""

from __future__ import annotations

import textwrap
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from specbench_ss import registry
from specbench_ss.bench.build_config import listed, suite_and_data
from specbench_ss.bench.preflight import suite_request
from specbench_ss.cli.shared import MODEL, Categories
from specbench_ss.conformance.suite_checks import suite_results
from specbench_ss.models.load import outline_of
from specbench_ss.models.resolve import check_model
from specbench_ss.results.text import pluralize
from specbench_ss.suite import Question, SuiteData, SuiteRequest

LINES, WIDTH = 6, 110  # of a text that is not shown whole


def print_data(data: SuiteData, sample: int, whole: bool) -> None:
    """Print a suite's edition, hash, notes and counts, and the first `sample` questions of each category."""
    turns = sum(len(question.turns) for question in data.questions)
    print(f"{data.name} ({data.edition}), {data.content_hash[:12]}")
    asked = f"{pluralize(len(data.questions), 'question')}, {pluralize(turns, 'prompt')}"
    print(f"{asked}, answers of at most {data.max_new_tokens} tokens")
    for note in data.notes:
        print(f"note: {note}")
    for category, count in Counter(question.category for question in data.questions).items():
        of_one = [question for question in data.questions if question.category == category]
        print(f"\n{category}: {count}, scored by {_metrics(of_one)}")
        for question in of_one[:sample]:
            _print_question(question, whole)


def _metrics(questions: list[Question]) -> str:
    return ", ".join(sorted({question.metric or "nothing" for question in questions}))


def _print_question(question: Question, whole: bool) -> None:
    for message in question.history:
        print(f"  {question.id}, before: {message.role}")
        print(_shown(message.content, whole))
    for number, turn in enumerate(question.turns):
        print(f"  {question.id}, turn {number + 1}")
        print(_shown(turn, whole))
        for reference in question.references[number] if question.references else ():
            print(f"  reference\n{_shown(reference, whole)}")


def _shown(text: str, whole: bool) -> str:
    """Return the text, indented; its first lines alone unless it is to be whole."""
    wrapped = [part for line in text.splitlines() or [""] for part in textwrap.wrap(line, WIDTH - 4) or [""]]
    kept = wrapped if whole else wrapped[:LINES]
    more = [f"... {len(wrapped) - len(kept)} more lines"] if len(wrapped) > len(kept) else []
    return textwrap.indent("\n".join([*kept, *more]), "    ", lambda _: True)


app = typer.Typer(
    help="List the suites, show their questions, download their data, or check one.", invoke_without_command=True
)
Name = Annotated[
    str, typer.Argument(metavar="NAME[:FILE]", help="Name of the suite, with its data where it needs any.")
]
Data = Annotated[Path | None, typer.Option("--data", help="File or folder to read the suite's questions from.")]
Model = Annotated[str, typer.Option("--model", help=MODEL)]


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
    categories: Categories = None,
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
    """Hold a suite to the checks that results rely on (docs/suites.md). The exit code is 1 where one is broken."""
    plain, request = _asked(name, None, None, data, model)
    kind = type(registry.load_suite(plain))
    broken = 0
    for check, what in suite_results(kind, request):
        broken += bool(what)
        print(f"{'broken' if what else 'ok':<7} {check.name:<12} {check.text}" + (f"\n{'':<20} {what}" if what else ""))
    if broken:
        raise typer.Exit(1)


def _asked(
    name: str, categories: str | None, limit: int | None, data: Path | None, model: str
) -> tuple[str, SuiteRequest]:
    """Return the suite's name, and what a run with this model would ask of it."""
    plain, carried = suite_and_data(name, data)
    check_model(model)
    return plain, suite_request(listed(categories), limit, carried, outline_of(model))
