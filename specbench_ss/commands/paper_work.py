"""Making one table or figure of the papers, for `ssbench paper NAME` and `ssbench paper all`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from specbench_ss import __version__, registry
from specbench_ss.benchmark.asked import read_settings
from specbench_ss.commands.paper_folder import begin_folder
from specbench_ss.commands.run_output import measure as make_run
from specbench_ss.errors import error_text
from specbench_ss.method_spec import MethodSpec
from specbench_ss.models.loading import load_target
from specbench_ss.results.experiment import Bench, Claim, Experiment, Request, Result
from specbench_ss.results.experiment_output import FIGURE, print_result, write_result
from specbench_ss.runs.config import Recording, RunConfig, RunTarget
from specbench_ss.runs.environment import environment
from specbench_ss.runs.manifest import now
from specbench_ss.runs.manifest_reading import MANIFEST
from specbench_ss.runs.rows import Run
from specbench_ss.runs.run_directory import read_run


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
    registry.load_report("html").write_result(experiment, result, _facts(about), figure)
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

    def measure(config: RunConfig, name: str) -> Run:
        folder = where.out / name
        resume = where.resume and (folder / MANIFEST).exists()
        make_run(config, RunTarget(folder, resume, recording=recording))
        runs.append(name)
        return read_run(folder)

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
