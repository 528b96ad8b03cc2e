"""Progress and results of `ssbench run` in the terminal."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import typer
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from specbench_ss.bench import preflight
from specbench_ss.bench import ray as sharding
from specbench_ss.bench import runner as measuring
from specbench_ss.bench import server_run as serving
from specbench_ss.bench.build_config import Access
from specbench_ss.bench.run_loop import RunCallbacks
from specbench_ss.cli.report import open_in_browser, write_report
from specbench_ss.cli.shared import LiveView, fail
from specbench_ss.models.checkpoint import advice_text
from specbench_ss.models.devices import device_class
from specbench_ss.options import options_text
from specbench_ss.results.analysis import Results
from specbench_ss.results.terminal import machine_lines, print_concurrency, print_tables
from specbench_ss.results.text import parameters, pluralize
from specbench_ss.runs.config import OutputOptions, RunConfig, decoding
from specbench_ss.runs.records import Run, SampleRecord
from specbench_ss.suite import SuiteData

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

    def add(self, row: SampleRecord) -> None:
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
        self._warmed = set[str]()

    def on_start(self, total: int) -> None:
        """Samples still to be made."""
        self.total = total
        self.bar.update(self.task, total=total)
        self.draw()

    def on_warm_up(self, label: str) -> None:
        """A method warms up: shown at once, for it may take minutes; without a terminal, a line for each method."""
        self.bar.update(self.task, description=f"warming up: {escape(label)}")
        if self.console.is_terminal:
            self.draw()
        elif label not in self._warmed:
            self.console.print(f"warming up: {label}", highlight=False, markup=False)
        self._warmed.add(label)

    def on_sample_start(self, label: str, question_id: str) -> None:
        """A method begins to answer."""
        self.tokens = 0
        self.bar.update(self.task, description=f"{escape(label)} on {escape(question_id)}")
        self.draw_soon()

    def on_tokens(self, n: int) -> None:
        """Called between steps, which are timed one by one."""
        self.tokens += n
        self.draw_soon()

    def on_sample(self, row: SampleRecord) -> None:
        """A sample is committed."""
        self.done += 1
        self.totals[row.method].add(row)
        self.bar.update(self.task, completed=self.done)
        if self.console.is_terminal:
            self.draw_soon()
        elif self.done == self.total or self.done % max(1, self.total // PLAIN_LINES) == 0:
            self.console.print(f"{self.done} of {self.total} samples", highlight=False)

    def view(self) -> RenderableType:
        """Return the totals of each method above the bar."""
        table = Table(box=None, pad_edge=False, header_style="dim")
        for column in ("method", "samples", "tokens/s", "tokens/step"):
            table.add_column(column, justify="left" if column == "method" else "right")
        for label, totals in self.totals.items():
            table.add_row(escape(label), *totals.cells())
        return Group(table, self.bar)


def describe(config: RunConfig, where: OutputOptions, access: Access | None = None) -> None:
    """Print what `run` would do, without loading the model. Each server is asked for its models, and no question."""
    plan = checked(config, where) if access is None else serving.check(config, where)
    if isinstance(plan, preflight.Plan):
        lines = _planned(plan, where)
    else:
        assert access is not None
        with serving.connected(config, access) as servers:
            lines = [("endpoint", f"{server.label}: {server.shown_url}, model {server.model}") for server in servers]
    config, data = plan.config, plan.data
    prompts = sum(len(q.turns) for q in data.questions)
    notes = data.notes if config.data is not None else ()
    lines += [
        ("suite", f"{data.name} ({data.edition}), {data.content_hash[:12]}"),
        ("questions", f"{len(data.questions)} ({pluralize(prompts, 'prompt')}), repeats {config.repeats}"),
        *(("note", note) for note in notes),
        ("decoding", decoding_text(config, data)),
        *([("at a time", ", ".join(map(str, (1, *config.concurrency))))] if config.concurrency else []),
        ("samples", str(plan.samples * (1 + len(config.concurrency)))),
        ("out", str(where.out)),
    ]
    for name, text in lines:
        print(f"{name:<10} {text}")


def _planned(plan: preflight.Plan, where: OutputOptions) -> list[tuple[str, str]]:
    """Return the lines that are of models in processes of ours."""
    config = plan.config
    lines = [("model", f"{config.model}, dtype {plan.dtype}, device {plan.device}")]
    lines += [("dtype", plan.dtype_choice)] if plan.dtype_choice else []
    lines += [("method", f"{label}: {options_text(own) or 'no options'}") for label, own in plan.options.items()]
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
) -> None:
    """Make the run, print its tables, and write its report. fail_on: findings that exit with code 1 after that."""
    tell(measure(config, where, access), open_report, fail_on)


def measure(config: RunConfig, where: OutputOptions, access: Access | None = None) -> Results:
    """Make the run, or resume it, and show its progress. The user's mistakes are found before anything is measured."""
    command = ["ssbench", *sys.argv[1:]]
    if access is not None:
        return serving.measure(serving.check(config, where), where, access, command, _shown)
    plan = checked(config, where)
    if where.workers is not None:
        return sharding.measure(plan, where, command, _shown)
    return measuring.measure(plan, where, command, _shown)


