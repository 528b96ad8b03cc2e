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
from specbench_ss.runs.manifest_reading import engine_of
from specbench_ss.sharded.shard import Job, Shard
from specbench_ss.sharded.worker import Worker

LOSSES = 3  # workers in a row that one question, or starting, may cost
STARTING_S = 3600.0  # longest wait for the first worker, which may have to read a large model
STARTING = "starting"
ADDRESS = "RAY_ADDRESS"  # the environment variable in which Ray looks for a cluster


@contextlib.contextmanager
def ray_pool(job: Job, wanted: Workers) -> Iterator[RayPool]:
    """Give a pool whose workers run as long as the block lasts. Raises UserError where the cluster cannot have them."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would send statistics to its makers
    import ray

    mine = not ray.is_initialized()
    if mine:
        _connect(ray, wanted.address)
    pool = None
    try:
        _check_device(ray, job.device, job.config.device)
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


def _share(ray: Any, wanted: Workers, on_gpu: bool) -> tuple[int, int, int]:
    """Return how many workers there will be, and the processors and GPUs of each. Raises UserError for too many.

    A worker is on one machine: of the shares that leave room for all, the largest is taken.
    """
    machines = [_resources(node) for node in ray.nodes() if node["Alive"]]
    gpus = sum(gpu for _, gpu in machines)
    count = wanted.count or (gpus if on_gpu else 0) or max(1, len(machines))
    for cpus in range(max((cpu for cpu, _ in machines), default=0), 0, -1):
        if sum(min(cpu // cpus, gpu) if on_gpu else cpu // cpus for cpu, gpu in machines) >= count:
            return count, cpus, int(on_gpu)
    what = "a GPU and a processor" if on_gpu else "a processor"
    have = f"{sum(cpu for cpu, _ in machines)} processors and {gpus} GPUs on {len(machines)} machines"
    raise UserError(f"--workers {count}: each worker needs {what} of its own, and the Ray cluster has {have}")


def _resources(node: Any) -> tuple[int, int]:
    """Return the processors and GPUs of a machine."""
    return int(node["Resources"].get("CPU", 0)), int(node["Resources"].get("GPU", 0))


def _check_device(ray: Any, device: str, asked: str) -> None:
    """Raise UserError where workers would not compute on what the checks of this process were made for."""
    index = asked.partition(":")[2]
    if index:
        raise UserError(f"--device {asked}: a worker sees the one GPU that it is given: with --executor ray say cuda")
    if asked == "auto" and device == "cpu" and ray.cluster_resources().get("GPU", 0):
        raise UserError(
            "the Ray cluster has GPUs, and this machine has none to check the run with: start it on a machine of the "
            "cluster that has one, or say --device cpu"
        )


class RayWorker(Worker):
    """A worker that can say which machine of the cluster it is on."""

    def begin(self) -> tuple[str, dict[str, Any]]:
        """Start; return Ray's name of the machine, which says nothing of it, and the manifest."""
        return self.machine(), self.start()

    def machine(self) -> str:
        """Return Ray's name of the machine."""
        import ray

        return str(ray.get_runtime_context().get_node_id())


class RayPool:
    """Workers of one run, in the order in which they were started, and those lost, as of `Pool`."""

    def __init__(self, ray: Any, job: Job, count: int, cpus: int, gpus: int) -> None:
        self._ray, self._job = ray, ray.put(job)
        self._kind = ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=0)(RayWorker)
        self._asked: dict[Any, tuple[Any, Shard | None]] = {}  # reference -> worker, what it makes; None = it starts
        self._idle: list[Any] = []
        self._lost = Counter[str]()
        self._manifest: dict[str, Any] | None = None
        self.workers: list[dict[str, Any]] = []
        self.lost: list[str] = []
        for _ in range(count):
            self._add()

    def start(self) -> dict[str, Any]:
        """Return the manifest of the run as the first worker has it that is ready. Raises UserError as it does."""
        while self._manifest is None:
            self._hear(STARTING_S)
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
        self._asked[worker.begin.remote()] = worker, None

    def _ask(self, worker: Any, shard: Shard) -> None:
        self._asked[worker.make.remote(shard)] = worker, shard

    def _hear(self, longest: float | None = None) -> tuple[Shard | None, Parcel | None]:
        """Wait for one worker; return its shard and what it made of it, or the shard alone where both were lost.

        longest: seconds to wait for a first sign of any; None waits on.
        """
        ready, _ = self._ray.wait(list(self._asked), num_returns=1, timeout=longest)
        if not ready:
            raise UserError(f"no worker of the Ray cluster began within {longest:g} s: is it busy with something else?")
        worker, shard = self._asked.pop(ready[0])
        try:
            answer = self._ray.get(ready[0])
        except self._ray.exceptions.RayError as error:
            self._replace(worker, shard, error)
            return shard, None
        self._idle.append(worker)
        if shard is not None:
            return shard, answer
        self._welcome(*answer)
        return None, None

    def _replace(self, worker: Any, shard: Shard | None, error: Exception) -> None:
        """Put another worker in the place of one that was lost. Raises UserError where that does not help."""
        cause = getattr(error, "cause", None)
        if self._manifest is None and isinstance(cause, UserError):  # a mistake, which no other worker mends
            raise UserError(str(cause)) from None
        place = STARTING if shard is None else f"question {shard.question_id}"
        self._lost[place] += 1
        self.lost.append(place)
        if self._lost[place] >= LOSSES:
            told = first_line(cause or error)
            raise UserError(
                f"{LOSSES} workers were lost at {place} (the last one: {told}): what is committed is whole, and "
                "--resume goes on"
            )
        self._ray.kill(worker)
        self._add()

    def _welcome(self, machine: str, manifest: dict[str, Any]) -> None:
        """Note what a new worker runs on. Raises UserError where it has another model or other methods."""
        first = self._manifest = self._manifest or manifest
        _check_engines(engine_of(first), engine_of(manifest))
        for name in ("model", "methods"):
            if _without_place(manifest[name]) != _without_place(first[name]):
                raise UserError(f"workers differ in their {name}: is the same version installed on all machines?")
        self._lost[STARTING] = 0
        self.workers.append({"machine": machine, "environment": manifest["environment"]})


def _check_engines(first: str, other: str) -> None:
    """Raise UserError where workers make steps in two ways, as where one of the machines cannot replay them."""
    if first != other:
        raise UserError(f"workers differ in their engine, {first} and {other}: give --engine eager, which all have")


def _without_place(entry: Any) -> Any:
    """Return a part of a manifest without what may be otherwise from machine to machine."""
    if isinstance(entry, list):
        return entry
    return {name: value for name, value in entry.items() if name not in ("device", "computed", "origin")}
