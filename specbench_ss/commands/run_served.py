"""What `ssbench run --endpoint` does once it knows what is wanted: check, connect, measure, and print the results."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

from specbench_ss.benchmark.asked_endpoints import Access
from specbench_ss.benchmark.events import Events
from specbench_ss.benchmark.progress import Progress
from specbench_ss.commands.run_output import decoding_text, print_data_notes, tell
from specbench_ss.results.number_text import counted
from specbench_ss.runs.config import RunConfig, RunTarget
from specbench_ss.served import measure as measuring


def describe(config: RunConfig, where: RunTarget, access: Access) -> None:
    """Print what `run` would do. Each server is asked for its models, and no question."""
    plan = measuring.check(config, where)
    with measuring.connected(config, access) as servers:
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


def run(
    config: RunConfig, where: RunTarget, access: Access, open_report: bool = False, fail_on: str | None = None
) -> None:
    """Make the run, or resume it, print its tables, and write its report."""
    measuring.measure(measuring.check(config, where), where, access, ["ssbench", *sys.argv[1:]], _shown)
    tell(where.out, open_report, fail_on)


@contextmanager
def _shown(ready: measuring.Ready) -> Iterator[Events]:
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
