"""Making a run by workers: begin the pool, open the run directory, hand questions out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from specbench_ss.benchmark.events import Events, Silent
from specbench_ss.benchmark.measure import write_run_parquet
from specbench_ss.benchmark.preflight import Plan
from specbench_ss.runs.config import RunTarget
from specbench_ss.runs.run_directory import RunDir
from specbench_ss.sharded.ray_pool import ray_pool
from specbench_ss.sharded.session import ShardedRun
from specbench_ss.sharded.shard import Job


@dataclass(frozen=True, slots=True)
class Ready:
    """A run about to start. model: what its manifest says of the model."""

    plan: Plan
    labels: tuple[str, ...]
    model: dict[str, Any]
    run_dir: RunDir


Watch = Callable[[Ready], AbstractContextManager[Events]]


@contextmanager
def unwatched(ready: Ready) -> Iterator[Events]:
    """Nobody is told anything: the notes are kept in the manifest."""
    for note in ready.plan.notes:
        ready.run_dir.keep_warning(note)
    yield Silent()


def measure(plan: Plan, where: RunTarget, command: Sequence[str], watch: Watch = unwatched) -> None:
    """Make the run that was checked, or go on with it, by where.workers. command: as of `benchmark.measure.measure`.

    Raises UserError as loading does, and where workers are lost again and again.
    """
    assert where.workers is not None
    config, data = plan.config, plan.data
    with ExitStack() as stack:
        pool = stack.enter_context(ray_pool(job_of(plan, where, command), where.workers))
        manifest = pool.start()
        labels = tuple(method["label"] for method in manifest["methods"])
        run_dir = stack.enter_context(RunDir.open(where, manifest, data.questions))
        events = stack.enter_context(watch(Ready(plan, labels, manifest["model"], run_dir)))
        run_dir.update(recording=where.recording.as_dict())
        ShardedRun(config, data, labels, run_dir, events, where, pool).carry_out()
        write_run_parquet(run_dir, events)


def job_of(plan: Plan, where: RunTarget, command: Sequence[str]) -> Job:
    """Return what every worker is told."""
    return Job(
        plan.config,
        plan.data,
        plan.device,
        plan.dtype,
        plan.dtype_choice,
        where.recording,
        where.timeout,
        where.out.absolute(),
        tuple(command),
    )
