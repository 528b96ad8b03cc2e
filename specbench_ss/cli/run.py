"""Command `ssbench run`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from specbench_ss import options
from specbench_ss.bench.build_config import (
    TIMEOUT_S,
    Access,
    access_of,
    as_options,
    check_fit,
    default_out,
    goal_of,
    optional_methods,
    recording_of,
    run_config,
    workers_of,
)
from specbench_ss.cli import run_output, shared
from specbench_ss.cli.shared import FailOn, Plugin, interrupted, to_go_on
from specbench_ss.engine.numerics import Dtype
from specbench_ss.models.quantize import Quantize
from specbench_ss.options import MOST_SEED
from specbench_ss.runs.config import MOST_REPEATS, RECORDED, Engine, RunConfig, RunTarget
from specbench_ss.user_files import mapping, read_bytes


def check_timeout(seconds: float | None) -> float | None:
    """Option callback: a limit is a number of seconds above 0."""
    return None if seconds is None else options.seconds("--timeout", seconds)


def stated(ctx: typer.Context) -> set[str]:
    """Return the options that the command line or the file of --config has; `set_` is `set`."""
    found = {name: ctx.get_parameter_source(name) for name in ctx.params}
    return {name.rstrip("_") for name, source in found.items() if source is not None and source.name != "DEFAULT"}


def read_config_file(ctx: typer.Context, path: Path | None) -> Path | None:
    """Option callback: the file's values become the defaults of the options not given on the command line."""
    if path is not None and not ctx.resilient_parsing:
        names = {p.opts[0].lstrip("-").replace("-", "_"): str(p.name) for p in ctx.command.params}
        values = as_options(mapping(read_bytes(path), path), set(names) - {"config", "help"}, path)
        ctx.default_map = {names[option]: value for option, value in values.items()}
    return path