def checked(config: RunConfig, where: OutputOptions) -> preflight.Plan:
    """Return what the run will do, and warn of what its user should know. Raises UserError as the checks do."""
    return preflight.check(config, where, note=lambda text: warnings.warn(text, stacklevel=2))


AnyReady = measuring.PreparedRun | sharding.PreparedRun | serving.PreparedRun


@contextmanager
def _shown(ready: AnyReady) -> Iterator[RunCallbacks]:
    """Show notes, the choice of a dtype, a title and the live display on stderr."""
    console, data = Console(stderr=True), ready.plan.data
    for line in _head(ready):
        console.print(line, highlight=False, soft_wrap=True)
    for note in data.notes if ready.plan.config.data is not None else ():
        console.print(f"{data.name}: {escape(note)}", highlight=False, soft_wrap=True)
    manifest = ready.run_dir.manifest
    for method in (method for method in manifest["methods"] if method.get("advised")):
        advised = advice_text(method["label"], method["advised"], device_class(manifest["model"]["device"]))
        console.print(escape(advised), highlight=False, soft_wrap=True)
    with Progress([method["label"] for method in manifest["methods"]], console) as progress:
        yield progress


def _head(ready: AnyReady) -> Iterator[str]:
    """Yield what should be known of the run, and what is about to be measured, as markup."""
    config, data = ready.plan.config, ready.plan.data
    asked = f"({data.edition}, {pluralize(len(data.questions), 'question')}), {escape(decoding_text(config, data))}"
    if isinstance(ready, serving.PreparedRun):
        for found in ready.found:
            server, about = found.server, found.about
            software = " ".join(filter(None, (about["software"], about["version"])))
            told = f"{server.shown_url}, model {server.model}{f', {software}' if software else ''}"
            yield escape(f"{server.label}: {told}; acceptance: {about['acceptance']}")
        yield f"[bold]{len(ready.found)} served[/] on [bold]{data.name}[/] {asked}"
        return

    for note in ready.notes if isinstance(ready, measuring.PreparedRun) else ():
        yield f"[yellow]warning:[/] {escape(note)}"
    if ready.plan.dtype_choice:
        yield escape(ready.plan.dtype_choice)
    model = ready.run_dir.manifest["model"]
    place = model["device"] if isinstance(ready, measuring.PreparedRun) else f"{model['device']}, workers of Ray"
    known = f"{parameters(model['parameters'])}, {ready.plan.dtype}, {place}"
    yield f"[bold]{escape(model['name'])}[/] ({known}) on [bold]{data.name}[/] {asked}"


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
    if "target_ci" in done.manifest:
        print(f"repeats: {done.manifest['target_ci']['why']}")
    print_concurrency(done, Console())
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
