"""Progress and results of `ssbench run` in the terminal."""

from __future__ import annotations

import shlex
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import typer
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from specbench_ss import registry
from specbench_ss.bench import preflight
from specbench_ss.bench import ray as sharding
from specbench_ss.bench import runner as measuring
from specbench_ss.bench import server_run as serving
from specbench_ss.bench.build_config import Access
from specbench_ss.bench.run_loop import RunCallbacks
from specbench_ss.bench.server_client import Server
from specbench_ss.bench.server_launch import check_programs, starts
from specbench_ss.cli.printing import print_answer, print_concurrency, print_short, print_verbose
from specbench_ss.cli.questions_needed import questions_needed
from specbench_ss.cli.report import open_in_browser, write_report
from specbench_ss.cli.shared import LiveView, fail, print_json, print_text, print_warning
from specbench_ss.engine.logits_processors import settings_note
from specbench_ss.models.checkpoint import advice_text
from specbench_ss.options import option_values, value_text
from specbench_ss.results.analysis import Results, load_run
from specbench_ss.results.text import format_number, parameters, pluralize
from specbench_ss.runs.config import OutputOptions, RunConfig, decoding, decoding_notes
from specbench_ss.runs.records import Run, SampleRecord
from specbench_ss.stats.pairs import mean_acceptance_length
from specbench_ss.suite import SuiteData

PLAIN_LINES = 10  # progress lines of a run without a terminal
SILENT_S = 5.0  # seconds of reading a model's files after which a line is printed
MINUTES = 90  # seconds from which a duration is given in minutes
Form = Literal["short", "verbose", "quiet", "json"]


@dataclass(slots=True)
class RunningTotals:
    """Totals of one method so far."""

    samples: int = 0
    failed: int = 0
    tokens: int = 0
    seconds: float = 0.0
    step_tokens: int = 0
    steps: int = 0

    def add(self, row: SampleRecord) -> None:
        """Add a committed sample."""
        self.samples += 1
        self.failed += not row.ok
        if row.ok:
            self.tokens += row.tokens or 0
            self.seconds += row.wall_s or 0.0
            self.step_tokens += (row.tokens or 0) - (row.prefill_tokens or 0)
            self.steps += row.steps or 0

    def cells(self) -> list[str]:
        """Return samples, tokens/s and tokens per step as text."""
        rate = f"{self.tokens / self.seconds:.1f}" if self.seconds else "–"
        tau = format_number(mean_acceptance_length(self.step_tokens, self.steps))
        return [f"{self.samples}" + (f" ({self.failed} failed)" if self.failed else ""), rate, tau]