DEFAULT = RunConfig(methods=())
WHAT, HOW, WHERE, RECORD = "What to run", "How to decode and measure", "Where to", "What to record besides"
SERVED = "Servers, in place of methods"
WORKERS = "Workers, on this machine or many"


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of `ssbench run`: type, bounds, help, panel and default of each."""

    methods: Annotated[
        str | None,
        typer.Option(
            metavar="A,B[option=value]",
            help="Methods to compare, separated by commas, each with options of its own if you like: "
            "ss,medusa[nodes=8]. all: every method that can decode with the model. Plain "
            "autoregressive decoding is always added.",
            rich_help_panel=WHAT,
        ),
    ] = None
    suite: Annotated[
        str,
        typer.Option(
            metavar="NAME[:FILE]",
            help="Suite of tasks whose questions are asked; `ssbench suites` lists them. jsonl:FILE asks prompts of "
            "your own; NAME:FILE is the same as NAME with --data FILE.",
            rich_help_panel=WHAT,
        ),
    ] = DEFAULT.suite
    model: Annotated[str, typer.Option(help=shared.MODEL, rich_help_panel=WHAT)] = DEFAULT.model
    categories: Annotated[str | None, typer.Option(metavar="A,B", help=shared.CATEGORIES, rich_help_panel=WHAT)] = None
    limit: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Ask at most this many questions of each task; 0 asks all of them. Default: the suite's own number.",
            rich_help_panel=WHAT,
        ),
    ] = DEFAULT.limit
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="METHOD.OPTION=VALUE", help=shared.SET, rich_help_panel=WHAT),
    ] = None
    preset: Annotated[
        str | None,
        typer.Option(
            metavar="FILE,FILE",
            help="Preset files written by `ssbench tune`. What --set or METHOD[...] say wins over them.",
            rich_help_panel=WHAT,
        ),
    ] = None
    plugin: Plugin = None
    data: Annotated[
        Path | None,
        typer.Option(
            help="File or folder to read the suite's questions from, in place of its own data; or "
            "hub:OWNER/NAME[:CONFIG[:SPLIT]], a data set of the Hugging Face hub.",
            rich_help_panel=WHAT,
        ),
    ] = None
    endpoint: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="Measure a server in place of --methods: the address of its OpenAI-compatible API, as "
            "http://localhost:8000/v1. May be given several times: the others are compared with the first server.",
            rich_help_panel=SERVED,
        ),
    ] = None
    label: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="What a server is called in the results; one for each --endpoint, in the same order.",
            rich_help_panel=SERVED,
        ),
    ] = None
    endpoint_model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Name of the model on the server; once, or once for each. Default: the only one that it lists.",
            rich_help_panel=SERVED,
        ),
    ] = None
    api_key_env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="VARIABLE",
            help="Environment variable that holds the server's key; once, or once for each. No key is written down.",
            rich_help_panel=SERVED,
        ),
    ] = None
    concurrency: Annotated[
        str | None,
        typer.Option(
            metavar="N,N",
            help="Send the whole suite with this many requests in flight too, once for each number. One in flight is "
            "measured in any case.",
            rich_help_panel=SERVED,
        ),
    ] = None
    endpoint_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help=f"Longest wait for the next piece of an answer; then it has failed.  [default: {TIMEOUT_S:g}]",
            rich_help_panel=SERVED,
        ),
    ] = None
    repeats: Annotated[
        int, typer.Option(min=1, help="How often every method answers each prompt.", rich_help_panel=HOW)
    ] = 1
    until_ci: Annotated[
        float | None,
        typer.Option(
            metavar="HALF-WIDTH",
            help="Repeat until half the interval of every method's speedup is at most this share of it, 0.02; stop "
            "where more repeats cannot help. --repeats are made in any case.",
            rich_help_panel=HOW,
        ),
    ] = None
    max_repeats: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"With --until-ci: at most this many repeats.  [default: {MOST_REPEATS}]",
            rich_help_panel=HOW,
        ),
    ] = None
    budget: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="With --until-ci: begin no repeat that would take decoding beyond this time.",
            rich_help_panel=HOW,
        ),
    ] = None
    warmup: Annotated[
        int,
        typer.Option(
            min=0,
            help="Prompts that every method answers before the measurement, to warm up; these are not recorded.",
            rich_help_panel=HOW,
        ),
    ] = DEFAULT.warmup
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Longest answer, in tokens. Default: the suite's own limit.", rich_help_panel=HOW),
    ] = DEFAULT.max_new_tokens
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Text that ends an answer; the token that completes it is the last one kept. It may be one special "
            "token. May be given several times.",
            rich_help_panel=HOW,
        ),
    ] = None
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature; 0 decodes greedily.", rich_help_panel=HOW)
    ] = DEFAULT.temperature
    top_p: Annotated[
        float,
        typer.Option(
            help="Sample only among the most likely tokens that together have this probability; 1 switches this off.",
            rich_help_panel=HOW,
        ),
    ] = DEFAULT.top_p
    top_k: Annotated[
        int,
        typer.Option(
            min=0, help="Sample only among this many most likely tokens; 0 switches this off.", rich_help_panel=HOW
        ),
    ] = DEFAULT.top_k
    seed: Annotated[
        int,
        typer.Option(min=0, max=MOST_SEED, help="Seed of the order of methods and of sampling.", rich_help_panel=HOW),
    ] = DEFAULT.seed
    dtype: Annotated[Dtype, typer.Option(help=shared.DTYPE, rich_help_panel=HOW)] = "auto"
    device: Annotated[str, typer.Option(help=shared.DEVICES, rich_help_panel=HOW)] = DEFAULT.device
    history: Annotated[
        Literal["reference", "own"],
        typer.Option(
            help="Which earlier answers the later turns of a conversation follow: those of the reference, "
            "the same for all methods, or each method's own.",
            rich_help_panel=HOW,
        ),
    ] = "reference"
    quantize: Annotated[
        Quantize,
        typer.Option(
            help="How the weights of the model's linear layers are held, but for the LM head. int8, int4: by torchao, "
            "int4 on CUDA alone. nf4: 4 bits, by bitsandbytes. Drafters keep the number format of --dtype.",
            rich_help_panel=HOW,
        ),
    ] = "none"
    engine: Annotated[
        Engine,
        typer.Option(help=shared.ENGINE, rich_help_panel=HOW),
    ] = "auto"
    batch_size: Annotated[
        str | None,
        typer.Option(
            metavar="N,N",
            help="Decode the whole suite with this many requests side by side too, once for each number: their rows "
            "pass the model's layers together. One at a time is measured in any case; rankings and intervals are of "
            "that.",
            rich_help_panel=HOW,
        ),
    ] = None
    order: Annotated[
        Literal["suite", "tasks"],
        typer.Option(
            help="Order of the questions. suite: as the suite lists them. tasks: the first one of each task, then "
            "tasks in turn by their size, so that a run that is cut short has answers of each.",
            rich_help_panel=HOW,
        ),
    ] = "suite"
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help=shared.TRUST, rich_help_panel=HOW)] = (
        DEFAULT.trust_remote_code
    )
    chat_template: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help=shared.CHAT_TEMPLATE,
            rich_help_panel=HOW,
        ),
    ] = DEFAULT.chat_template
    timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Give up an answer that takes longer, as failed, and go on. Default: no limit.",
            callback=check_timeout,
            rich_help_panel=HOW,
        ),
    ] = None
    telemetry: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="Time between two readings of the machine while a sample is made: processor and memory, and on an "
            "NVIDIA GPU its use, clocks, power and energy. 0 reads nothing.",
            rich_help_panel=RECORD,
        ),
    ] = RECORDED.telemetry
    remake_disturbed: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="How often a sample is made again at most where other processes, heat or an unsteady clock disturbed "
            "it. Default: 2 on a GPU, else 0. Disturbed samples are marked in any case.",
            rich_help_panel=RECORD,
        ),
    ] = RECORDED.remake_disturbed
    record_drafts: Annotated[
        str,
        typer.Option(
            metavar="first|SHARE",
            help="Answers whose drafts are written down step by step, in an untimed second pass after the measurement: "
            "those to the first question of each task, or to this share of the questions, 0 to 1.",
            rich_help_panel=RECORD,
        ),
    ] = RECORDED.record_drafts
    trace: Annotated[
        bool,
        typer.Option(
            "--trace",
            help="Profile one request of each method after the measurement, and write its timeline of operators and "
            "kernels in a form that Perfetto opens (https://ui.perfetto.dev).",
            rich_help_panel=RECORD,
        ),
    ] = RECORDED.trace
    executor: Annotated[
        Literal["local", "ray"],
        typer.Option(
            help="Who makes the samples. local: this process. ray: workers of a Ray cluster, each of which answers "
            "whole questions with all methods, so that methods are compared on one device.",
            rich_help_panel=WORKERS,
        ),
    ] = "local"
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --executor ray: how many workers. Default: one for each GPU of the cluster; where it has none, "
            "one for each machine.",
            rich_help_panel=WORKERS,
        ),
    ] = None
    ray_address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT|auto",
            help="With --executor ray: the cluster to use. Default: the one that RAY_ADDRESS names, else one that is "
            "started on this machine for the run.",
            rich_help_panel=WORKERS,
        ),
    ] = None
    out: Annotated[
        Path | None,
        typer.Option(
            help="Directory that the results are written to.  [default: runs/TIME-MODEL-SUITE]", rich_help_panel=WHERE
        ),
    ] = None
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue the unfinished run in --out: what it has is kept, failed samples are made again.",
            rich_help_panel=WHERE,
        ),
    ] = False
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.yaml",
            help="Read options of this command from a YAML file. What the command line says wins.",
            callback=read_config_file,
            is_eager=True,
            rich_help_panel=WHERE,
        ),
    ] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help=shared.DRY_RUN, rich_help_panel=WHERE)] = False
    open_it: Annotated[
        bool, typer.Option("--open", help="Open the report in a browser when the run has ended.", rich_help_panel=WHERE)
    ] = False
    fail_on: FailOn = None


def command(ctx: typer.Context, **given: Any) -> None:
    """Decode a suite's questions with several methods, side by side, and say which one pays."""
    asked = RunOptions(**given)
    check_fit(stated(ctx), bool(asked.endpoint))
    wanted = run_config({**ctx.params, "set": asked.set_})
    if asked.resume and asked.out is None:
        raise typer.BadParameter("--resume needs --out, the directory of the unfinished run")
    recording = recording_of(ctx.params)
    folder = asked.out or default_out(wanted, datetime.now())
    optional = optional_methods(asked.methods, wanted.methods) if asked.methods else frozenset()
    where = RunTarget(
        folder, asked.resume, optional, recording, asked.timeout, goal_of(ctx.params), workers_of(ctx.params)
    )
    if asked.endpoint:
        _served(wanted, where, access_of(ctx.params), asked.dry_run, asked.open_it, asked.fail_on)
        return

    if asked.dry_run:
        run_output.describe(wanted, where)
        return
    try:
        if where.workers is not None:
            run_output.run_sharded(wanted, where, open_report=asked.open_it, fail_on=asked.fail_on)
            return
        run_output.run(wanted, where, open_report=asked.open_it, fail_on=asked.fail_on)
    except KeyboardInterrupt:
        raise interrupted(to_go_on(where.out)) from None


shared.take_options(command, RunOptions)


def _served(
    wanted: RunConfig, where: RunTarget, access: Access, dry_run: bool, open_it: bool, fail_on: str | None
) -> None:
    """Do the same with servers."""
    if dry_run:
        run_output.describe_served(wanted, where, access)
        return
    try:
        run_output.run_served(wanted, where, access, open_report=open_it, fail_on=fail_on)
    except KeyboardInterrupt:
        raise interrupted(to_go_on(where.out, access.hidden)) from None
