"""Progress and results of `ssbench run` in the terminal."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from specbench_ss.bench import preflight
from specbench_ss.bench import ray as sharding
from specbench_ss.bench import runner as measuring
from specbench_ss.bench import server_run as serving
from specbench_ss.bench.build_config import Access
from specbench_ss.bench.ray import Ready as RayReady
from specbench_ss.bench.run_loop import Events
from specbench_ss.bench.runner import Ready
from specbench_ss.cli.report import open_in_browser, write_report
from specbench_ss.cli.shared import fail
from specbench_ss.models.checkpoint import advice_text
from specbench_ss.models.devices import device_class
from specbench_ss.options import options_text
from specbench_ss.results.analysis import Results
from specbench_ss.results.terminal import machine_lines, print_levels, print_tables
from specbench_ss.results.text import counted, parameters
from specbench_ss.runs.config import RunConfig, RunTarget, decoding
from specbench_ss.runs.records import Row, Run
from specbench_ss.suite import SuiteData

REDRAW_S = 0.5  # while a sample is being answered, redraw at most this often
PLAIN_LINES = 10  # without a terminal, so many progress lines a run


@dataclass(slots=True)
class RunningTotals:
    """What one method has done so far."""

    samples: int = 0
    failed: int = 0
    tokens: int = 0
    seconds: float = 0.0
    step_tokens: int = 0
    steps: int = 0

    def add(self, row: Row) -> None:
        """Count a committed sample."""
        self.samples += 1
        self.failed += not row.ok
        if row.ok:
            self.tokens += row.tokens or 0
            self.seconds += row.wall_s or 0.0
            self.step_tokens += (row.tokens or 0) - (row.prefill_tokens or 0)
            self.steps += row.steps or 0

    def cells(self) -> list[str]:
        """samples, tokens/s, tokens per step."""
        rate = f"{self.tokens / self.seconds:.1f}" if self.seconds else "–"
        tau = f"{self.step_tokens / self.steps:.2f}" if self.steps else "–"
        return [f"{self.samples}" + (f" ({self.failed} failed)" if self.failed else ""), rate, tau]


class Progress:
    """The runner's `Events`, shown on a console; a context manager."""

    def __init__(self, labels: list[str], console: Console) -> None:
        self.console = console
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
        self.live = Live(console=console, auto_refresh=False, transient=True)
        self.total = self.done = self.tokens = 0
        self._warmed = set[str]()
        self._drawn = 0.0

    def __enter__(self) -> Progress:
        self.live.start()
        self._draw()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.live.stop()

    def on_start(self, total: int) -> None:
        """Samples still to be made."""
        self.total = total
        self.bar.update(self.task, total=total)
        self._draw()

    def on_warm_up(self, label: str) -> None:
        """A method warms up: shown at once, for it may take minutes; without a terminal, a line for each method."""
        self.bar.update(self.task, description=f"warming up: {escape(label)}")
        if self.console.is_terminal:
            self._draw()
        elif label not in self._warmed:
            self.console.print(f"warming up: {label}", highlight=False, markup=False)
        self._warmed.add(label)

    def on_sample_start(self, label: str, question_id: str) -> None:
        """A method begins to answer."""
        self.tokens = 0
        self.bar.update(self.task, description=f"{escape(label)} on {escape(question_id)}")
        self._draw_soon()

    def on_tokens(self, n: int) -> None:
        """Called between steps, which are timed one by one."""
        self.tokens += n
        self._draw_soon()

    def on_sample(self, row: Row) -> None:
        """A sample is committed."""
        self.done += 1
        self.totals[row.method].add(row)
        self.bar.update(self.task, completed=self.done)
        if self.console.is_terminal:
            self._draw_soon()
        elif self.done == self.total or self.done % max(1, self.total // PLAIN_LINES) == 0:
            self.console.print(f"{self.done} of {self.total} samples", highlight=False)

    def on_warning(self, text: str) -> None:
        """Something that the user should know; it stays on the screen."""
        self.console.print(f"[yellow]warning:[/] {escape(text)}", highlight=False, soft_wrap=True)

    def _draw_soon(self) -> None:
        if time.monotonic() - self._drawn >= REDRAW_S:
            self._draw()

    def _draw(self) -> None:
        if self.console.is_terminal:
            self.live.update(self._view(), refresh=True)
        self._drawn = time.monotonic()

    def _view(self) -> RenderableType:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for column in ("method", "samples", "tokens/s", "tokens/step"):
            table.add_column(column, justify="left" if column == "method" else "right")
        for label, totals in self.totals.items():
            table.add_row(escape(label), *totals.cells())
        return Group(table, self.bar)


def describe(config: RunConfig, where: RunTarget) -> None:
    """Print what `run` would do, without loading the model. Raises UserError where it would not get that far."""
    plan = checked(config, where)
    config, data = plan.config, plan.data
    prompts = sum(len(q.turns) for q in data.questions)
    print(f"model      {config.model}, dtype {plan.dtype}, device {plan.device}")
    if plan.dtype_choice:
        print(f"dtype      {plan.dtype_choice}")
    print(f"suite      {data.name} ({data.edition}), {data.content_hash[:12]}")
    print(f"questions  {len(data.questions)} ({counted(prompts, 'prompt')}), repeats {config.repeats}")
    for note in data.notes if config.data is not None else ():
        print(f"note       {note}")
    print(f"decoding   {decoding_text(config, data)}")
    for label, values in plan.options.items():
        print(f"method     {label}: {options_text(values) or 'no options'}")
    for preset in config.presets:
        print(f"preset     {preset.file}, {preset.sha256[:12]}")
    for file in config.plugin:
        print(f"plugin     {file.file}, {file.sha256[:12]}")
    more = config.concurrency
    if more:
        print(f"at a time  {', '.join(map(str, (1, *more)))}")
    print(f"samples    {plan.samples * (1 + len(more))}")
    if where.workers is not None:
        print(f"workers    {where.workers.count or 'one for each GPU, or for each machine'}, of Ray")
    print(f"out        {where.out}")


def run(config: RunConfig, where: RunTarget, open_report: bool = False, fail_on: str | None = None) -> None:
    """Make the run, print its tables, and write its report. fail_on: findings that exit with code 1 after that."""
    tell(measure(config, where), open_report, fail_on)


def measure(config: RunConfig, where: RunTarget) -> Results:
    """Make the run, or resume it, and show its progress. The user's mistakes are found before anything is measured."""
    return measuring.measure(checked(config, where), where, ["ssbench", *sys.argv[1:]], _shown)


def checked(config: RunConfig, where: RunTarget) -> preflight.Plan:
    """Return what the run will do, and warn of what its user should know. Raises UserError as the checks do."""
    return preflight.check(config, where, note=lambda text: warnings.warn(text, stacklevel=2))


@contextmanager
def _shown(ready: Ready) -> Iterator[Events]:
    """Show notes, the choice of a dtype, a title and the live display on stderr."""
    console = Console(stderr=True)
    for note in ready.notes:
        console.print(f"[yellow]warning:[/] {escape(note)}", highlight=False, soft_wrap=True)
    if ready.plan.dtype_choice:
        console.print(escape(ready.plan.dtype_choice), highlight=False, soft_wrap=True)
    console.print(_title(ready), highlight=False, soft_wrap=True)
    print_data_notes(console, ready.plan.config, ready.plan.data)
    print_advice(console, ready.run_dir.manifest)
    with Progress(list(ready.labels), console) as progress:
        yield progress


def print_data_notes(console: Console, config: RunConfig, data: SuiteData) -> None:
    """Print what a suite found in data that the user gave."""
    for note in data.notes if config.data is not None else ():
        console.print(f"{data.name}: {escape(note)}", highlight=False, soft_wrap=True)


def print_advice(console: Console, manifest: Mapping[str, Any]) -> None:
    """Print the settings that each method has by the advice of its drafter's folder."""
    device = device_class(manifest["model"]["device"])
    for method in (method for method in manifest["methods"] if method.get("advised")):
        line = advice_text(method["label"], method["advised"], device)
        console.print(escape(line), highlight=False, soft_wrap=True)


def _title(ready: Ready) -> str:
    target = ready.target
    return title(ready.plan, target.name, target.parameter_count, target.device_names)


def title(plan: preflight.Plan, model: str, parameter_count: int, place: str) -> str:
    """Return what is about to be measured, and where, as markup."""
    data = plan.data
    return (
        f"[bold]{escape(model)}[/] ({parameters(parameter_count)}, {plan.dtype}, {place}) on "
        f"[bold]{data.name}[/] ({data.edition}, {counted(len(data.questions), 'question')}), "
        f"{decoding_text(plan.config, data)}"
    )


def decoding_text(config: RunConfig, data: SuiteData) -> str:
    """Return how answers are decoded, in words."""
    limit = config.max_new_tokens or data.max_new_tokens
    return f"{decoding(config.as_dict())}, at most {limit} tokens, seed {config.seed}"


def tell(results: Results, open_report: bool, fail_on: str | None = None) -> None:
    """Print the tables, write the report and print its path.

    Exit with code 1 where a method has no good sample, or where the run has one of the findings in `fail_on`.
    """
    done = results.run
    for line in machine_lines(results.machine_rows, done.manifest):
        print(line)
    if "until_ci" in done.manifest:
        print(f"repeats: {done.manifest['until_ci']['why']}")
    print_levels(done, Console())
    print_tables(results, Console())  # which ends with what is wrong, and with the finding
    report = write_report(results)
    print(f"report: {report}")
    if open_report:
        open_in_browser(report)
    errors = without_result(done)
    if errors:
        what = "; ".join(f"{label}: {error}" for label, error in errors.items())
        print(f"ssbench: every sample failed of {' '.join(what.split())}", file=sys.stderr)
        raise typer.Exit(1)
    fail(results, fail_on)


def without_result(run: Run) -> dict[str, str]:
    """Return the methods of which every sample failed, with the first error."""
    good = {row.method for row in run.rows if row.ok}
    first: dict[str, str] = {}
    for row in run.rows:
        if row.method not in good:
            first.setdefault(row.method, row.error or "unknown error")
    return first


def describe_served(config: RunConfig, where: RunTarget, access: Access) -> None:
    """Print what `run` would do. Each server is asked for its models, and no question."""
    plan = serving.check(config, where)
    with serving.connected(config, access) as servers:
        for server in servers:
            print(f"endpoint   {server.label}: {server.shown_url}, model {server.model}")
    data = plan.data
    prompts = sum(len(q.turns) for q in data.questions)
    print(f"suite      {data.name} ({data.edition}), {data.content_hash[:12]}")
    print(f"questions  {len(data.questions)} ({counted(prompts, 'prompt')}), repeats {config.repeats}")
    print(f"decoding   {decoding_text(config, data)}")
    print(f"in flight  {', '.join(map(str, (1, *config.concurrency)))}")
    print(f"samples    {plan.samples + prompts * config.repeats * len(config.endpoints) * len(config.concurrency)}")
    print(f"out        {where.out}")


def run_served(
    config: RunConfig, where: RunTarget, access: Access, open_report: bool = False, fail_on: str | None = None
) -> None:
    """Make the run, or resume it, print its tables, and write its report."""
    plan = serving.check(config, where)
    tell(serving.measure(plan, where, access, ["ssbench", *sys.argv[1:]], _shown_served), open_report, fail_on)


@contextmanager
def _shown_served(ready: serving.Ready) -> Iterator[Events]:
    """Show what the servers tell of themselves, a title and the live display on stderr."""
    console, data = Console(stderr=True), ready.plan.data
    for found in ready.found:
        server, about = found.server, found.about
        software = " ".join(filter(None, (about["software"], about["version"])))
        told = f"{server.shown_url}, model {server.model}{f', {software}' if software else ''}"
        line = f"{server.label}: {told}; acceptance: {about['acceptance']}"
        console.print(escape(line), highlight=False, soft_wrap=True)
    asked = counted(len(data.questions), "question")
    title = f"[bold]{len(ready.found)} served[/] on [bold]{data.name}[/] ({data.edition}, {asked})"
    console.print(f"{title}, {escape(decoding_text(ready.plan.config, data))}", highlight=False, soft_wrap=True)
    print_data_notes(console, ready.plan.config, data)
    with Progress([found.server.label for found in ready.found], console) as progress:
        yield progress


def run_sharded(config: RunConfig, where: RunTarget, open_report: bool = False, fail_on: str | None = None) -> None:
    """Make the run, or resume it, print its tables, and write its report."""
    plan = checked(config, where)
    tell(sharding.measure(plan, where, ["ssbench", *sys.argv[1:]], _shown_workers), open_report, fail_on)


@contextmanager
def _shown_workers(ready: RayReady) -> Iterator[Events]:
    """Show the choice of a dtype, a title and the live display on stderr; samples count as they come back."""
    console, plan, model = Console(stderr=True), ready.plan, ready.model
    if plan.dtype_choice:
        console.print(escape(plan.dtype_choice), highlight=False, soft_wrap=True)
    place = f"{model['device']}, workers of Ray"
    console.print(title(plan, model["name"], model["parameters"], place), highlight=False, soft_wrap=True)
    print_data_notes(console, plan.config, plan.data)
    print_advice(console, ready.run_dir.manifest)
    with Progress(list(ready.labels), console) as progress:
        yield progress
