"""Runs by workers on a Ray cluster, one shard of questions at a time."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specbench_ss.bench import run_loop
from specbench_ss.bench.draft_recording import PostRunPasses, samples_to_record
from specbench_ss.bench.preflight import Plan, preset_notes
from specbench_ss.bench.run_loop import RunCallbacks, RunLoop, Watch, unwatched
from specbench_ss.bench.runner import Loaded, LocalSession, finished, load
from specbench_ss.bench.schedule import Sample
from specbench_ss.bench.timed_sample import frozen_heap
from specbench_ss.engine.decoder import Step
from specbench_ss.errors import UserError, first_line
from specbench_ss.options import REFERENCE
from specbench_ss.registry import load_plugin
from specbench_ss.results.analysis import Results
from specbench_ss.runs.config import OutputOptions, RunConfig, Workers
from specbench_ss.runs.environment import changed_since
from specbench_ss.runs.manifest import engine_of
from specbench_ss.runs.records import Key, OutputMatch, SampleRecord
from specbench_ss.runs.run_dir import RunDir, RunStore, read_drafts
from specbench_ss.suite import SuiteData
from specbench_ss.time_limit import check_thread


@dataclass(slots=True)
class ShardResult:
    """Results of a worker since its last parcel: samples with their steps, verdicts, lines of optional files, warnings.

    told: warnings, and what else whoever watches the run should hear. question_id: what was made. machine, manifest: of
    a worker that has just started, Ray's name of its machine, and the manifest of a run that begins there.
    """

    samples: list[tuple[SampleRecord, list[Step]]] = field(default_factory=list)
    verdicts: list[OutputMatch] = field(default_factory=list)
    beside: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    question_id: str = ""
    machine: str = ""
    manifest: dict[str, Any] = field(default_factory=dict)

    def commit(self, ledger: RunStore) -> list[str]:
        """Hand everything over, a sample behind its side lines and before what is said of it, as one process does.

        So a kill in between leaves no sample without them. Returns why lines could not be written.
        """
        problems = [ledger.append_beside(name, line) for name, line in self.beside]
        for row, steps in self.samples:
            ledger.append(row, steps)
        for verdict in self.verdicts:
            ledger.append_output_match(verdict)
        for text in self.warnings:
            ledger.keep_warning(text)
        return list(dict.fromkeys(problem for problem in problems if problem))


class MemoryStore(RunCallbacks):
    """A `RunStore` in memory, and the session's `RunCallbacks`, since warnings travel with what was made.

    path, manifest: of the run directory that it is for, which it does not touch.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path, self.manifest = path, manifest
        self.rows: dict[Key, SampleRecord] = {}
        self.compared_keys: set[Key] = set()
        self.parcel = ShardResult()

    def append(self, row: SampleRecord, steps: Sequence[Step]) -> None:
        """Keep a sample."""
        self.parcel.samples.append((row, list(steps)))
        self.rows[row.key] = row

    def append_output_match(self, verdict: OutputMatch) -> None:
        """Keep a verdict."""
        self.parcel.verdicts.append(verdict)
        self.compared_keys.add(verdict.key)

    def append_beside(self, name: str, line: dict[str, Any]) -> str:
        """Keep a line of an optional file, which cannot fail."""
        self.parcel.beside.append((name, line))
        return ""

    def update(self, **changes: Any) -> None:
        """Change this copy of the manifest alone."""
        self.manifest |= changes

    def keep_warning(self, text: str) -> None:
        """Keep a warning."""
        self.parcel.warnings.append(text)

    def on_warning(self, text: str) -> None:
        """Keep what whoever watches the run should hear."""
        self.parcel.told.append(text)

    def handed_over(self) -> ShardResult:
        """Return what was kept since this was last asked for."""
        parcel, self.parcel = self.parcel, ShardResult()
        return parcel


@dataclass(frozen=True, slots=True)
class Job:
    """Inputs of every worker of a run. They travel to other machines: paths in it have to be good there as well.

    where: with the run directory, for messages; workers do not write to it. command: for the manifest.
    """

    plan: Plan
    where: OutputOptions
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """One question. One worker makes all that is missing of it, so that methods are compared on one device.

    samples: in their order, those that are there too. rows, compared_keys: what is there. drafts: whose drafts are
    missing.
    """

    question_id: str
    samples: tuple[Sample, ...]
    rows: tuple[SampleRecord, ...]
    compared_keys: frozenset[Key]
    drafts: tuple[Sample, ...]


