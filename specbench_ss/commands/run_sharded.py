"""What `ssbench run --executor ray` does: check, have workers make the samples, show them, print the results."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

from specbench_ss.benchmark.events import Events
from specbench_ss.benchmark.progress import Progress
from specbench_ss.commands.run_output import checked, print_advice, print_data_notes, tell, title
from specbench_ss.runs.config import RunConfig, RunTarget
from specbench_ss.sharded import measure as measuring
from specbench_ss.sharded.measure import Ready


def run(config: RunConfig, where: RunTarget, open_report: bool = False, fail_on: str | None = None) -> None:
    """Make the run, or resume it, print its tables, and write its report."""
    measuring.measure(checked(config, where), where, ["ssbench", *sys.argv[1:]], _shown)
    tell(where.out, open_report, fail_on)


@contextmanager
def _shown(ready: Ready) -> Iterator[Events]:
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
