"""What `ssbench run --executor ray` shows while workers make the samples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from specbench_ss.benchmark.progress import Progress
from specbench_ss.commands.run_output import title

if TYPE_CHECKING:
    from specbench_ss.benchmark.events import Events
    from specbench_ss.sharded.measure import Ready


@contextmanager
def shown(ready: Ready) -> Iterator[Events]:
    """Show the choice of a dtype, a title and the live display on stderr; samples count as they come back."""
    console, plan, model = Console(stderr=True), ready.plan, ready.model
    if plan.dtype_choice:
        console.print(escape(plan.dtype_choice), highlight=False, soft_wrap=True)
    place = f"{model['device']}, workers of Ray"
    console.print(title(plan, model["name"], model["parameters"], place), highlight=False, soft_wrap=True)
    with Progress(list(ready.labels), console) as progress:
        yield progress
