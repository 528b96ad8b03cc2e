"""The command line of the lab: `python -m lab train|text|freeze|results`, in a checkout."""

from __future__ import annotations

import json
import lzma
import sys
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

import typer

from lab.text import APP_CATEGORIES, SPECBENCH_CATEGORIES, conversations, questions
from specbench_ss.errors import UserError
from specbench_ss.storage import writing
from specbench_ss.suite import Question
from specbench_ss.suites.base import LAB_QUESTIONS, LAB_SIZES

app = typer.Typer(help="Train ssbench's own small models again, write their generators' text, and tables of results.")
Out = Annotated[Path, typer.Option(help="Folder to write to.", file_okay=False)]
Size = Annotated[Literal["s", "m"], typer.Option(help="Base model: s is the one that ships, m a larger one for a GPU.")]
Stages = Annotated[str, typer.Option(metavar="A,B", help="Train these stages alone. Default: all of them.")]
Scale = Annotated[float, typer.Option(min=1e-6, help="Factor on every stage's number of steps.")]
Seed = Annotated[int, typer.Option(help="Seed of the generated text, and of initial weights.")]
Count = Annotated[int | None, typer.Option(min=0, help="Number of conversations; without it they never end.")]


@app.command()
def train(
    out: Out, size: Size = "s", stages: Stages = "", device: str = "auto", seed: Seed = 0, budget_scale: Scale = 1.0
) -> None:
    """Train the lab's base model and the weights of all methods for it; repeat the command to continue."""
    from lab import pipeline  # loads torch, which the other commands do not need
    from specbench_ss.cli.shared import interrupted

    named = tuple(name.strip() for name in stages.split(",") if name.strip())
    try:
        with writing(out, "make room: the same command goes on"):
            pipeline.train(out, size, named, device, seed, budget_scale)
    except KeyboardInterrupt as stop:
        raise interrupted(f" {stop}") from None


@app.command()
def text(
    split: Annotated[str, typer.Option(help="Split: train, calibration or eval.")] = "train",
    seed: Seed = 0,
    count: Count = None,
) -> None:
    """Write generated conversations to standard output, one JSON object a line."""
    for example in islice(conversations(split, seed), count):
        row = {"category": example.category, "messages": example.messages}
        sys.stdout.write(json.dumps(row) + "\n")


@app.command()
def freeze(out: Out = LAB_QUESTIONS) -> None:
    """Write the suites' questions for the lab's models into the package."""
    for split in ("eval", "calibration"):
        lines = "".join(json.dumps(_row(question), ensure_ascii=False) + "\n" for question in frozen(split))
        (out / f"questions-{split}.jsonl.xz").write_bytes(lzma.compress(lines.encode(), preset=9 | lzma.PRESET_EXTREME))


@app.command()
def results(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail if a page differs.")] = False,
) -> None:
    """Write the tables of docs/results from the CSV files of that folder."""
    from lab.results import FOLDER, rewrite  # loads pandas, which the other commands do not need

    changed = [page.name for page in rewrite(FOLDER, check)]
    if check and changed:
        raise UserError(f"tables differ from their CSV files in {', '.join(changed)}: run python -m lab results")
    for name in changed:
        print(name)


def frozen(split: str) -> list[Question]:
    """Return every question that a suite may ask, in the order of the file."""
    categories = (*SPECBENCH_CATEGORIES, *APP_CATEGORIES)
    return [question for name in categories for question in questions((name,), split, LAB_SIZES[name])]


def _row(question: Question) -> dict[str, object]:
    row: dict[str, object] = {"question_id": question.id, "category": question.category, "turns": question.turns}
    return {**row, "reference": question.references, "metric": question.metric}


if __name__ == "__main__":
    try:
        app(prog_name="python -m lab")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
