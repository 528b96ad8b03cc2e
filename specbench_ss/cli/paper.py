"""Command `ssbench paper`."""

from __future__ import annotations

import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from specbench_ss import __version__, registry, storage, user_files
from specbench_ss.bench import preflight
from specbench_ss.bench.build_config import read_settings
from specbench_ss.cli import shared
from specbench_ss.cli.run_output import measure as make_run
from specbench_ss.cli.shared import interrupted, to_go_on
from specbench_ss.engine.numerics import Dtype
from specbench_ss.errors import UserError, error_text, os_reason
from specbench_ss.models.devices import check_one_device
from specbench_ss.models.load import load_target
from specbench_ss.models.resolve import check_model
from specbench_ss.options import MOST_SEED, REFERENCE, MethodSpec
from specbench_ss.results.analysis import Results
from specbench_ss.results.report import CLAIMS, VERDICTS, Bench, Claim, Experiment, Grid, Request, Result, Span
from specbench_ss.results.terminal import FIGURE, RESULT, markdown, print_result, status, write_result
from specbench_ss.results.text import table
from specbench_ss.runs.config import Recording, RunConfig, RunTarget
from specbench_ss.runs.environment import environment
from specbench_ss.runs.manifest import MANIFEST, now, plain
from specbench_ss.runs.run_dir import check_place

ASKED = "asked.json"


class _Asked(msgspec.Struct):
    """What is read of either file. A result has more fields."""

    experiment: str
    request: dict[str, Any]


def check_folder(folder: Path, name: str, request: Request) -> None:
    """Raise UserError where the folder was begun for another experiment, or with other options."""
    if (asked := _read(folder)) is None:
        return
    if asked.experiment != name:
        raise UserError(f"{folder} holds {asked.experiment}, not {name}: give another --out")
    begun, now = plain(asdict(Request())) | asked.request, plain(asdict(request))
    if other := [_differs(field, begun[field], now[field]) for field in now if begun[field] != now[field]]:
        raise UserError(f"{folder} was begun with {', '.join(other)}: give another --out")


def begin_folder(folder: Path, name: str, request: Request) -> None:
    """Note in the folder what it is for, unless it says so already. Raises UserError as `check_folder` does."""
    check_folder(folder, name, request)
    if (folder / ASKED).exists():
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with storage.replacing(folder / ASKED) as file:
            file.write(msgspec.json.encode({"experiment": name, "request": plain(asdict(request))}))
    except OSError as error:
        raise UserError(f"cannot write {folder / ASKED}: {os_reason(error)}") from None


def _read(folder: Path) -> _Asked | None:
    """Return the experiment and the options that the folder was begun for; None for a folder of none."""
    file = folder / ASKED
    try:
        return user_files.decoder(_Asked)(file.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"cannot read {file}: {os_reason(error)}") from None
    except ValueError as error:
        raise UserError(f"{file} is damaged: {error}; give another --out") from None


def _differs(field: str, begun: Any, now: Any) -> str:
    option = "set" if field == "settings" else field.replace("_", "-")
    return f"--{option} {_told(begun)}, not {_told(now)}"