class Progress(LiveView):
    """The runner's `RunCallbacks`, shown on a console; a context manager."""

    def __init__(self, labels: list[str], console: Console) -> None:
        super().__init__(console)
        self.totals = {label: RunningTotals() for label in labels}
        self.bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,
        )
        self.task = self.bar.add_task("warming up", total=None)
        self.total = self.done = self.tokens = 0
        self._warmed, self._started = set[str](), 0.0

    def on_start(self, total: int) -> None:
        """Set the number of samples to be made."""
        self.total = total
        self.bar.update(self.task, total=total)
        self.draw()

    def on_warm_up(self, label: str) -> None:
        """Show the method at once, since warm-up may take minutes; without a terminal, one line for each method."""
        self.bar.update(self.task, description=f"warming up: {escape(label)}")
        if self.console.is_terminal:
            self.draw()
        elif label not in self._warmed:
            self.console.print(f"warming up: {label}", highlight=False, markup=False)
        self._warmed.add(label)

    def on_estimate(self, seconds: float, samples: int) -> None:
        """Print the time of the samples if each output has the maximum length."""
        self.console.print(f"about {_duration(seconds)} for {pluralize(samples, 'sample')}", highlight=False)

    def on_sample_start(self, label: str, question_id: str) -> None:
        """Show the method and its question."""
        self.tokens, self._started = 0, self._started or time.monotonic()
        self.bar.update(self.task, description=f"{escape(label)} on {escape(question_id)}")
        self.draw_soon()

    def on_tokens(self, n: int) -> None:
        """Count tokens between steps, which are timed one by one."""
        self.tokens += n
        self.draw_soon()

    def on_sample(self, row: SampleRecord) -> None:
        """Count a committed sample."""
        self.done += 1
        self.totals[row.method].add(row)
        self.bar.update(self.task, completed=self.done)
        if self.console.is_terminal:
            self.draw_soon()
        elif self.done == self.total or self.done % max(1, self.total // PLAIN_LINES) == 0:
            left = (time.monotonic() - self._started) / self.done * (self.total - self.done)
            more = f", about {_duration(left)} left" if self.done < self.total else ""
            self.console.print(f"{self.done} of {self.total} samples{more}", highlight=False)

    def on_recording(self, answers: int) -> None:
        """Print how many answers are decoded again."""
        self.console.print(f"recording the drafts of {pluralize(answers, 'answer')}, untimed", highlight=False)

    def view(self) -> RenderableType:
        """Return the totals of each method above the bar."""
        table = Table(box=None, pad_edge=False, header_style="dim")
        for column in ("method", "samples", "tokens/s", "tokens/step"):
            table.add_column(column, justify="left" if column == "method" else "right")
        for label, totals in self.totals.items():
            table.add_row(escape(label), *totals.cells())
        return Group(table, self.bar)


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= MINUTES else f"{seconds:.0f} s"


AnyPlan = preflight.Plan | serving.Plan


def describe(
    plan: AnyPlan,
    where: OutputOptions,
    access: Access | None = None,
    runs: Path | None = None,
    of_methods: preflight.Plan | None = None,
) -> None:
    """Print the plan of a run without loading the model. Each server is queried for its models only.

    runs: folder with earlier runs; None: the one that contains the run. of_methods: plan of the run of methods that
    servers are compared with, whose model chooses the questions.
    """
    config, data, servers = plan.config, plan.data, list[Server]()
    if isinstance(plan, preflight.Plan):
        lines = _planned(plan, where)
    else:
        assert access is not None
        with serving.connected(config, access) as servers:
            lines = [("endpoint", f"{server.label}: {server.shown_url}, model {server.model}") for server in servers]
        lines += [("server", f"{one.label}: {shlex.join(one.command)}") for one in config.endpoints if one.command]
        if access.launch is not None:
            check_programs(access.launch)
            times = starts(access.launch, len(data.questions), len(config.loads) * config.repeats)
            lines.append(("starts", f"{times} of servers, of up to {access.launch.ready_s:g} s each"))
    notes = data.notes if config.data is not None else ()
    lines += [
        ("suite", f"{data.name} ({data.edition}), {data.content_hash[:12]}"),
        ("size", _size(data) + (f", {config.repeats} repeats" if config.repeats > 1 else "")),
        *(("note", note) for note in notes),
        ("decoding", decoding_text(config, data)),
        *(("note", note) for note in decoding_notes(config.as_dict())),
        *([("at a time", ", ".join(map(str, (1, *config.concurrency))))] if config.concurrency else []),
        *([("rates", ", ".join(str(load) for load in config.loads if load.rate))] if config.rate else []),
        ("samples", str(plan.samples * (1 + len(config.loads)) * where.sessions)),
    ]
    if where.goal:
        sizes = Counter(question.category for question in (of_methods or plan).whole_suite().questions)
        needed = questions_needed(config, sizes, where.goal.target_ci, runs or where.out.parent, servers)
        lines.append(("precision", needed))
    lines += [("time", "the run prints an estimate after the warm-up"), ("out", str(where.out))]
    for name, text in lines:
        print(f"{name:<10} {text}")


def _settings(options: Any, advised: Mapping[str, Any]) -> str:
    """Return the options that differ from their defaults, as text: the user's, then the advised ones."""
    defaults = option_values(type(options)())
    given = {name: value for name, value in option_values(options).items() if value != defaults[name]}
    stated = ", ".join(f"{name}={value_text(value)}" for name, value in given.items())
    parts = [stated, advice_text(advised) if advised else ""]
    return "; ".join(filter(None, parts)) or "defaults"


def _draft_sizes(methods: Iterable[tuple[str, str, Mapping[str, Any]]]) -> str:
    """Return the options that limit the drafted nodes of a step, as in 'ss n_draft=4, medusa nodes=15'.

    methods: label, name and settings; `tree_nodes` is the size of a static tree.
    """
    found = []
    for label, name, settings in methods:
        limits = ("tree_nodes", *registry.method_class(name).node_options)
        limit = next((key for key in limits if isinstance(settings.get(key), int) and settings[key] > 0), None)
        if limit is not None:
            found.append(f"{label} {limit.removeprefix('tree_')}={settings[limit]}")
    return ", ".join(found)


def _planned(plan: preflight.Plan, where: OutputOptions) -> list[tuple[str, str]]:
    """Return the lines on a model in this process or in workers."""
    config = plan.config
    lines = [("model", f"{config.model}, dtype {plan.dtype}, device {plan.device}")]
    lines += [("dtype", plan.dtype_choice)] if plan.dtype_choice else []
    lines += [("method", f"{label}: {_settings(own, plan.advised[label])}") for label, own in plan.options.items()]
    settings = {label: {**option_values(own), **plan.advised[label]} for label, own in plan.options.items()}
    names = {spec.label: spec.name for spec in config.methods}
    if sizes := _draft_sizes((label, names[label], of) for label, of in settings.items()):
        lines.append(("drafts", sizes))
    lines += [("preset", f"{preset.file}, {preset.sha256[:12]}") for preset in config.presets]
    lines += [("plugin", f"{file.file}, {file.sha256[:12]}") for file in config.plugin]
    if where.workers is not None:
        lines.append(("workers", f"{where.workers.count or 'one for each GPU, or for each machine'}, of Ray"))
    return lines


def run(
    config: RunConfig,
    where: OutputOptions,
    access: Access | None = None,
    open_report: bool = False,
    fail_on: str | None = None,
    form: Form = "short",
) -> None:
    """Make the run, print its results, and write its report. fail_on: findings that exit with code 1 after that."""
    show(measure(config, where, access), open_report, fail_on, form)


def measure(config: RunConfig, where: OutputOptions, access: Access | None = None) -> Results:
    """Make the run, or resume it, and show its progress; return what it stored."""
    return finished(make(config, where, access))


def make(config: RunConfig, where: OutputOptions, access: Access | None = None) -> Path:
    """Make the run, or resume it, and show its progress. User errors are raised before anything is measured."""
    reading = threading.Timer(SILENT_S, print, [f"reading {config.model or 'the model'} ..."], {"file": sys.stderr})
    reading.start()
    try:
        plan = plan_of(config, where, access)
    finally:
        reading.cancel()
    return make_plan(plan, where, access)


def finished(path: Path) -> Results:
    """Return what a run stored, and write its Parquet files."""
    results = load_run(path)
    if problem := results.write_parquet():
        print_warning(problem)
    return results


def make_plan(plan: AnyPlan, where: OutputOptions, access: Access | None = None) -> Path:
    """Make a checked run, or resume it, and show its progress."""
    command = ["ssbench", *sys.argv[1:]]
    if isinstance(plan, serving.Plan):
        assert access is not None
        return serving.measure(plan, where, access, command, _shown)
    if where.workers is not None:
        return sharding.measure(plan, where, command, _shown)
    return measuring.measure(plan, where, command, _shown)


def plan_of(config: RunConfig, where: OutputOptions, access: Access | None = None) -> AnyPlan:
    """Return the plan of a run of methods or of servers. Raises UserError as the checks do."""
    return checked(config, where) if access is None else serving.check(config, where)


def checked(config: RunConfig, where: OutputOptions) -> preflight.Plan:
    """Return the plan of a run of methods, with its notes as warnings. Raises UserError as the checks do."""
    return preflight.check(config, where, note=lambda text: warnings.warn(text, stacklevel=2))


AnyReady = measuring.PreparedRun | sharding.PreparedRun | serving.PreparedRun


@contextmanager
def _shown(ready: AnyReady) -> Iterator[RunCallbacks]:
    """Show notes, the choice of a dtype, a title and the live display on stderr."""
    console, data = Console(stderr=True), ready.plan.data
    for line in _head(ready):
        console.print(line, highlight=False, soft_wrap=True)
    for note in data.notes if ready.plan.config.data is not None else ():
        print_text(console, f"{data.name}: {note}")
    manifest = ready.run_dir.manifest
    for method in (method for method in manifest["methods"] if method.get("advised")):
        advised = advice_text(method["advised"])
        print_text(console, f"{method['label']}: {advised}")
    for method in manifest["methods"]:
        for name, value in method.get("measured", {}).items():
            print_text(console, f"{method['label']}: {name} {value}")
    methods = [] if isinstance(ready, serving.PreparedRun) else manifest["methods"]
    if sizes := _draft_sizes((m["label"], m["name"], m["options"] | m["resolved"]) for m in methods):
        print_text(console, f"drafts at most, per step: {sizes}")
    with Progress([method["label"] for method in manifest["methods"]], console) as progress:
        yield progress


def _head(ready: AnyReady) -> Iterator[str]:
    """Yield notes and the title of the run as markup."""
    config, data = ready.plan.config, ready.plan.data
    prompts = f"({data.edition}, {data.content_hash[:12]}, {_size(data)}), {escape(decoding_text(config, data))}"
    if isinstance(ready, serving.PreparedRun):
        for found in ready.found:
            server, about = found.server, found.about
            software = " ".join(filter(None, (about["software"], about["version"])))
            model = f"model {server.model}{f', {software}' if software else ''}"
            yield escape(f"{server.label}: {server.shown_url}, {model}; acceptance: {about['acceptance']}")
        yield f"[bold]{pluralize(len(ready.plan.config.endpoints), 'server')}[/] on [bold]{data.name}[/] {prompts}"
        return

    yield from decoding_notes(config.as_dict())
    for note in ready.notes if isinstance(ready, measuring.PreparedRun) else ():
        yield f"[yellow]warning:[/] {escape(note)}"
    if own := settings_note(ready.run_dir.manifest["model"].get("generation_config", {})):
        yield escape(own)
    if ready.plan.dtype_choice:
        yield escape(ready.plan.dtype_choice)
    model = ready.run_dir.manifest["model"]
    place = model["device"] if isinstance(ready, measuring.PreparedRun) else f"{model['device']}, workers of Ray"
    size = f"{parameters(model['parameters'])}, {ready.plan.dtype}, {place}"
    yield f"[bold]{escape(model['name'])}[/] ({size}) on [bold]{data.name}[/] {prompts}"


def _size(data: SuiteData) -> str:
    """Return the number of questions, and of prompts where questions have several turns."""
    turns = sum(len(question.turns) for question in data.questions)
    prompts = f", {pluralize(turns, 'prompt')}" if turns > len(data.questions) else ""
    return f"{pluralize(len(data.questions), 'question')}{prompts}"


def decoding_text(config: RunConfig, data: SuiteData) -> str:
    """Return the decoding settings as text."""
    limit = config.max_new_tokens or data.max_new_tokens
    return f"{decoding(config.as_dict())}, at most {limit} tokens, seed {config.seed}"


def show(results: Results, open_report: bool, fail_on: str | None = None, form: Form = "short") -> None:
    """Write the report, print the results and its path; exit as `exit_on` does."""
    report = write_report(results)
    present(results, report, open_report, form)
    if form == "json":
        print_json(record(results, report))
    exit_on(results, fail_on)


def present(results: Results, report: Path, open_report: bool, form: Form) -> None:
    """Print the results with the path of the written report, unless the form is JSON."""
    console = Console()
    if form == "quiet":
        print_answer(results, console)
    elif form != "json":
        _print_results(results, form, console)
    if form != "json":
        print(f"report   {report}")
    if form in ("short", "verbose"):
        print(f"more     {_more(results.path)}")
    if open_report:
        open_in_browser(report)


def exit_on(results: Results, fail_on: str | None) -> None:
    """Exit with code 1 if a method has no good sample, or if the run has one of the findings in `fail_on`."""
    if errors := without_result(results.run):
        methods = "; ".join(f"{label}: {error}" for label, error in errors.items())
        print(f"ssbench: every sample failed of {' '.join(methods.split())}", file=sys.stderr)
        raise typer.Exit(1)
    fail(results, fail_on)


def _more(path: Path) -> str:
    """Return the commands that show a run again; `ssbench report` takes the latest in ./runs by default."""
    run = "" if path.parent == Path("runs") else f" {shlex.quote(str(path))}"
    return f'ssbench report{run} -v, ssbench report{run} --open, load_run("{path}")'


def _print_results(results: Results, form: Form, console: Console) -> None:
    (print_verbose if form == "verbose" else print_short)(results, console)
    print_concurrency(results, console)
    if "target_ci" in results.manifest:
        print(f"repeats  {results.manifest['target_ci']['why']}")


def record(results: Results, report: Path) -> dict[str, Any]:
    """Return the results for other programs: headline, summary over all tasks, checks, concurrency and paths."""
    return {
        "headline": results.headline,
        "rows": [row.as_dict() for row in results.overall],
        "checks": [asdict(check) for check in results.checks],
        **results.concurrency_json(),
        "paths": {"run": str(results.path), "report": str(report)},
    }


def without_result(run: Run) -> dict[str, str]:
    """Return the methods of which every sample failed, with the first error."""
    good = {row.method for row in run.rows if row.ok}
    first: dict[str, str] = {}
    for row in run.rows:
        if row.method not in good:
            first.setdefault(row.method, row.error or "unknown error")
    return first
