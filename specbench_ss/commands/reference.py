"""`ssbench reference`: published numbers, and a run beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from specbench_ss.results.published import Beside, Mark, Published

COLUMNS = ("method", "τ", "published τ", "speedup", "published", "model", "GPU", "compares")
LEGEND = (
    "✓ the same, ~ the same family of models, or some of the questions, ✕ another. Whether drafters and settings are "
    "those that were published is not known here."
)
SIGNS: dict[Mark, str] = {"same": "✓", "part": "~", "other": "✕"}


def command(
    run: Annotated[Path | None, typer.Argument(metavar="[RUN]", help="Directory of a run to set beside them.")] = None,
) -> None:
    """Show published τ and speedups; with a run, its own beside them, marked for what compares."""
    from rich.console import Console

    from specbench_ss.results.published import published
    from specbench_ss.results.terminal_table import widen

    console = Console()
    widen(console)
    if run is None:
        _print_published(console)
    else:
        _print_beside(run, console)
    for source in dict.fromkeys(entry.source for entry in published()):
        console.print(f"Published: {source}, greedy, batch 1.", markup=False, highlight=False, soft_wrap=True)


def _print_published(console: Console) -> None:
    from rich.markup import escape

    from specbench_ss.results.published import published
    from specbench_ss.results.terminal_table import result_table

    table = result_table("Published", ("method", "published as", "model", "GPU", "τ", "speedup"))
    for entry in published():
        cells = (entry.method or "–", entry.published_as, entry.model, entry.gpu, f"{entry.tau:.2f}")
        table.add_row(*map(escape, cells), f"{entry.speedup:.2f}×")
    console.print(table)


def _print_beside(path: Path, console: Console) -> None:
    from specbench_ss.results.published import beside, published
    from specbench_ss.results.summary import OVERALL, summarise
    from specbench_ss.results.terminal_table import result_table
    from specbench_ss.runs.run_directory import read_run

    run = read_run(path)
    figures = {row.method: (row.tau, row.speedup) for row in summarise(run) if row.category == OVERALL}
    table = result_table("Beside what is published", COLUMNS)
    for row in beside(run.manifest, figures):
        table.add_row(*_cells(row))
    console.print(table)
    for said in (*_of_the_run(run.manifest, published()[0]), LEGEND):
        console.print(said, markup=False, highlight=False, soft_wrap=True)


def _of_the_run(manifest: Mapping[str, Any], entry: Published) -> Iterator[str]:
    """Yield the marks that are the same for every published number of a source."""
    from specbench_ss.results.published import marks
    from specbench_ss.runs.config import decoding

    model, suite, found = manifest["model"], manifest["suite"], marks(manifest, entry)
    asked = f"{suite['size']} of {suite['name']} ({suite['edition']})"
    yield f"This run: {model['name']} on {model['device']}."
    of_all = f"published are all {entry.questions} of {entry.suite} (official)"
    yield f"{SIGNS[found['questions']]} questions: {asked}, {of_all}."
    yield f"{SIGNS[found['decoding']]} decoding: {decoding(manifest['config'])}, published is greedy."
    yield f"{SIGNS[found['number format']]} number format: {model['dtype']}, published is {entry.dtype}."


def _cells(row: Beside) -> tuple[str, ...]:
    from rich.markup import escape

    from specbench_ss.results.number_text import MISSING, number, times
    from specbench_ss.results.published import comparable

    own, entry = (escape(row.method), number(row.tau)), row.entry
    if entry is None:
        return *own, MISSING, times(row.speedup), *(MISSING,) * 4
    model, gpu = (SIGNS[row.marks[part]] for part in ("model", "GPU"))
    places = (f"{model} {escape(entry.model)}", f"{gpu} {escape(entry.gpu)}")
    return *own, number(entry.tau), times(row.speedup), times(entry.speedup), *places, comparable(row.marks)
