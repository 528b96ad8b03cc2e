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
from specbench_ss.cli.shared import MODEL, Tasks
from specbench_ss.conformance.suite_checks import suite_results
from specbench_ss.errors import printable
from specbench_ss.models.load import load_model_info
from specbench_ss.models.resolve import check_model
from specbench_ss.results.text import pluralize
from specbench_ss.suite import Question, SuiteData, SuiteRequest

LINES, WIDTH = 6, 110  # of a shortened text


def print_data(data: SuiteData, sample: int, whole: bool) -> None:
    """Print a suite's edition, hash, notes and counts, and the first `sample` questions of each task."""
    turns = sum(len(question.turns) for question in data.questions)
    print(f"{data.name} ({data.edition}), {data.content_hash[:12]}")
    counts = f"{pluralize(len(data.questions), 'question')}, {pluralize(turns, 'prompt')}"
    print(f"{counts}, outputs of at most {data.max_new_tokens} tokens")
    for note in data.notes:
        print(f"note: {printable(note)}")
    for category, count in Counter(question.category for question in data.questions).items():
        in_category = [question for question in data.questions if question.category == category]
        print(f"\ntask {printable(category)}: {pluralize(count, 'question')}, {_metrics(in_category)}")
        if 0 < sample < len(in_category):
            print(f"the first {sample} of them (--sample N prints more):")
        for question in in_category[:sample]:
            _print_question(question, whole)


def _metrics(questions: list[Question]) -> str:
    """Return the quality metrics as text; a question without one has no score."""
    named = sorted({question.metric for question in questions if question.metric})
    unscored = sum(question.metric is None for question in questions)
    rest = f" ({unscored} without)" if named and unscored else ""
    return f"quality metric {', '.join(named)}{rest}" if named else "no quality metric"


def _print_question(question: Question, whole: bool) -> None:
    for message in question.history:
        print(f"  question {printable(question.id)}, {message.role}:")
        print(_shown(message.text, whole))
    for number, turn in enumerate(question.turns):
        which = f", turn {number + 1}" if len(question.turns) > 1 else ""
        print(f"  question {printable(question.id)}, user{which}, which the model answers:")
        print(_shown(turn, whole))
        for reference in question.references[number] if question.references else ():
            print(f"  reference:\n{_shown(reference, whole)}")


def _shown(text: str, whole: bool) -> str:
    """Return the text indented, with control characters escaped, shortened to its first lines unless `whole`."""
    most = len(text) if whole else LINES * WIDTH
    lines = [printable(line.expandtabs()) for line in text[:most].split("\n")]
    wrapped = [part for line in lines for part in textwrap.wrap(line, WIDTH - 4) or [""]]
    kept = wrapped if whole else wrapped[:LINES]
    cut = len(kept) < len(wrapped) or most < len(text)
    return textwrap.indent(
        "\n".join([*kept, *([f"... of {len(text):,} characters"] if cut else [])]), "    ", lambda _: True
    )


app = typer.Typer(
    help="List the suites, show their questions, download their data, or check one.", invoke_without_command=True
)
Name = Annotated[str, typer.Argument(metavar="NAME[:FILE]", help="Name of the suite, with its data if it needs any.")]
Data = Annotated[Path | None, typer.Option("--data", help="File or folder to read the suite's questions from.")]
Model = Annotated[str, typer.Option("--model", help=MODEL)]
WHOLE = "Print questions without shortening, with all roles; the model's chat template is applied when it runs."


@app.callback()
def _list(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is not None:
        return

    for name, suite in registry.load_all(registry.SUITES).items():
        tasks = ", ".join(suite.categories) or "those of the file"
        print(f"{name:<12} {suite.summary}\n{'':<12} tasks: {tasks}")


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="Name of the suite.")],
    source: Annotated[
        str | None,
        typer.Option("--source", metavar="URL", help="Address to download the data from instead of the default."),
    ] = None,
) -> None:
    """Download a suite's data and check that it is complete and unchanged."""
    print(f"{name}: {registry.load_suite(name).fetch(source)}")


@app.command()
def show(
    name: Name,
    sample: Annotated[int, typer.Option("--sample", min=0, help="Questions of each task to print.")] = 1,
    tasks: Tasks = None,
    limit: Annotated[
        int | None, typer.Option(min=0, help="Number of questions per task. 0: all. Default: the suite's.")
    ] = None,
    data: Data = None,
    model: Model = "lab",
    whole: Annotated[bool, typer.Option("--whole", help=WHOLE)] = False,
) -> None:
    """Show the questions of a run with this suite: their number per task, and some of them."""
    plain, request = _request(name, tasks, limit, data, model)
    print_data(registry.load_suite(plain).load(request), sample, whole)


@app.command()
def check(name: Name, data: Data = None, model: Model = "lab") -> None:
    """Check a suite for the properties that results rely on (docs/suites.md). The exit code is 1 if a check fails."""
    plain, request = _request(name, None, None, data, model)
    kind = type(registry.load_suite(plain))
    broken = 0
    for test, problem in suite_results(kind, request):
        broken += bool(problem)
        status = "failed" if problem else "ok"
        print(f"{status:<7} {test.name:<12} {test.text}" + (f"\n{'':<20} {problem}" if problem else ""))
    if broken:
        raise typer.Exit(1)


def _request(
    name: str, tasks: str | None, limit: int | None, data: Path | None, model: str
) -> tuple[str, SuiteRequest]:
    """Return the suite's name, and the request of a run with this model."""
    plain, source = suite_and_data(name, data)
    check_model(model)
    return plain, suite_request(listed(tasks), limit, source, load_model_info(model))
