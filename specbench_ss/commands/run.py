"""`ssbench run`: decode a suite's questions with several methods, side by side, and say which one pays."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import typer

from specbench_ss.benchmark.asked import optional_methods
from specbench_ss.benchmark.build_config import default_out, run_config
from specbench_ss.commands import run_options
from specbench_ss.commands.shared import Plugin, interrupted, to_go_on
from specbench_ss.runs.config import RunConfig, RunTarget

DEFAULT = RunConfig(methods=())
WHAT, HOW, WHERE = "What to run", "How to decode and measure", "Where to"


def command(
    ctx: typer.Context,
    methods: Annotated[
        str,
        typer.Option(
            metavar="A,B[option=value]",
            help="Methods to compare, or all; plain autoregressive decoding is always added.",
            rich_help_panel=WHAT,
        ),
    ],
    suite: Annotated[str, typer.Option(help="Suite of tasks.", rich_help_panel=WHAT)] = DEFAULT.suite,
    model: Annotated[
        str, typer.Option(help="Lab model, folder or hub id of a causal language model.", rich_help_panel=WHAT)
    ] = DEFAULT.model,
    categories: Annotated[
        str | None, typer.Option(metavar="A,B", help="Only these tasks of the suite.", rich_help_panel=WHAT)
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=0, help="Questions per task; 0 = all.", rich_help_panel=WHAT)
    ] = DEFAULT.limit,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="METHOD.OPTION=VALUE", help="A method's option; repeatable.", rich_help_panel=WHAT
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            metavar="FILE,FILE",
            help="Options that `ssbench tune` chose; --set and [..] win.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    plugin: Plugin = None,
    data: Annotated[
        Path | None, typer.Option(help="File or folder with the suite's questions.", rich_help_panel=WHAT)
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Times each prompt is answered.", rich_help_panel=HOW)] = 1,
    warmup: Annotated[
        int, typer.Option(min=0, help="Unmeasured prompts per method beforehand.", rich_help_panel=HOW)
    ] = DEFAULT.warmup,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer; the suite's own limit if not given.", rich_help_panel=HOW)
    ] = DEFAULT.max_new_tokens,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="End an answer with the token that completes this text, which is kept; may be one special token. "
            "Repeatable.",
            rich_help_panel=HOW,
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 = greedy.", rich_help_panel=HOW)] = DEFAULT.temperature,
    top_p: Annotated[float, typer.Option(help="Nucleus, above 0 to 1; 1 = off.", rich_help_panel=HOW)] = DEFAULT.top_p,
    top_k: Annotated[int, typer.Option(min=0, help="0 = off.", rich_help_panel=HOW)] = DEFAULT.top_k,
    seed: Annotated[int, typer.Option(min=0, help="Seed of order and sampling.", rich_help_panel=HOW)] = DEFAULT.seed,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], typer.Option(help="Of the model.", rich_help_panel=HOW)
    ] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.", rich_help_panel=HOW)] = DEFAULT.device,
    history: Annotated[
        Literal["reference", "own"],
        typer.Option(help="Whose earlier answers later turns continue.", rich_help_panel=HOW),
    ] = "reference",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.", rich_help_panel=HOW)
    ] = DEFAULT.trust_remote_code,
    chat_template: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="plain, vicuna, llama-2 or a Jinja file, instead of the tokenizer's own template.",
            rich_help_panel=HOW,
        ),
    ] = DEFAULT.chat_template,
    out: Annotated[
        Path | None, typer.Option(help="Run directory.  [default: runs/TIME-MODEL-SUITE]", rich_help_panel=WHERE)
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the unfinished run in --out.", rich_help_panel=WHERE)
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.yaml",
            help="Options from a file; the command line wins.",
            callback=run_options.read_config_file,
            is_eager=True,
            rich_help_panel=WHERE,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would run, and stop.", rich_help_panel=WHERE)
    ] = False,
    open_it: Annotated[bool, typer.Option("--open", help="Open the report at the end.", rich_help_panel=WHERE)] = False,
) -> None:
    """Decode a suite's questions with several methods, side by side, and say which one pays."""
    wanted = run_config({**ctx.params, "set": set_})
    if resume and out is None:
        raise typer.BadParameter("--resume needs --out, the directory of the unfinished run")
    where = RunTarget(out or default_out(wanted, datetime.now()), resume, optional_methods(methods, wanted.methods))
    from specbench_ss.commands import run_output

    if dry_run:
        run_output.describe(wanted, where)
        return
    try:
        run_output.run(wanted, where, open_report=open_it)
    except KeyboardInterrupt:
        raise interrupted(to_go_on(where.out)) from None
