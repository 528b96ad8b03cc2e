"""Command `ssbench paper`."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from specbench_ss import __version__, registry, storage, user_files
from specbench_ss.bench import preflight
from specbench_ss.bench.build_config import read_settings
from specbench_ss.cli.printing import result_table, widen
from specbench_ss.cli.run_output import measure as make_run
from specbench_ss.cli.shared import interrupted, print_text, take_options, to_go_on
from specbench_ss.engine.numerics import Dtype
from specbench_ss.errors import UserError, error_text, os_errors, os_reason
from specbench_ss.models.devices import check_one_device
from specbench_ss.models.load import load_target
from specbench_ss.models.resolve import check_model
from specbench_ss.options import REFERENCE, MethodSpec
from specbench_ss.results.analysis import Results
from specbench_ss.results.report import (
    BRACKETS,
    CLAIMS,
    VERDICTS,
    Bench,
    Claim,
    Experiment,
    Grid,
    Mark,
    Part,
    Request,
    Result,
    Span,
)
from specbench_ss.results.text import safe, table
from specbench_ss.runs.config import OutputOptions, Recording, RunConfig
from specbench_ss.runs.environment import environment
from specbench_ss.runs.manifest import MANIFEST, now, plain
from specbench_ss.runs.run_dir import check_place
from specbench_ss.runs.run_options import DEVICE, AtLeast0, CommandOptions, Seed, flag, option, same

ASKED = "asked.json"
TABLE, RESULT, FIGURE = "table.csv", "result.json", "figure.html"
EXPERIMENT_WIDTH = 140  # without a terminal
STYLES: dict[Mark, str] = {"plain": "", "accepted": "green", "rejected": "red strike", "next": "bold"}


class _Asked(msgspec.Struct):
    """Common fields of the request file and a result file."""

    experiment: str
    request: dict[str, Any]


def check_folder(folder: Path, name: str, request: Request) -> bool:
    """Return True if the folder has a request; raise UserError if it is for another experiment or other options."""
    file = folder / ASKED
    try:
        asked = user_files.decoder(_Asked)(file.read_bytes())
    except FileNotFoundError:
        return False
    except OSError as error:
        raise UserError(f"cannot read {file}: {os_reason(error)}") from None
    except ValueError as error:
        raise UserError(f"{file} is damaged: {error}; use another --out") from None
    if asked.experiment != name:
        raise UserError(f"{folder} has {asked.experiment}, not {name}; use another --out")
    stored, now = plain(asdict(Request())) | asked.request, plain(asdict(request))
    other = [f"{_flag(f)} {_text(stored[f])}, not {_text(now[f])}" for f in now if stored[f] != now[f]]
    if other:
        raise UserError(f"{folder} was started with {', '.join(other)}; use another --out")
    return True


def begin_folder(folder: Path, name: str, request: Request) -> None:
    """Store the request in a new folder. Raise UserError as `check_folder` does."""
    if check_folder(folder, name, request):
        return
    with os_errors(f"cannot write {folder / ASKED}"):
        folder.mkdir(parents=True, exist_ok=True)
        storage.write_json(folder / ASKED, {"experiment": name, "request": plain(asdict(request))})


def _flag(field: str) -> str:
    """Return the option of a field of Request."""
    return flag("set" if field == "settings" else field)


def _text(value: Any) -> str:
    return "nothing" if value in (None, []) else " ".join(map(str, value)) if isinstance(value, list) else str(value)


def make(experiment: Experiment, request: Request, where: OutputOptions) -> None:
    """Measure a table or figure, print it, and write its files and page. Raise UserError if nothing can run."""
    begin_folder(where.out, experiment.name, request)
    runs = list[str]()
    result = experiment.run(_bench(request, where, experiment.recording, runs))
    claims = claims_of(experiment, result)
    result = result.with_claims(claims)
    console = Console()
    print_text(console, f"{experiment.source}: {experiment.title}", "bold")
    print_result(result, console)
    about = {
        "experiment": experiment.name,
        "title": experiment.title,
        "source": experiment.source,
        "version": __version__,
        "command": ["ssbench", *sys.argv[1:]],
        "request": asdict(request),
        "runs": runs,
        "created": now(),
        "environment": environment(),
        "claims": [asdict(claim) for claim in claims],
    }
    paths = write_result(result, about, where.out)
    figure = where.out / FIGURE
    registry.load(registry.REPORTS, "html")().write_result(experiment, result, _facts(about), figure)
    for path in (*paths, figure):
        print(f"wrote: {path}")


def check_settings(request: Request) -> None:
    """Raise UserError for an invalid --set."""
    for method, options in read_settings(request.settings).items():
        registry.method_options(MethodSpec(method, options))


def without_effect(settings: Sequence[str], configs: Iterable[RunConfig]) -> list[str]:
    """Return the METHOD.OPTION=VALUE settings that no run uses, since the experiment sets the option itself."""
    used = {(s.name, *option) for config in configs for s in config.methods for option in s.options.items()}
    return [
        text
        for text in settings
        for method, options in read_settings([text]).items()
        if not any((method, *option) in used for option in options.items())
    ]


def claims_of(experiment: Experiment, result: Result) -> list[Claim]:
    """Compare the paper's claims with the result; if that fails, return one open claim with the reason."""
    try:
        return list(experiment.claims(result))
    except Exception as error:  # unusual rows must not lose a result of hours
        return [Claim("Claims of the paper", None, f"could not be compared with this result: {error_text(error)}")]


