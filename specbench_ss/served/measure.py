"""Making a run of served engines: check what is asked, connect, measure, and fill the run directory. Prints nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench_ss import registry
from specbench_ss.benchmark.asked_endpoints import Access
from specbench_ss.benchmark.events import Events, Silent
from specbench_ss.benchmark.requests import check_ids, check_texts
from specbench_ss.errors import UserError
from specbench_ss.results.parquet_files import write_parquet
from specbench_ss.runs.config import RunConfig, RunTarget
from specbench_ss.runs.manifest_reading import check_same_config
from specbench_ss.runs.run_directory import RunDir, check_out, read_run
from specbench_ss.runs.suite import Suite, SuiteData, SuiteRequest
from specbench_ss.served.client import Server
from specbench_ss.served.connect import Found, about, connect_all, probe
from specbench_ss.served.manifest import manifest_for
from specbench_ss.served.request import settings
from specbench_ss.served.session import ServedSession

MOST_SAMPLES = 10_000_000  # the schedule is held in memory


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run will do. samples: those with one request in flight."""

    config: RunConfig
    suite: Suite
    data: SuiteData
    samples: int


@dataclass(frozen=True, slots=True)
class Ready:
    """A run about to start."""

    plan: Plan
    found: Sequence[Found]
    run_dir: RunDir


Watch = Callable[[Ready], AbstractContextManager[Events]]


@contextmanager
def unwatched(ready: Ready) -> Iterator[Events]:
    """Nobody is told anything."""

    yield Silent()


def check(config: RunConfig, where: RunTarget) -> Plan:
    """Return what is asked for. Raises UserError, before any server is contacted. Leaves nothing behind."""
    suite = registry.load_suite(config.suite)
    if check_out(where):
        check_same_config(where.out, read_run(where.out).manifest["config"], config.as_dict())
    data = suite.load(SuiteRequest(config.categories, config.limit, None if config.data is None else Path(config.data)))
    check_ids(data)
    check_texts(data)
    samples = sum(len(q.turns) for q in data.questions) * config.repeats * len(config.endpoints)
    if samples > MOST_SAMPLES:
        raise UserError(f"the run would have {samples:,} samples; at most {MOST_SAMPLES:,} are made: fewer --repeats")
    return Plan(config, suite, data, samples)


def measure(plan: Plan, where: RunTarget, access: Access, command: Sequence[str], watch: Watch = unwatched) -> None:
    """Make the run that was checked, or go on with it. command: how it was asked for, for its manifest.

    Raises UserError where a server does not answer a first short question.
    """
    config, data = plan.config, plan.data
    with connected(config, access) as servers, ExitStack() as stack:
        found = [_probed(server, config, data) for server in servers]
        manifest = dict(manifest_for(config, data, found, access.hidden(command)))
        run_dir = stack.enter_context(RunDir.open(where, manifest, data.questions))
        events = stack.enter_context(watch(Ready(plan, found, run_dir)))
        by_label = {server.label: server for server in servers}
        ServedSession(config, plan.suite, data, by_label, run_dir, events, where).carry_out()
        if problem := write_parquet(run_dir.path):
            events.on_warning(problem)
            run_dir.keep_warning(problem)


@contextmanager
def connected(config: RunConfig, access: Access) -> Iterator[list[Server]]:
    """Give the servers, each with its model, as `connect_all` does."""
    servers = connect_all(config.endpoints, access)
    try:
        yield servers
    finally:
        for server in servers:
            server.close()


def _probed(server: Server, config: RunConfig, data: SuiteData) -> Found:
    asked: dict[str, Any] = settings(config, data.max_new_tokens, config.seed)
    return about(server, probe(server, asked))
