"""`ssbench lab`: the project's own small models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from specbench_ss.commands.shared import interrupted

app = typer.Typer(help="The project's own small models: train them again.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    pass


@app.command()
def train(
    out: Annotated[Path, typer.Option("--out", help="Folder for the weights.", file_okay=False)],
    size: Annotated[Literal["s", "m"], typer.Option("--size", help="Which of the two models.")] = "s",
    stages: Annotated[
        str, typer.Option("--stages", metavar="A,B", help="Train only these stages, in their order; all when empty.")
    ] = "",
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")] = "auto",
    seed: Annotated[int, typer.Option("--seed", help="Seed of data and weights.")] = 0,
    budget_scale: Annotated[
        float, typer.Option("--budget-scale", min=0.0, help="Multiplies every stage's number of steps.")
    ] = 1.0,
) -> None:
    """Train a lab model and the methods' weights for it."""
    if budget_scale <= 0:
        raise typer.BadParameter("--budget-scale must be above 0")
    from specbench_ss.methods._lab import pipeline
    from specbench_ss.models.loading import resolve_device

    try:
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
