"""`ssbench lab`: the project's own small models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from specbench_ss.commands.shared import interrupted
from specbench_ss.files.write_errors import writing

app = typer.Typer(help="Train ssbench's own small models again.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    pass


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
    from specbench_ss.methods._lab import pipeline
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