def shards(samples: Sequence[Sample], ledger: RunStore, baseline: str, drafts: str, seed: int) -> Iterator[Shard]:
    """Yield the questions of which something is missing, in order. drafts, seed: as of `samples_to_record`."""
    wanted = {sample.key for sample in samples_to_record(samples, drafts, seed)}
    wanted -= {one.key for one in read_drafts(ledger.path)} if wanted else set()
    of_question, there = defaultdict[str, list[Sample]](list), defaultdict[str, list[SampleRecord]](list)
    for sample in samples:  # of all rounds: later repeats are held against the first
        of_question[sample.question.id].append(sample)
    for row in ledger.rows.values():
        there[row.question_id].append(row)
    for question_id, own in of_question.items():
        unrecorded = tuple(sample for sample in own if sample.key in wanted)
        if unrecorded or not all(_complete(sample, ledger, baseline) for sample in own):
            rows = tuple(there[question_id])
            compared_keys = frozenset(row.key for row in rows if row.key in ledger.compared_keys)
            yield Shard(question_id, tuple(own), rows, compared_keys, unrecorded)


def _complete(sample: Sample, ledger: RunStore, baseline: str) -> bool:
    """Say whether a sample is there with its verdict; the reference's first answer has none where it is greedy."""
    greedy = not ledger.manifest["config"]["temperature"]
    first = greedy and sample.method == baseline and sample.repeat == 0
    return sample.key in ledger.rows and (first or sample.key in ledger.compared_keys)


class Worker:
    """Makes what it is asked for, in a process of Ray, which starts another one where it is lost."""

    def __init__(self) -> None:
        self._loaded: Loaded | None = None

    def start(self, job: Job) -> ShardResult:
        """Load and warm up. Raises UserError as the loaders do."""
        plan, where = job.plan, job.where
        for file in plan.config.plugin:
            if load_plugin(Path(file.file)).sha256 != file.sha256:
                raise UserError(f"plugin {file.file} is another file where a worker reads it")
        if where.timeout is not None:
            check_thread()
        loaded = self._loaded = load(plan)
        manifest = loaded.manifest(plan, job.command)
        ledger = self._ledger = MemoryStore(where.out, manifest)
        session = self._session = LocalSession(
            plan.config, loaded.target, plan.suite, plan.data, loaded.decoders, ledger, ledger, where
        )
        for note in preset_notes(plan.config, loaded.target, plan.data, loaded.decoders):
            ledger.keep_warning(note)
        session.notes()
        if note := session.busy():
            session.warn_and_keep(note)
        if plan.config.warmup:
            session.warm_up()
        ledger.parcel.machine, ledger.parcel.manifest = self.machine(), manifest
        return ledger.handed_over()

    def machine(self) -> str:
        """Return Ray's name of the machine, which says nothing of it."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def make(self, shard: Shard, job: Job) -> ShardResult:
        """Make what is missing of a question."""
        if self._loaded is None:  # in the place of a process that was lost
            begun = self.start(job)
            lost = f"a worker was lost at question {shard.question_id}, which another one does anew"
            self._ledger.parcel = replace(begun, warnings=[*begun.warnings, lost], told=[*begun.told, lost])
        self._ledger.rows = {row.key: row for row in shard.rows}
        self._ledger.compared_keys = set(shard.compared_keys)
        self._ledger.parcel.question_id = shard.question_id
        try:
            with frozen_heap():
                self._session.run_pending(shard.samples)
                PostRunPasses(self._session).record_drafts(shard.drafts)
        except UserError as error:  # the device no longer works: Ray starts another process
            print(f"ssbench: {error}", file=sys.stderr)
            os._exit(1)
        return self._ledger.handed_over()

    def finish(self) -> str:
        """Stop reading the machine; return by how much the model's logits have changed since it was loaded, or ''."""
        if self._loaded is None:
            return ""
        self._session.machine.close()
        return self._loaded.changed()


LOSSES = 3  # processes that one question, or starting, may cost
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
        _check_device(ray, job.plan.device, job.plan.config.device)
        pool = RayPool(ray, job, *_share(ray, wanted, on_gpu=job.plan.device.startswith("cuda")))
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
        more = {"include_dashboard": False} if address == "local" else {}
        ray.init(address=address, log_to_driver=False, logging_level="error", **more)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        raise UserError(f"no Ray cluster at {address}: {first_line(error)}") from error


