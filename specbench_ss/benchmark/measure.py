"""Making a run: load the target and its methods, measure, and fill the run directory."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from specbench_ss import registry
from specbench_ss.benchmark import preflight
from specbench_ss.results.number_text import parameters
from specbench_ss.runs.config import RunConfig, RunTarget, decoding
from specbench_ss.runs.suite import SuiteData

if TYPE_CHECKING:
    from specbench_ss.decoding.target import Target


def measure(config: RunConfig, where: RunTarget) -> None:
    """Make the run, or go on with it. The user's mistakes are found before anything is measured."""
    from specbench_ss.benchmark import runner
    from specbench_ss.benchmark.preset_conditions import preset_notes
    from specbench_ss.benchmark.progress import Progress
    from specbench_ss.models.loading import load_target
    from specbench_ss.runs.manifest import manifest_for
    from specbench_ss.runs.run_directory import RunDir

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


def _decoding(config: RunConfig, data: SuiteData) -> str:
    limit = config.max_new_tokens or data.max_new_tokens
    return f"{decoding(config.as_dict())}, at most {limit} tokens, seed {config.seed}"


def _title(config: RunConfig, target: Target, data: SuiteData) -> str:
    dtype = str(target.dtype).removeprefix("torch.")
    return (
        f"[bold]{target.name}[/] ({parameters(target.parameter_count)}, {dtype}, {target.device}) on "
        f"[bold]{data.name}[/] ({data.edition}, {len(data.questions)} questions), {_decoding(config, data)}"
    )
