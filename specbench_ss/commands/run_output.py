"""What `ssbench run` does once it knows what is wanted: check, load, run, and print the results."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from specbench_ss.benchmark import measure as measuring
from specbench_ss.benchmark import preflight
from specbench_ss.benchmark.measure import Ready
from specbench_ss.benchmark.progress import Progress
from specbench_ss.benchmark.runner import Events
from specbench_ss.commands.fail_on import fail
from specbench_ss.commands.report import open_in_browser, write_report
from specbench_ss.models.devices import device_class
from specbench_ss.models.drafter_advice import advice_text
from specbench_ss.options import options_text
from specbench_ss.results.concurrency_text import print_levels
from specbench_ss.results.machine import machine_rows
from specbench_ss.results.machine_text import machine_lines
from specbench_ss.results.number_text import counted, parameters
from specbench_ss.results.terminal_table import print_tables
from specbench_ss.runs.config import RunConfig, RunTarget, decoding
from specbench_ss.runs.rows import Run
from specbench_ss.runs.run_directory import read_run
from specbench_ss.runs.suite import SuiteData


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
    measure(config, where)
    tell(where.out, open_report, fail_on)


def measure(config: RunConfig, where: RunTarget) -> None:
    """Make the run, or resume it, and show its progress. The user's mistakes are found before anything is measured."""
    measuring.measure(checked(config, where), where, ["ssbench", *sys.argv[1:]], _shown)


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


def tell(out: Path, open_report: bool, fail_on: str | None = None) -> None:
    """Print the tables, write the report and print its path.

    Exit with code 1 where a method has no good sample, or where the run has one of the findings in `fail_on`.
    """
    done = read_run(out)
    for line in machine_lines(machine_rows(done), done.manifest):
        print(line)
    if "until_ci" in done.manifest:
        print(f"repeats: {done.manifest['until_ci']['why']}")
    print_levels(done, Console())
    print_tables(done, Console())  # which ends with what is wrong, and with the finding
    report = write_report(done)
    print(f"report: {report}")
    if open_report:
        open_in_browser(report)
    errors = without_result(done)
    if errors:
        what = "; ".join(f"{label}: {error}" for label, error in errors.items())
        print(f"ssbench: every sample failed of {' '.join(what.split())}", file=sys.stderr)
        raise typer.Exit(1)
    fail(done, fail_on)


def without_result(run: Run) -> dict[str, str]:
    """Return the methods of which every sample failed, with the first error."""
    good = {row.method for row in run.rows if row.ok}
    first: dict[str, str] = {}
    for row in run.rows:
        if row.method not in good:
            first.setdefault(row.method, row.error or "unknown error")
    return first
