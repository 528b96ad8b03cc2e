"""The command line of the lab: `python -m lab train|text|freeze`, in a checkout."""

from __future__ import annotations

import gzip
import json
import sys
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

import typer

from lab.text import APP_CATEGORIES, SPECBENCH_CATEGORIES, conversations, questions
from specbench_ss.cli.shared import interrupted
from specbench_ss.errors import UserError
from specbench_ss.storage import writing
from specbench_ss.suite import Question
from specbench_ss.suites.base import LAB_QUESTIONS, LAB_SIZES

app = typer.Typer(help="Train ssbench's own small models again, and write the text of their generators.")


@app.command()
def train(
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            help="Folder to write the weights to; the same command continues an unfinished training.",
            file_okay=False,
        ),
    ],
    size: Annotated[
        Literal["s", "m"],
        typer.Option("--size", help="Size of the base model: s is the one that ships, m is a larger one for a GPU."),
    ] = "s",
    stages: Annotated[
        str,
        typer.Option(
            "--stages",
            metavar="A,B",
            help="Train only these stages, in the order of the pipeline. Default: all of them.",
        ),
    ] = "",
    device: Annotated[str, typer.Option("--device", help="Device to train on: auto, cpu, cuda or cuda:N.")] = "auto",
    seed: Annotated[int, typer.Option("--seed", help="Seed of the generated text and of initial weights.")] = 0,
    budget_scale: Annotated[
        float, typer.Option("--budget-scale", min=0.0, help="Factor on every stage's number of steps.")
    ] = 1.0,
) -> None:
    """Train the lab's base model and the weights of all methods for it, from nothing."""
    if budget_scale <= 0:
        raise typer.BadParameter("--budget-scale must be above 0")
    from lab import pipeline
    from specbench_ss.models.devices import resolve_device

    try:
        with writing(out, "make room: the same command goes on"):
            pipeline.train(
                size=size,
                stages=tuple(name.strip() for name in stages.split(",") if name.strip()),
                out=out,
                device=resolve_device(device),
                seed=seed,
                budget_scale=budget_scale,
            )
    except KeyboardInterrupt as stop:
        raise interrupted(f" {stop}") from None


@app.command()
def text(
    split: Annotated[str, typer.Option("--split", help="Split of the text: train, calibration or eval.")] = "train",
    seed: Annotated[int, typer.Option("--seed", help="Seed of the mixture.")] = 0,
    count: Annotated[
        int | None, typer.Option("--count", min=0, help="Number of conversations; without it they never end.")
    ] = None,
) -> None:
    """Write generated conversations to standard output, one JSON object a line."""
    for example in islice(conversations(split, seed), count):
        row = {"category": example.category, "turns": example.turns, "answers": example.answers}
        sys.stdout.write(json.dumps(row) + "\n")


@app.command()
def freeze(
    out: Annotated[Path, typer.Option("--out", help="Folder to write the files to.", file_okay=False)] = LAB_QUESTIONS,
) -> None:
    """Write the questions that the suites ask of the lab's models into the package."""
    for split in ("eval", "calibration"):
        lines = "".join(json.dumps(_row(question), ensure_ascii=False) + "\n" for question in frozen(split))
        (out / f"questions-{split}.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))


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
