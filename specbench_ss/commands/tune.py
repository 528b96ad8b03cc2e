"""`ssbench tune`: choose a method's options for this model and device by measured speed, and write them down."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specbench_ss.benchmark.build_config import suite_and_data
from specbench_ss.commands import help_texts, tune_work
from specbench_ss.commands.shared import Plugin
from specbench_ss.errors import UserError
from specbench_ss.method_spec import REFERENCE, MethodSpec
from specbench_ss.number_formats import Dtype
from specbench_ss.options import MOST_SEED
from specbench_ss.runs.config import Engine, RunConfig, TuneConfig

RUN, DEFAULT = RunConfig(methods=()), TuneConfig(MethodSpec(REFERENCE))
WHAT, HOW = "What to tune", "How to measure"


def command(
    ctx: typer.Context,
    method: Annotated[
        str,
        typer.Argument(
            metavar="METHOD", help="Method to tune: NAME, or NAME[option=value] to keep some of its options fixed."
        ),
    ],
    model: Annotated[str, typer.Option(help=help_texts.MODEL, rich_help_panel=WHAT)] = RUN.model,
    suite: Annotated[
        str,
        typer.Option(
            help="Suite that the calibration prompts are taken from. They differ from those it evaluates, "
            "where it has others.",
            rich_help_panel=WHAT,
        ),
    ] = RUN.suite,
    categories: Annotated[
        str | None, typer.Option(metavar="A,B", help=help_texts.CATEGORIES, rich_help_panel=WHAT)
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="File with prompts of your own, in the suite's format.", rich_help_panel=WHAT),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Prompts of each task; 0 takes all of them.  [default: 4; with --data all of them]",
            rich_help_panel=WHAT,
        ),
    ] = None,
    budget: Annotated[float, typer.Option(help="Seconds to spend on measuring.", rich_help_panel=HOW)] = DEFAULT.budget,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Longest answer, in tokens.", rich_help_panel=HOW)
    ] = DEFAULT.max_new_tokens,
    seed: Annotated[
        int,
        typer.Option(
            min=0,
            max=MOST_SEED,
            help="Seed of the order in which prompts and configurations are measured.",
            rich_help_panel=HOW,
        ),
    ] = RUN.seed,
    dtype: Annotated[Dtype, typer.Option(help=help_texts.DTYPE, rich_help_panel=HOW)] = "auto",
    device: Annotated[str, typer.Option(help=help_texts.DEVICES, rich_help_panel=HOW)] = RUN.device,
    engine: Annotated[Engine, typer.Option(help=help_texts.ENGINE, rich_help_panel=HOW)] = "auto",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help=help_texts.TRUST, rich_help_panel=HOW)
    ] = RUN.trust_remote_code,
    chat_template: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help=help_texts.CHAT_TEMPLATE,
            rich_help_panel=HOW,
        ),
    ] = RUN.chat_template,
    plugin: Plugin = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.yaml", help="Preset file to write.  [default: METHOD-MODEL-DEVICE.yaml]"),
    ] = None,
) -> None:
    """Choose a method's options for this model and device by measured tokens per second, and write a preset file."""
    if not 0 < budget < float("inf"):
        raise UserError(f"--budget must be a number of seconds above 0, not {budget:g}")
    own = ("method", "suite", "categories", "data", "out")
    given = {name: value for name, value in ctx.params.items() if name not in own}
    suite, carried = suite_and_data(suite, data)
    wanted = TuneConfig(
        method=MethodSpec.parse(method),
        categories=tuple(part.strip() for part in (categories or "").split(",") if part.strip()),
        suite=suite,
        data=carried,
        **given,
    )

    tune_work.run(wanted, out)