def _told(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "nothing"
    return "nothing" if value is None else str(value)


def in_order(name: str) -> list[str]:
    """Return a sort key that puts table 2 before table 10."""
    return [part.zfill(6) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def make(experiment: Experiment, request: Request, where: RunTarget) -> None:
    """Measure a table or figure, print it, and write its files and its page. Raises UserError where nothing can run."""
    begin_folder(where.out, experiment.name, request)
    bench, runs = _bench(request, where, experiment.recording)
    result = experiment.run(bench)
    claims = claims_of(experiment, result)
    result = result.with_claims(claims)
    console = Console()
    console.print(f"{experiment.source}: {experiment.title}", style="bold", highlight=False, soft_wrap=True)
    print_result(result, console)
    about = _about(experiment, request, runs) | {"claims": [asdict(claim) for claim in claims]}
    paths = write_result(result, about, where.out)
    figure = where.out / FIGURE
    registry.load(registry.REPORTS, "html")().write_result(experiment, result, _facts(about), figure)
    for path in (*paths, figure):
        print(f"wrote: {path}")


def check_settings(request: Request) -> None:
    """Raise UserError where a --set is wrong."""
    for method, options in read_settings(request.settings).items():
        registry.method_options(MethodSpec(method, options))


def without_effect(settings: Sequence[str], configs: Iterable[RunConfig]) -> list[str]:
    """Return those of METHOD.OPTION=VALUE that none of these runs has: all of them set this option themselves."""
    has = {(s.name, *option) for config in configs for s in config.methods for option in s.options.items()}
    return [
        text
        for text in settings
        for method, options in read_settings([text]).items()
        if not any((method, *option) in has for option in options.items())
    ]


def claims_of(experiment: Experiment, result: Result) -> list[Claim]:
    """Return what the paper says, held against the result; where that fails, one open claim that says why."""
    try:
        return list(experiment.claims(result))
    except Exception as error:  # a result with other rows than usual: hours of work stand behind it
        return [Claim("What the paper says of it", None, f"could not be held against this result: {error_text(error)}")]


def _bench(request: Request, where: RunTarget, recording: Recording) -> tuple[Bench, list[str]]:
    """Return what the experiment works with, and the names of the runs that it makes, as it makes them."""
    runs: list[str] = []

    def measure(config: RunConfig, name: str) -> Results:
        folder = where.out / name
        resume = where.resume and (folder / MANIFEST).exists()
        done = make_run(config, RunTarget(folder, resume, recording=recording))
        runs.append(name)
        return done

    def target() -> Any:
        return load_target(
            request.model,
            dtype=request.dtype,
            device=request.device,
            engine="auto",
            chat_template=request.chat_template,
        )

    return Bench(request, where.out, measure, target, lambda text: print(text, file=sys.stderr)), runs


def _about(experiment: Experiment, request: Request, runs: list[str]) -> dict[str, Any]:
    """Say how the result was made, as JSON-ready data."""
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


ALL, PAGE = "all", "paper.md"
ROWS = 40  # of a table on the page


class _Stored(msgspec.Struct):
    """What is read of an experiment's result.json."""

    claims: list[Claim] = []
    grids: tuple[Grid, ...] = ()
    lines: tuple[tuple[Span, ...], ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Item:
    """What became of one table or figure. problem: why it was not made. lacking: rows that need what is not here."""

    name: str
    title: str
    source: str
    claims: tuple[Claim, ...] = ()
    result: Result | None = None
    lacking: tuple[str, ...] = ()
    problem: str = ""


def make_all(request: Request, where: RunTarget, dry_run: bool) -> None:
    """Make everything, each in a folder of its own, and write the page after each. What was made stays made.

    What cannot run here is told on the page and stops nothing. Options that a table has no use for are left out for it.
    """
    experiments = _experiments()
    check_settings(request)
    check_model(request.model)
    if dry_run:
        for experiment in experiments:
            print(f"{experiment.name:<14} {experiment.source}: {experiment.title}")
        print(f"out            {where.out}")
        return
    items: list[Item] = []
    begin_folder(where.out, ALL, request)
    try:
        for number, experiment in enumerate(experiments, 1):
            print(f"{number} of {len(experiments)}: {experiment.name}", file=sys.stderr)
            items.append(_item(experiment, request, where))
            _write(items, request, where.out)
    except KeyboardInterrupt:
        raise interrupted(to_go_on(where.out)) from None
    print(f"wrote: {where.out / PAGE}")
    if all(item.problem for item in items):
        raise typer.Exit(1)


def _experiments() -> list[Experiment]:
    found = registry.load_all(registry.EXPERIMENTS)
    return [found[name]() for name in sorted(found, key=in_order)]


def _item(experiment: Experiment, request: Request, where: RunTarget) -> Item:
    """Make one of them, unless it was made in an earlier session."""
    own, folder = _used(experiment, request), where.out / experiment.name
    item = Item(experiment.name, experiment.title, experiment.source)
    try:
        lacking = tuple(f"{part.name} needs {part.missing}" for part in experiment.parts(own) if part.missing)
        item = replace(item, lacking=lacking)
        check_folder(folder, experiment.name, own)
        if (stored := _stored(folder)) is None:
            make(experiment, own, RunTarget(folder, resume=folder.exists()))
            stored = _stored(folder)
    except Exception as error:  # one of them: the others are worth having
        return replace(item, problem=error_text(error))
    if stored is None:
        return replace(item, problem=f"{folder / RESULT} cannot be read")
    grids = tuple(grid for grid in stored.grids if grid.name != CLAIMS)
    return replace(item, claims=tuple(stored.claims), result=Result(grids, (), stored.lines, stored.notes))


def _used(experiment: Experiment, request: Request) -> Request:
    """Return the request without what makes no difference to this experiment."""
    default = Request()
    idle = {f.name: getattr(default, f.name) for f in fields(Request) if f.name not in experiment.uses}
    own = replace(request, **idle)
    return replace(own, settings=tuple(text for text in own.settings if _has_use(text, experiment, own)))


def _has_use(setting: str, experiment: Experiment, request: Request) -> bool:
    """Say whether one of the experiment's runs decodes with METHOD.OPTION=VALUE."""
    try:
        configs = experiment.configs(replace(request, settings=(setting,)))
    except UserError:  # it has no such method
        return False
    return not without_effect([setting], configs.values())


def _stored(folder: Path) -> _Stored | None:
    """Return a result that was written, its page with it; None where there is none that can be read."""
    if not (folder / FIGURE).exists():
        return None
    try:
        return user_files.decoder(_Stored)((folder / RESULT).read_bytes())
    except (OSError, ValueError):
        return None


def _write(items: Sequence[Item], request: Request, folder: Path) -> None:
    """Write the page anew."""
    text = "\n".join(_lines(items, request)) + "\n"
    with storage.replacing(folder / PAGE) as file:
        file.write(text.encode())


def _lines(items: Sequence[Item], request: Request) -> Iterator[str]:
    given = {name: value for name, value in asdict(request).items() if value != getattr(Request(), name)}
    claims = [claim for item in items for claim in item.claims]
    counts = Counter(claim.verdict for claim in claims)
    yield "# The papers' tables and figures, measured again"
    yield ""
    options = "".join(f", {name} {value}" for name, value in given.items() if name != "model")
    told = ", ".join(f"{counts[verdict]} *{verdict}*" for verdict in VERDICTS)
    yield (
        f"On {request.model}{options}. Statements of the papers held against what was found here: {told}. *open*: "
        "intervals overlap, or a part was not measured; *tends*: single values were compared, which have no intervals. "
        "Published numbers are of other models and another machine: what is held against them is their order and their "
        "direction, never their size."
    )
    for item in items:
        yield from ("", f"## {item.name}: {item.title}", "", f"{item.source}.{_page(item)}", "")
        if item.problem:
            yield f"Not made: {item.problem}"
        elif item.claims:
            head = ("the paper says", "here", "found")
            yield table(head, [(c.says, c.verdict, c.found) for c in item.claims], head)
        else:
            yield "No statement of the paper is held against it here."
        if item.lacking and not item.problem:
            yield from ("", f"Left out: {'; '.join(item.lacking)}.")
        if item.result is not None:
            yield from ("", "<details><summary>The numbers</summary>", *markdown(item.result, ROWS), "", "</details>")


def _page(item: Item) -> str:
    return "" if item.problem else f" [The whole of it]({item.name}/{FIGURE})."


DEFAULT, ALL_COMMANDS = Request(), "all"


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
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="METHOD.OPTION=VALUE", help=shared.SET)] = None,
    data: Annotated[
        Path | None, typer.Option(help="File or folder to read the suite's questions from, in place of its own data.")
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help=shared.CHAT_TEMPLATE)
    ] = DEFAULT.chat_template,
    seed: Annotated[
        int, typer.Option(min=0, max=MOST_SEED, help="Seed of the order of methods, of sampling and of training.")
    ] = DEFAULT.seed,
    dtype: Annotated[Dtype, typer.Option(help=shared.DTYPE)] = "auto",
    device: Annotated[str, typer.Option(help=shared.DEVICE)] = DEFAULT.device,
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
    dry_run: Annotated[bool, typer.Option("--dry-run", help=shared.DRY_RUN)] = False,
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
    if name == ALL_COMMANDS:
        where = RunTarget(out or Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-paper-all", resume)
        _check_out(where, name, request)
        make_all(request, where, dry_run)
        return
    experiment = registry.load(registry.EXPERIMENTS, name)()
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
