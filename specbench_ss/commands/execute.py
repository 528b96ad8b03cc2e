"""What `ssbench run` does once it knows what is wanted: check, load, run, tell."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape

from specbench_ss import registry
from specbench_ss.commands import preflight
from specbench_ss.commands.report import open_in_browser, write_report
from specbench_ss.config import RunConfig, RunTarget
from specbench_ss.options import options_text
from specbench_ss.suite import SuiteData
from specbench_ss.words import decoding, parameters

if TYPE_CHECKING:
    from specbench_ss.rows import Run
    from specbench_ss.target import Target


def describe(config: RunConfig, where: RunTarget) -> None:
    """Print what `run` would do, without loading the model. Raises UserError where it would not get that far."""
    plan = preflight.check(config, where)
    config, data = plan.config, plan.data
    prompts = sum(len(q.turns) for q in data.questions)
    print(f"model      {config.model}, dtype {plan.dtype}, device {plan.device}")
    print(f"suite      {data.name} ({data.edition}), {data.content_hash[:12]}")
    print(f"questions  {len(data.questions)} ({prompts} prompts), repeats {config.repeats}")
    print(f"decoding   {_decoding(config, data)}")
    for label, values in plan.options.items():
        print(f"method     {label}: {options_text(values) or 'no options'}")
    for preset in config.presets:
        print(f"preset     {preset.file}, {preset.sha256[:12]}")
    for file in config.plugin:
        print(f"plugin     {file.file}, {file.sha256[:12]}")
    print(f"samples    {plan.samples}")
    print(f"out        {where.out}")


def run(config: RunConfig, where: RunTarget, open_report: bool = False) -> None:
    """Make the run, print its tables, write its report."""
    measure(config, where)
    tell(where.out, open_report)


def measure(config: RunConfig, where: RunTarget) -> None:
    """Make the run, or go on with it. The user's mistakes are found before anything is measured."""
    from specbench_ss import runner
    from specbench_ss.manifest import manifest_for
    from specbench_ss.models import load_target
    from specbench_ss.preset_notes import preset_notes
    from specbench_ss.progress import Progress
    from specbench_ss.rundir import RunDir

    plan = preflight.check(config, where)
    config, data = plan.config, plan.data
    target = load_target(
        config.model,
        dtype=config.dtype,
        device=config.device,
        trust_remote_code=config.trust_remote_code,
        chat_template=config.chat_template,
    )
    decoders = {spec.label: registry.load_method(spec, target) for spec in config.methods}
    manifest = manifest_for(config, target, data, decoders, ["ssbench", *sys.argv[1:]])
    console = Console(stderr=True)
    for text in preset_notes(config, target, data, decoders):
        console.print(f"[yellow]warning:[/] {escape(text)}", highlight=False, soft_wrap=True)
    with RunDir.open(where, manifest, data.questions) as run_dir:
        console.print(_title(config, target, data), highlight=False, soft_wrap=True)
        with Progress(list(decoders), console) as progress:
            runner.run(config, target, plan.suite, data, decoders, run_dir, progress)


def tell(out: Path, open_report: bool) -> None:
    """The tables, the report, and where it all is. Exit code 1 where a method has no good sample."""
    from specbench_ss.rundir import read_run
    from specbench_ss.table import print_tables

    done = read_run(out)
    print_tables(done, Console())
    report = write_report(done)
    print(f"report: {report}")
    if open_report:
        open_in_browser(report)
    errors = without_result(done)
    if errors:
        what = "; ".join(f"{label}: {error}" for label, error in errors.items())
        print(f"ssbench: every sample failed of {' '.join(what.split())}", file=sys.stderr)
        raise typer.Exit(1)


def without_result(run: Run) -> dict[str, str]:
    """Methods of which every sample failed, with the first error."""
    good = {row.method for row in run.rows if row.ok}
    first: dict[str, str] = {}
    for row in run.rows:
        if row.method not in good:
            first.setdefault(row.method, row.error or "unknown error")
    return first


def _decoding(config: RunConfig, data: SuiteData) -> str:
    limit = config.max_new_tokens or data.max_new_tokens
    return f"{decoding(config.as_dict())}, at most {limit} tokens, seed {config.seed}"


def _title(config: RunConfig, target: Target, data: SuiteData) -> str:
    dtype = str(target.dtype).removeprefix("torch.")
    return (
        f"[bold]{target.name}[/] ({parameters(target.parameter_count)}, {dtype}, {target.device}) on "
        f"[bold]{data.name}[/] ({data.edition}, {len(data.questions)} questions), {_decoding(config, data)}"
    )
