"""Workers as actors of a Ray cluster: an existing one, or one of this machine's own for as long as the run lasts."""

from __future__ import annotations

import contextlib
import os
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any

from specbench_ss.errors import UserError, first_line
from specbench_ss.runs.collected import Parcel
from specbench_ss.runs.config import Workers
from specbench_ss.sharded.shard import Job, Shard
from specbench_ss.sharded.worker import Worker

LOSSES = 3  # workers that one question, or starting, may cost
ADDRESS = "RAY_ADDRESS"  # the environment variable in which Ray looks for a cluster


def check_installed() -> None:
    """Raises UserError where Ray is not installed."""
    from importlib.util import find_spec

    if find_spec("ray") is None:
        raise UserError("--executor ray needs Ray: pip install 'specbench-ss[ray]'")


@contextlib.contextmanager
def ray_pool(job: Job, wanted: Workers) -> Iterator[RayPool]:
    """Give a pool whose workers run as long as the block lasts. Raises UserError where the cluster cannot have them."""
    check_installed()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would send statistics to its makers
    import ray

    mine = not ray.is_initialized()
    if mine:
        _connect(ray, wanted.address)
    pool = None
    try:
        pool = RayPool(ray, job, *_share(ray, wanted, on_gpu=job.device.startswith("cuda")))
        yield pool
    finally:
        if pool is not None:
            pool.end()
        if mine:
            ray.shutdown()


def _connect(ray: Any, address: str | None) -> None:
    """Connect to the cluster that was named, or start one on this machine."""
    address = address or os.environ.get(ADDRESS) or "local"
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error", **_of_own(address))
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        raise UserError(f"no Ray cluster at {address}: {first_line(error)}") from error


def _of_own(address: str) -> dict[str, Any]:
    return {"include_dashboard": False} if address == "local" else {}


def _share(ray: Any, wanted: Workers, on_gpu: bool) -> tuple[int, float, float]:
    """Return how many workers there will be, and the processors and GPUs of each. Raises UserError for too many."""
    total = ray.cluster_resources()
    cpus, gpus = int(total.get("CPU", 0)), int(total.get("GPU", 0)) if on_gpu else 0
    machines = sum(node["Alive"] for node in ray.nodes())
    count = wanted.count or gpus or max(1, machines)
    limit, what = (gpus, "GPUs") if on_gpu else (cpus, "processors")
    if count > limit:
        raise UserError(f"--workers {count}: the Ray cluster has {limit} {what}, and each worker needs one")
    return count, max(1, cpus // count), 1 if on_gpu else 0


class RayWorker(Worker):
    """A worker that can say which machine of the cluster it is on."""

    def machine(self) -> str:
        """Return Ray's name of the machine, which says nothing of it."""
        import ray

        return str(ray.get_runtime_context().get_node_id())


class RayPool:
    """Workers of one run. workers: what each one runs on, in the order in which they were started."""

    def __init__(self, ray: Any, job: Job, count: int, cpus: float, gpus: float) -> None:
        self._ray, self._job = ray, ray.put(job)
        self._kind = ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=0)(RayWorker)
        self._asked: dict[Any, tuple[Any, Shard | None]] = {}  # reference -> worker, what it makes; None = it starts
        self._idle: list[Any] = []
        self._lost = Counter[str]()
        self._manifest: dict[str, Any] | None = None
        self.workers: list[dict[str, Any]] = []
        for _ in range(count):
            self._add()

    def start(self) -> dict[str, Any]:
        """Return the manifest of the run as the first worker has it that is ready. Raises UserError as it does."""
        while self._manifest is None:
            self._hear()
        return self._manifest

    def make(self, wanted: Sequence[Shard]) -> Iterator[Parcel]:
        """As `Pool.make` has it."""
        todo, open_shards = deque(wanted), len(wanted)
        while open_shards:
            while self._idle and todo:
                self._ask(self._idle.pop(), todo.popleft())
            shard, parcel = self._hear()
            if parcel is not None:
                open_shards -= 1
                yield parcel
            elif shard is not None:
                todo.appendleft(shard)

    def finish(self) -> list[str]:
        """As `Pool.finish` has it."""
        changes = []
        for worker in self._idle:
            with contextlib.suppress(self._ray.exceptions.RayError):  # lost after its last question
                changes.append(self._ray.get(worker.finish.remote()))
        return [text for text in changes if text]

    def end(self) -> None:
        """End every worker, whatever it does."""
        for worker in [*self._idle, *(worker for worker, _ in self._asked.values())]:
            self._ray.kill(worker)

    def _add(self) -> None:
        worker = self._kind.remote(self._job)
        self._asked[worker.start.remote()] = worker, None

    def _ask(self, worker: Any, shard: Shard) -> None:
        self._asked[worker.make.remote(shard)] = worker, shard

    def _hear(self) -> tuple[Shard | None, Parcel | None]:
        """Wait for one worker; return its shard and what it made of it, or the shard alone where both were lost."""
        (ready, *_), _ = self._ray.wait(list(self._asked), num_returns=1)
        worker, shard = self._asked.pop(ready)
        try:
            answer = self._ray.get(ready)
        except self._ray.exceptions.RayError as error:
            self._replace(worker, shard, error)
            return shard, None
        self._idle.append(worker)
        if shard is not None:
            return shard, answer
        self._welcome(worker, answer)
        return None, None

    def _replace(self, worker: Any, shard: Shard | None, error: Exception) -> None:
        """Put another worker in the place of one that was lost. Raises UserError where that does not help."""
        cause = getattr(error, "cause", None)
        if shard is None and isinstance(cause, UserError):
            raise UserError(str(cause)) from None
        place = "starting" if shard is None else f"question {shard.question_id}"
        self._lost[place] += 1
        if self._lost[place] >= LOSSES:
            told = first_line(cause or error)
            raise UserError(
                f"{LOSSES} workers were lost at {place} (the last one: {told}): what is committed is whole, and "
                "--resume goes on"
            )
        self._ray.kill(worker)
        self._add()

    def _welcome(self, worker: Any, manifest: dict[str, Any]) -> None:
        """Note what a new worker runs on. Raises UserError where it has another model or other methods."""
        first = self._manifest = self._manifest or manifest
        for name in ("model", "methods"):
            if _without_place(manifest[name]) != _without_place(first[name]):
                raise UserError(f"workers differ in their {name}: is the same version installed on all machines?")
        self.workers.append({"machine": self._ray.get(worker.machine.remote()), "environment": manifest["environment"]})


def _without_place(entry: Any) -> Any:
    """Return a part of a manifest without what may be otherwise from machine to machine."""
    if isinstance(entry, list):
        return entry
    return {name: value for name, value in entry.items() if name not in ("device", "computed", "origin")}
