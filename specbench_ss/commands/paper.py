"""`ssbench paper`: make the tables and figures of the papers again, beside their published numbers."""

from __future__ import annotations

import warnings
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from specbench_ss import registry
from specbench_ss.benchmark import preflight
from specbench_ss.commands import help_texts
from specbench_ss.commands.paper_all import make_all
from specbench_ss.commands.paper_folder import check_folder
from specbench_ss.commands.paper_work import check_settings, in_order, make, without_effect
from specbench_ss.commands.shared import interrupted, to_go_on
from specbench_ss.errors import UserError
from specbench_ss.method_spec import REFERENCE
from specbench_ss.models.devices import check_one_device
from specbench_ss.number_formats import Dtype
from specbench_ss.options import MOST_SEED
from specbench_ss.results.experiment import Experiment, Request
from specbench_ss.results.experiment_output import status
from specbench_ss.runs.config import RunConfig, RunTarget
from specbench_ss.runs.run_directory import check_place

DEFAULT, ALL = Request(), "all"


def command(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Name of a table or figure; `ssbench paper list` shows all names. all: everything that can run, one "
            "after the other, and a page that says what agrees with the papers.",
        ),
    ],
    model: Annotated[
        str,
        typer.Option(
            help="Target model: lab, a folder or a hub id. For a model other than lab, name the drafters "
            "with --set METHOD.weights=PATH."
        ),
    ] = DEFAULT.model,
    limit: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Ask at most this many questions of each task; 0 asks all of them. Where training steps are timed: "
            "how many, at least four.",
        ),
    ] = DEFAULT.limit,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="METHOD.OPTION=VALUE", help=help_texts.SET)] = None,
    data: Annotated[
        Path | None, typer.Option(help="File or folder to read the suite's questions from, in place of its own data.")
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help=help_texts.CHAT_TEMPLATE)
    ] = DEFAULT.chat_template,
    seed: Annotated[
        int, typer.Option(min=0, max=MOST_SEED, help="Seed of the order of methods, of sampling and of training.")
    ] = DEFAULT.seed,
    dtype: Annotated[Dtype, typer.Option(help=help_texts.DTYPE)] = "auto",
    device: Annotated[str, typer.Option(help=help_texts.DEVICE)] = DEFAULT.device,
    published: Annotated[
        bool,
        typer.Option(
            "--published",
            help="In tables, draft as the papers do: streams with 120 nodes of which 32 are kept, which see the 64 "
            "tokens that count most, and the published trees of Medusa, Hydra and EAGLE. Otherwise every drafter has "
            "the tree that came with its weights.",
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder that the results are written to.  [default: runs/TIME-paper-NAME]")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the unfinished work in --out.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help=help_texts.DRY_RUN)] = False,
) -> None:
    """Measure a table or figure of the papers again and show its published numbers beside ours."""
    given = None if data is None else str(data)
    request = Request(model, limit, device, dtype, seed, given, chat_template, tuple(set_ or ()), published)
    if name == "list":
        _list(request)
        return
    if resume and out is None:
        raise typer.BadParameter("--resume needs --out, the folder of the unfinished work")
    check_one_device(device, "paper")  # some experiments train
    if name == ALL:
        where = RunTarget(out or Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-paper-all", resume)
        _check_out(where, name, request)
        make_all(request, where, dry_run)
        return
    experiment = registry.load_experiment(name)
    _check_used(experiment, request)
    where = RunTarget(out or Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-paper-{name}", resume)
    _check_out(where, name, request)
    _check_methods(experiment, request)
    if dry_run:
        _describe(experiment, request, where.out)
        return
    try:
        make(experiment, request, where)
    except KeyboardInterrupt:
        raise interrupted(to_go_on(where.out)) from None


def _check_used(experiment: Experiment, request: Request) -> None:
    """Raise UserError for options that would change nothing."""
    given = [f.name for f in fields(Request) if getattr(request, f.name) != getattr(DEFAULT, f.name)]
    idle = ["--set" if n == "settings" else f"--{n.replace('_', '-')}" for n in given if n not in experiment.uses]
    if idle:
        raise UserError(f"experiment {experiment.name!r} takes no {', no '.join(idle)}: it would make no difference")


def _check_out(where: RunTarget, name: str, request: Request) -> None:
    """Raise UserError where something is in the way, or nothing can be written.

    What is in the way of a resumed experiment is work on another one, or with other options.
    """
    there = where.out.exists() and (not where.out.is_dir() or any(where.out.iterdir()))
    if there and not where.resume:
        raise UserError(f"{where.out} is there already: give another --out, or --resume to go on with it")
    check_place(where.out)
    if there:
        check_folder(where.out, name, request)
    if where.resume and not there:
        warnings.warn(f"nothing to resume in {where.out}: the work begins", stacklevel=2)


def _check_methods(experiment: Experiment, request: Request) -> None:
    """Raise UserError where a --set is wrong, or where one of the runs could not be made."""
    check_settings(request)
    configs = {} if experiment.trains else experiment.configs(request)
    if configs and (idle := without_effect(request.settings, configs.values())):
        raise UserError(f"--set {idle[0]} makes no difference to {experiment.name}, which sets this option itself")
    for config in configs.values():
        if any(spec.name != REFERENCE for spec in config.methods):  # else no row can run, which is told by itself
            preflight.check_methods(config)


def _list(request: Request) -> None:
    """List every experiment with its rows: those that run, and what each of the others lacks."""
    found = registry.load_all(registry.EXPERIMENTS)
    for name in sorted(found, key=in_order):
        print(f"{name:<14} {found[name].source}: {found[name].title}")
        for line in status(found[name]().parts(request)):
            print(f"{'':<16}{line}")


def _describe(experiment: Experiment, request: Request, out: Path) -> None:
    print(f"experiment {experiment.name}: {experiment.source}: {experiment.title}")
    for line in status(experiment.parts(request)):
        print(f"rows       {line}")
    for name, config in experiment.configs(request).items():
        tasks = ", ".join(config.categories) or "all tasks"
        print(f"run        {name}: {config.model}, {config.suite} ({tasks}){_at_a_time(config)}")
        for spec in config.methods:
            print(f"method     {spec.label}")
    print(f"out        {out}")


def _at_a_time(config: RunConfig) -> str:
    """Say how many requests are decoded at a time, where that is not one alone."""
    return f", batch sizes 1, {', '.join(map(str, config.concurrency))}" if config.concurrency else ""
