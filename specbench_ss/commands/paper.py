"""`ssbench paper`: make the tables and figures of the papers again, beside their published numbers."""

from __future__ import annotations

import re
import sys
import warnings
from dataclasses import asdict, fields
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specbench_ss.commands import help_texts
from specbench_ss.commands.shared import interrupted, to_go_on
from specbench_ss.errors import UserError
from specbench_ss.method_spec import REFERENCE, MethodSpec
from specbench_ss.number_formats import Dtype
from specbench_ss.options import MOST_SEED
from specbench_ss.results.experiment import Bench, Experiment, Request
from specbench_ss.runs.config import Recording, RunConfig, RunTarget

if TYPE_CHECKING:
    from specbench_ss.runs.rows import Run

DEFAULT = Request()


def command(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of a table or figure; `ssbench paper list` shows all names.")
    ],
    model: Annotated[
        str,
        typer.Option(
            help="Target model: lab, a folder or a hub id. For a model other than lab, name the drafters "
            "with --set METHOD.weights=PATH."
        ),
    ] = DEFAULT.model,
    limit: Annotated[
        int | None, typer.Option(min=0, help="Ask at most this many questions of each task; 0 asks all of them.")
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
    out: Annotated[
        Path | None, typer.Option(help="Folder that the results are written to.  [default: runs/TIME-paper-NAME]")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the unfinished work in --out.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help=help_texts.DRY_RUN)] = False,
) -> None:
    """Measure a table or figure of the papers again and show its published numbers beside ours."""
    from specbench_ss import registry

    given = None if data is None else str(data)
    request = Request(model, limit, device, dtype, seed, given, chat_template, tuple(set_ or ()))
    if name == "list":
        _list(request)
        return
    if resume and out is None:
        raise typer.BadParameter("--resume needs --out, the folder of the unfinished work")
    experiment = registry.load_experiment(name)
    _check_used(experiment, request)
    where = RunTarget(out or Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-paper-{name}", resume)
    _check_out(where)
    _check_methods(experiment, request)
    if dry_run:
        _describe(experiment, request, where.out)
        return
    try:
        _make(experiment, request, where)
    except KeyboardInterrupt:
        raise interrupted(to_go_on(where.out)) from None


def _check_used(experiment: Experiment, request: Request) -> None:
    """Raise UserError for options that would change nothing."""
    given = [f.name for f in fields(Request) if getattr(request, f.name) != getattr(DEFAULT, f.name)]
    idle = ["--set" if n == "settings" else f"--{n.replace('_', '-')}" for n in given if n not in experiment.uses]
    if idle:
        raise UserError(f"experiment {experiment.name!r} takes no {', no '.join(idle)}: it would make no difference")


def _check_out(where: RunTarget) -> None:
    """Raise UserError where something is in the way, nothing can be resumed, or nothing can be written."""
    from specbench_ss.runs.run_directory import check_place

    there = where.out.exists() and (not where.out.is_dir() or any(where.out.iterdir()))
    if there and not where.resume:
        raise UserError(f"{where.out} is there already: give another --out, or --resume to go on with it")
    check_place(where.out)
    if where.resume and not there:
        warnings.warn(f"nothing to resume in {where.out}: the work begins", stacklevel=2)


def _check_methods(experiment: Experiment, request: Request) -> None:
    """Raise UserError where a --set is wrong, or where one of the runs could not be made."""
    from specbench_ss import registry
    from specbench_ss.benchmark import preflight
    from specbench_ss.benchmark.asked import read_settings

    for method, options in read_settings(request.settings).items():
        registry.method_options(MethodSpec(method, options))
    for config in () if experiment.trains else experiment.configs(request).values():
        if any(spec.name != REFERENCE for spec in config.methods):  # else no row can run, which is told by itself
            preflight.check_methods(config)


def _list(request: Request) -> None:
    """List every experiment with its rows: those that run, and what each of the others lacks."""
    from specbench_ss import registry
    from specbench_ss.results.experiment_output import status

    found = registry.load_all(registry.EXPERIMENTS)
    for name in sorted(found, key=_in_order):
        print(f"{name:<14} {found[name].source}: {found[name].title}")
        for line in status(found[name]().parts(request)):
            print(f"{'':<16}{line}")


def _in_order(name: str) -> list[str]:
    """Return a sort key that puts table 2 before table 10."""
    return [part.zfill(6) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _describe(experiment: Experiment, request: Request, out: Path) -> None:
    from specbench_ss.results.experiment_output import status

    print(f"experiment {experiment.name}: {experiment.source}: {experiment.title}")
    for line in status(experiment.parts(request)):
        print(f"rows       {line}")
    for name, config in experiment.configs(request).items():
        methods = ", ".join(spec.label for spec in config.methods)
        tasks = ", ".join(config.categories) or "all tasks"
        print(f"run        {name}: {config.model}, {config.suite} ({tasks}): {methods}")
    print(f"out        {out}")


def _make(experiment: Experiment, request: Request, where: RunTarget) -> None:
    from rich.console import Console

    from specbench_ss import registry
    from specbench_ss.results.experiment_output import FIGURE, print_result, write_result

    bench, runs = _bench(request, where, experiment.recording)
    result = experiment.run(bench)
    console = Console()
    console.print(f"{experiment.source}: {experiment.title}", style="bold", highlight=False, soft_wrap=True)
    print_result(result, console)
    about = _about(experiment, request, runs)
    paths = write_result(result, about, where.out)
    figure = where.out / FIGURE
    registry.load_report("html").write_result(experiment, result, _facts(about), figure)
    for path in (*paths, figure):
        print(f"wrote: {path}")


def _bench(request: Request, where: RunTarget, recording: Recording) -> tuple[Bench, list[str]]:
    """Return what the experiment works with, and the names of the runs that it makes, as it makes them."""
    from specbench_ss.runs.manifest_reading import MANIFEST

    runs: list[str] = []

    def measure(config: RunConfig, name: str) -> Run:
        from specbench_ss.commands.run_output import measure as make_run
        from specbench_ss.runs.run_directory import read_run

        folder = where.out / name
        resume = where.resume and (folder / MANIFEST).exists()
        make_run(config, RunTarget(folder, resume, recording=recording))
        runs.append(name)
        return read_run(folder)

    def target() -> Any:
        from specbench_ss.models.loading import load_target

        return load_target(
            request.model, dtype=request.dtype, device=request.device, chat_template=request.chat_template
        )

    return Bench(request, where.out, measure, target, lambda text: print(text, file=sys.stderr)), runs


def _about(experiment: Experiment, request: Request, runs: list[str]) -> dict[str, Any]:
    """Say how the result was made, as JSON-ready data."""
    from specbench_ss import __version__
    from specbench_ss.runs.environment import environment
    from specbench_ss.runs.manifest import now

    return {
        "experiment": experiment.name,
        "title": experiment.title,
        "source": experiment.source,
        "version": __version__,
        "command": ["ssbench", *sys.argv[1:]],
        "request": asdict(request),
        "runs": runs,
        "created": now(),
        "environment": environment(),
    }


def _facts(about: dict[str, Any]) -> dict[str, str]:
    """Say the same in texts for people."""
    here = about["environment"]
    gpus = ", ".join(gpu["name"] for gpu in here["gpus"])
    packages = {k: v for k, v in here["packages"].items() if v}
    return {
        "command": " ".join(about["command"]),
        "model": about["request"]["model"],
        "processor": str((here["cpu"] or {}).get("model")),
        "threads": str((here["threads"] or {}).get("intra_op")),
        "GPU": gpus or "none",
        "packages": ", ".join(f"{name} {version}" for name, version in packages.items()),
        "made": about["created"],
    }