def _bench(request: Request, where: OutputOptions, recording: Recording, runs: list[str]) -> Bench:
    """Return the experiment's bench. runs: receives the names of its runs."""

    def measure(config: RunConfig, name: str) -> Results:
        folder = where.out / name
        resume = where.resume and (folder / MANIFEST).exists()
        results = make_run(config, OutputOptions(folder, resume, recording=recording))
        runs.append(name)
        return results

    def target() -> Any:
        options = {name: getattr(request, name) for name in ("dtype", "device", "chat_template")}
        return load_target(request.model, engine="auto", **options)

    return Bench(request, where.out, measure, target, lambda text: print(text, file=sys.stderr))


def _facts(about: dict[str, Any]) -> dict[str, str]:
    """Return the conditions of a result for readers."""
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


class _Stored(msgspec.Struct, frozen=True):
    """Fields of an experiment's result.json."""

    claims: tuple[Claim, ...] = ()
    grids: tuple[Grid, ...] = ()
    lines: tuple[tuple[Span, ...], ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Item:
    """Outcome of one table or figure. problem: reason of a failure. lacking: rows with missing requirements."""

    experiment: Experiment
    stored: _Stored = _Stored()
    lacking: tuple[str, ...] = ()
    problem: str = ""


def _describe_all(where: OutputOptions) -> None:
    for experiment in _experiments():
        print(f"{experiment.name:<14} {experiment.source}: {experiment.title}")
    print(f"out            {where.out}")


def make_all(request: Request, where: OutputOptions) -> None:
    """Run every experiment in its own folder and write the page after each. Finished ones are kept.

    The page lists failures, which stop nothing. Options that an experiment does not use are omitted for it.
    """
    experiments, items = _experiments(), list[Item]()
    begin_folder(where.out, ALL, request)
    for number, experiment in enumerate(experiments, 1):
        print(f"{number} of {len(experiments)}: {experiment.name}", file=sys.stderr)
        items.append(_item(experiment, request, where))
        storage.write_text(where.out / PAGE, "\n".join(_lines(items, request)) + "\n")
    print(f"wrote: {where.out / PAGE}")
    if all(item.problem for item in items):
        raise typer.Exit(1)


def _experiments() -> list[Experiment]:
    """Return every experiment, table 2 before table 10."""
    experiments = registry.load_all(registry.EXPERIMENTS)
    return [experiments[name]() for name in sorted(experiments, key=_in_order)]


def _in_order(name: str) -> list[str]:
    return [part.zfill(6) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _item(experiment: Experiment, request: Request, where: OutputOptions) -> Item:
    """Run one experiment unless it is finished."""
    own, folder, lacking = _used(experiment, request), where.out / experiment.name, tuple[str, ...]()
    try:
        lacking = tuple(f"{part.name} needs {part.missing}" for part in experiment.parts(own) if part.missing)
        check_folder(folder, experiment.name, own)
        if not (folder / FIGURE).exists():
            make(experiment, own, OutputOptions(folder, resume=folder.exists()))
        stored = user_files.decoder(_Stored)((folder / RESULT).read_bytes())
    except Exception as error:  # the others continue
        return Item(experiment, lacking=lacking, problem=error_text(error))
    return Item(experiment, stored, lacking)


def _used(experiment: Experiment, request: Request) -> Request:
    """Return the request with only the options that this experiment uses."""
    default = Request()
    idle = {f.name: getattr(default, f.name) for f in fields(Request) if f.name not in experiment.uses}
    own = replace(request, **idle)
    return replace(own, settings=tuple(text for text in own.settings if _has_use(text, experiment, own)))


def _has_use(setting: str, experiment: Experiment, request: Request) -> bool:
    """Return True if one of the experiment's runs uses METHOD.OPTION=VALUE."""
    try:
        configs = experiment.configs(replace(request, settings=(setting,)))
    except UserError:  # the experiment has no such method
        return False
    return not without_effect([setting], configs.values())


def _lines(items: Sequence[Item], request: Request) -> Iterator[str]:
    changed = {name: value for name, value in asdict(request).items() if value != getattr(Request(), name)}
    counts = Counter(claim.verdict for item in items for claim in item.stored.claims)
    yield "# The papers' tables and figures, measured again"
    yield ""
    options = "".join(f", {name} {value}" for name, value in changed.items() if name != "model")
    verdicts = ", ".join(f"{counts[verdict]} *{verdict}*" for verdict in VERDICTS)
    yield (
        f"On {request.model}{options}. Statements of the papers compared with these results: {verdicts}. *open*: "
        "intervals overlap, or a part was not measured; *tends*: single values without intervals were compared. "
        "Published numbers are of other models and another machine, so only their order and direction are compared, "
        "not their size."
    )
    for item in items:
        yield from ("", f"## {item.experiment.name}: {item.experiment.title}", "")
        if item.problem:
            yield from (f"{item.experiment.source}.", "", f"Not made: {item.problem}")
            continue
        yield from (f"{item.experiment.source}. [Full result]({item.experiment.name}/{FIGURE}).", "")
        head, stored = ("statement of the paper", "here", "found"), item.stored
        if stored.claims:
            yield table(head, [(claim.statement, claim.verdict, claim.found) for claim in stored.claims], head)
        else:
            yield "No statement of the paper is compared with it here."
        if item.lacking:
            yield from ("", f"Left out: {'; '.join(item.lacking)}.")
        numbers = Result(tuple(grid for grid in stored.grids if grid.name != CLAIMS), (), stored.lines, stored.notes)
        yield from ("", "<details><summary>The numbers</summary>", *markdown(numbers, ROWS), "", "</details>")


@dataclass(frozen=True)
class PaperOptions(CommandOptions):
    """Options of `ssbench paper`."""

    name: str = option(
        MISSING,
        "Name of a table or figure; `ssbench paper list` shows all names. all: run everything possible, and write a "
        "page that compares it with the papers.",
        metavar="NAME",
        position=True,
    )
    model: str = same(
        "model",
        help="Target model: lab, a folder or a hub id. For a model other than lab, name the drafters with --set "
        "METHOD.weights=PATH.",
    )
    limit: AtLeast0 | None = same(
        "limit",
        help="Maximum number of questions per task. 0: all. For timed training steps: their number, at least four.",
    )
    set: list[str] | None = same("set")
    data: Path | None = same(
        "data", help="File or folder to read the suite's questions from, in place of its own data."
    )
    chat_template: str | None = same("chat_template")
    seed: Seed = same("seed", help="Seed of the order of methods, of sampling and of training.")
    dtype: Dtype = same("dtype")
    device: str = same("device", help=DEVICE)
    published: bool = option(
        False,
        "In tables, draft as in the papers: streams with 120 nodes of which 32 are kept and top-64 stream attention, "
        "and the published trees of Medusa, Hydra and EAGLE. Otherwise every drafter uses the tree of its weights.",
    )
    out: Path | None = same("out", help="Folder that the results are written to.  [default: runs/TIME-paper-NAME]")
    resume: bool = same("resume", help="Continue the unfinished work in --out.")
    dry_run: bool = same("dry_run")

    @property
    def request(self) -> Request:
        """Return the request to an experiment."""
        own = {f.name: getattr(self, f.name) for f in fields(Request) if f.name != "settings"}
        own["data"] = None if self.data is None else str(self.data)
        return Request(**own, settings=tuple(self.set or ()))


def command(ctx: typer.Context, **given: Any) -> None:
    """Measure a table or figure of the papers again and show the published numbers next to ours."""
    options = PaperOptions(**given)
    request, name = options.request, options.name
    if name == "list":
        _list(request)
        return
    if options.resume and options.out is None:
        raise UserError("--resume requires --out, the folder of the unfinished work")
    check_one_device(options.device, "paper")  # some experiments train
    where = OutputOptions(options.out or Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-paper-{name}", options.resume)
    if name == ALL:
        _check_out(where, name, request)
        check_settings(request)
        check_model(request.model)
        show, work = partial(_describe_all, where), partial(make_all, request, where)
    else:
        experiment: Experiment = registry.load(registry.EXPERIMENTS, name)()
        _check_used(experiment, request)
        _check_out(where, name, request)
        _check_methods(experiment, request)
        show, work = partial(_describe, experiment, request, where), partial(make, experiment, request, where)
    if options.dry_run:
        show()
        return
    try:
        work()
    except KeyboardInterrupt:
        raise interrupted(to_go_on(where.out)) from None


take_options(command, PaperOptions)


def _check_used(experiment: Experiment, request: Request) -> None:
    """Raise UserError for options without effect."""
    given = [f.name for f in fields(Request) if getattr(request, f.name) != f.default]
    idle = [_flag(name) for name in given if name not in experiment.uses]
    if idle:
        raise UserError(f"experiment {experiment.name!r} takes no {', no '.join(idle)}, which would have no effect")


def _check_out(where: OutputOptions, name: str, request: Request) -> None:
    """Raise UserError for an existing or unwritable output folder.

    A resumed experiment must have the same name and options.
    """
    exists = where.out.exists() and (not where.out.is_dir() or any(where.out.iterdir()))
    if exists and not where.resume:
        raise UserError(f"{where.out} exists already; use another --out, or --resume to continue it")
    check_place(where.out)
    if exists:
        check_folder(where.out, name, request)
    if where.resume and not exists:
        warnings.warn(f"nothing to resume in {where.out}; starting the work", stacklevel=2)


def _check_methods(experiment: Experiment, request: Request) -> None:
    """Raise UserError for an invalid --set, or if a run is impossible."""
    check_settings(request)
    configs = {} if experiment.trains else experiment.configs(request)
    if configs and (idle := without_effect(request.settings, configs.values())):
        raise UserError(f"--set {idle[0]} has no effect on {experiment.name}, which sets this option itself")
    for config in configs.values():
        if any(spec.name != REFERENCE for spec in config.methods):  # else no row can run, which is reported separately
            preflight.check_methods(config)


def _list(request: Request) -> None:
    """List every experiment with its rows, and the missing requirements of rows that cannot run."""
    for experiment in _experiments():
        print(f"{experiment.name:<14} {experiment.source}: {experiment.title}")
        for line in status(experiment.parts(request)):
            print(f"{'':<16}{line}")


def _describe(experiment: Experiment, request: Request, where: OutputOptions) -> None:
    print(f"experiment {experiment.name}: {experiment.source}: {experiment.title}")
    for line in status(experiment.parts(request)):
        print(f"rows       {line}")
    for name, config in experiment.configs(request).items():
        tasks, sizes = ", ".join(config.categories) or "all tasks", ", ".join(map(str, (1, *config.concurrency)))
        at_a_time = f", batch sizes {sizes}" if config.concurrency else ""
        print(f"run        {name}: {config.model}, {config.suite} ({tasks}){at_a_time}")
        for spec in config.methods:
            print(f"method     {spec.label}")
    print(f"out        {where.out}")


def print_result(result: Result, console: Console) -> None:
    """Print the lines, tables and notes of a result."""
    widen(console, EXPERIMENT_WIDTH)
    for line in result.lines:
        console.print(marked(line, console.is_terminal), soft_wrap=True)
    for grid in result.all_grids():
        console.print(_table(grid))
    for note in result.notes:
        print_text(console, note, "dim")


def marked(line: Sequence[Span], colours: bool) -> Text:
    """Show accepted text green, rejected text red and struck out, the next token bold; use brackets without colours."""
    text = Text()
    for span in line:
        before, after = ("", "") if colours else BRACKETS[span.mark]
        text.append(before + span.text + after, STYLES[span.mark] if colours else "")
    return text


def _table(grid: Grid) -> Table:
    left = [column.title for column in grid.columns if column.form == "text"]
    table = result_table(grid.caption or grid.name, grid.titles, left)
    for column in table.columns:
        column.no_wrap = False
    for row in grid.rows:
        table.add_row(*(escape(c.text(v)) for v, c in zip(row, grid.columns, strict=True)))
    return table


def markdown(result: Result, most: int) -> Iterator[str]:
    """Yield the lines of a result as Markdown: marked text, tables of `most` rows each, and notes."""
    if result.lines:
        yield from ("", "```text", *(marked(line, False).plain for line in result.lines), "```")
    for grid in result.all_grids():
        rows = [[c.text(v) for v, c in zip(row, grid.columns, strict=True)] for row in grid.rows[:most]]
        left = [c.title for c in grid.columns if c.form == "text"]
        yield from ("", f"{grid.caption or grid.name}:", "", table(grid.titles, rows, left))
        if len(grid.rows) > most:
            yield f"These are the first {most} of {len(grid.rows):,} rows."
    if result.notes:
        yield from ("", *(f"- {safe(note)}" for note in result.notes))


def status(parts: Sequence[Part]) -> list[str]:
    """Return 'runs: a, b' and, for each missing piece X, 'needs X: c, d'."""
    lacking: dict[str, list[str]] = {}
    for part in parts:
        lacking.setdefault(part.missing, []).append(part.name)
    lines = [f"runs: {', '.join(lacking.pop(''))}"] if "" in lacking else []
    return lines + [f"needs {what}: {', '.join(names)}" for what, names in lacking.items()]


def write_result(result: Result, about: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write table.csv (and NAME.csv for each further table) and result.json; return their paths. Raises UserError."""
    paths = []
    with os_errors(f"cannot write to {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        for i, grid in enumerate(result.all_grids()):
            paths.append(folder / (TABLE if i == 0 else f"{grid.name}.csv"))
            csv.writer(text := io.StringIO(), lineterminator="\n").writerows([grid.titles, *grid.rows])
            storage.write_text(paths[-1], text.getvalue())
        paths.append(folder / RESULT)
        content = json.dumps({**about, **asdict(result)}, indent=1, ensure_ascii=False, default=str)
        storage.write_text(paths[-1], content + "\n")
    return paths