def _share(ray: Any, wanted: Workers, on_gpu: bool) -> tuple[int, int, int]:
    """Return how many workers there will be, and the processors and GPUs of each. Raises UserError for too many.

    A worker is on one machine: of the shares that leave room for all, the largest is taken.
    """
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    machines = [(int(has.get("CPU", 0)), int(has.get("GPU", 0))) for has in alive]
    gpus = sum(gpu for _, gpu in machines)
    count = wanted.count or (gpus if on_gpu else 0) or max(1, len(machines))
    for cpus in range(max((cpu for cpu, _ in machines), default=0), 0, -1):
        if sum(min(cpu // cpus, gpu) if on_gpu else cpu // cpus for cpu, gpu in machines) >= count:
            return count, cpus, int(on_gpu)
    what = "a GPU and a processor" if on_gpu else "a processor"
    have = f"{sum(cpu for cpu, _ in machines)} processors and {gpus} GPUs on {len(machines)} machines"
    raise UserError(f"--workers {count}: each worker needs {what} of its own, and the Ray cluster has {have}")


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


class RayPool:
    """Workers of one run. Ray asks another process again where one is lost, `LOSSES` times in all."""

    def __init__(self, ray: Any, job: Job, count: int, cpus: int, gpus: int) -> None:
        self._ray = ray
        kind = ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=-1, max_task_retries=LOSSES - 1)(Worker)
        self._job = ray.put(job)
        self._workers = [kind.remote() for _ in range(count)]
        self._asked = {worker.start.remote(self._job): (worker, STARTING) for worker in self._workers}
        self._idle: list[Any] = []

    def start(self) -> ShardResult:
        """Return what the first worker says that is ready. Raises UserError as it does."""
        return self._hear(STARTING_S)

    def make(self, wanted: Sequence[Shard]) -> Iterator[ShardResult]:
        """Have these shards made, each by one worker, and yield what was made in the order in which it arrives.

        Yields what workers say that have started meanwhile, too. Raises UserError where workers are lost too often.
        """
        todo, missing = deque(wanted), len(wanted)
        while missing:
            while self._idle and todo:
                worker, shard = self._idle.pop(), todo.popleft()
                self._asked[worker.make.remote(shard, self._job)] = worker, f"question {shard.question_id}"
            parcel = self._hear()
            missing -= bool(parcel.question_id)
            yield parcel

    def finish(self) -> list[str]:
        """Let the workers end; return by how much the model's logits have changed in each of them, without ''."""
        changes = []
        for worker in self._idle:
            with contextlib.suppress(self._ray.exceptions.RayError):  # lost after its last question
                changes.append(self._ray.get(worker.finish.remote()))
        return [text for text in changes if text]

    def end(self) -> None:
        """End every worker, whatever it does."""
        for worker in self._workers:
            self._ray.kill(worker)

    def _hear(self, longest: float | None = None) -> ShardResult:
        """Wait for one worker. longest: seconds to wait for a first sign of any; None waits on."""
        ready, _ = self._ray.wait(list(self._asked), num_returns=1, timeout=longest)
        if not ready:
            raise UserError(f"no worker of the Ray cluster began within {longest:g} s: is it busy with something else?")
        worker, place = self._asked.pop(ready[0])
        try:
            parcel: ShardResult = self._ray.get(ready[0])
        except self._ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            mistake = isinstance(cause, UserError)  # which no other worker mends
            if mistake and place == STARTING:
                raise UserError(str(cause)) from None
            lost = f"no worker can go on at {place}" if mistake else f"{LOSSES} workers were lost at {place}"
            why = first_line(cause or error)
            raise UserError(
                f"{lost} (the last one: {why}): what is committed is whole, and --resume goes on"
            ) from error
        self._idle.append(worker)
        return parcel


class ShardedRun(RunLoop):
    """Hands questions out to the workers of a pool. begun: what the first of them said."""

    def __init__(
        self,
        config: RunConfig,
        data: SuiteData,
        begun: ShardResult,
        run_dir: RunDir,
        events: RunCallbacks,
        where: OutputOptions,
        pool: RayPool,
    ) -> None:
        labels = [method["label"] for method in begun.manifest["methods"]]
        super().__init__(config, data, labels, run_dir, events, where.goal)
        self.pool, self.begun, self.recording = pool, begun, where.recording
        self._workers: list[dict[str, Any]] = []
        self._before = deepcopy(run_dir.manifest) if run_dir.rows else None  # as earlier sessions left it

    @property
    def baseline(self) -> str:
        return REFERENCE

    def changes(self) -> list[str]:
        """Nothing yet: the machines of the workers are what counts, and `_welcome` compares them."""
        return []

    def notes(self) -> None:
        self._take(self.begun)

    def run_pending(self, samples: Sequence[Sample]) -> None:
        wanted = list(shards(samples, self.run_dir, self.baseline, self.recording.record_drafts, self.config.seed))
        for parcel in self.pool.make(wanted):
            self._take(parcel)

    def finalize(self, samples: Sequence[Sample]) -> None:
        if changed := self.pool.finish():
            self.run_dir.update(target_changed=changed[0])
        if len(self._workers) > 1:
            machines = len({worker["machine"] for worker in self._workers})
            self.warn_and_keep(
                f"{len(self._workers)} workers on {'one machine' if machines == 1 else f'{machines} machines'} made "
                "the samples, several at a time, all of a question on one of them: methods compare; seconds of "
                "different questions may be of different conditions"
            )

    def _take(self, parcel: ShardResult) -> None:
        if parcel.manifest:
            self._welcome(parcel)
        for text in dict.fromkeys(parcel.told):
            if text not in self._warned:
                self.events.on_warning(text)
            self._warned.add(text)
        for problem in parcel.commit(self.run_dir):
            self.warn_and_keep(f"a side file is incomplete: {problem}")
        for row, _ in parcel.samples:
            self.events.on_sample(row)

    def _welcome(self, parcel: ShardResult) -> None:
        """Write down what a new worker runs on. Raises UserError where it has another model or other methods."""
        first, manifest = self.begun.manifest, parcel.manifest
        one, other = engine_of(first), engine_of(manifest)
        if one != other:  # as where one of the machines cannot replay steps
            raise UserError(f"workers differ in their engine, {one} and {other}: give --engine eager, which all have")
        for name in ("model", "methods"):
            if _without_place(manifest[name]) != _without_place(first[name]):
                raise UserError(f"workers differ in their {name}: is the same version installed on all machines?")
        self._workers.append({"machine": parcel.machine, "environment": manifest["environment"]})
        *before, session = self.run_dir.manifest["sessions"]
        self.run_dir.update(sessions=[*before, {**session, "workers": list(self._workers)}])
        if self._before and session.get("measures", True):
            changed = changed_since(self._before, manifest["environment"])
            if changed:
                what = ", ".join(changed)
                self.warn_and_keep(f"earlier sessions of this run had other conditions: {what}; times do not compare")


def _without_place(entry: Any) -> Any:
    """Return a part of a manifest without what may be otherwise from machine to machine."""
    if isinstance(entry, list):
        return entry
    return {name: value for name, value in entry.items() if name not in ("device", "computed", "origin")}


@dataclass(frozen=True, kw_only=True)
class PreparedRun(run_loop.PreparedRun):
    """A run about to start. model: what its manifest says of the model."""

    labels: tuple[str, ...]
    model: dict[str, Any]


def measure(plan: Plan, where: OutputOptions, command: Sequence[str], watch: Watch = unwatched) -> Results:
    """Make the run that was checked, or go on with it, by where.workers. command: as of `runner.measure`.

    Raises UserError as loading does, and where workers are lost again and again.
    """
    assert where.workers is not None
    config, data = plan.config, plan.data
    with ExitStack() as stack:
        out = replace(where, out=where.out.absolute(), goal=None, workers=None)
        job = Job(replace(plan, options={}, loaded=None), out, tuple(command))
        pool = stack.enter_context(ray_pool(job, where.workers))
        begun = pool.start()
        labels = tuple(method["label"] for method in begun.manifest["methods"])
        run_dir = stack.enter_context(RunDir.open(where, begun.manifest, data.questions))
        events = stack.enter_context(
            watch(PreparedRun(plan=plan, run_dir=run_dir, labels=labels, model=begun.manifest["model"]))
        )
        run_dir.update(recording=where.recording.as_dict())
        ShardedRun(config, data, begun, run_dir, events, where, pool).run()
        return finished(run_dir, events)
