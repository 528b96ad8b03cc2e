"""Runs by workers on a Ray cluster, one shard of questions at a time."""

from __future__ import annotations

import contextlib
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from specbench_ss import registry
from specbench_ss.bench.draft_recording import samples_to_record
from specbench_ss.bench.preflight import Plan, preset_notes
from specbench_ss.bench.run_loop import Events, RunLoop, Silent
from specbench_ss.bench.runner import Loaded, LocalSession, finished, load
from specbench_ss.bench.schedule import Sample
from specbench_ss.bench.timed_sample import frozen_heap
from specbench_ss.engine.decoder import Step
from specbench_ss.errors import UserError, first_line
from specbench_ss.options import REFERENCE
from specbench_ss.registry import load_plugin
from specbench_ss.results.analysis import Results
from specbench_ss.runs.config import Recording, RunConfig, RunTarget, Workers
from specbench_ss.runs.environment import changed_since
from specbench_ss.runs.manifest import engine_of
from specbench_ss.runs.records import Key, Row, Sameness
from specbench_ss.runs.run_dir import Ledger, RunDir, read_drafts
from specbench_ss.suite import SuiteData
from specbench_ss.time_limit import check_thread


@dataclass(slots=True)
class Parcel:
    """What was made since the last one: samples with their steps, verdicts, lines of optional files, warnings to keep.

    told: warnings, and what else whoever watches the run should hear.
    """

    samples: list[tuple[Row, list[Step]]] = field(default_factory=list)
    verdicts: list[Sameness] = field(default_factory=list)
    beside: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def commit(self, ledger: Ledger) -> list[str]:
        """Hand everything over, a sample behind its side lines and before what is said of it, as one process does.

        So a kill in between leaves no sample without them. Returns why lines could not be written.
        """
        problems = [ledger.append_beside(name, line) for name, line in self.beside]
        for row, steps in self.samples:
            ledger.append(row, steps)
        for verdict in self.verdicts:
            ledger.append_sameness(verdict)
        for text in self.warnings:
            ledger.keep_warning(text)
        return list(dict.fromkeys(problem for problem in problems if problem))


class Collected:
    """A `Ledger` in memory. path, manifest: of the run directory that it is for, which it does not touch."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path, self.manifest = path, manifest
        self.rows: dict[Key, Row] = {}
        self.judged: set[Key] = set()
        self.parcel = Parcel()

    def know(self, rows: Iterable[Row], judged: Iterable[Key]) -> None:
        """Forget all samples but these, which the run directory has already."""
        self.rows, self.judged = {row.key: row for row in rows}, set(judged)

    def append(self, row: Row, steps: Sequence[Step]) -> None:
        """Keep a sample."""
        self.parcel.samples.append((row, list(steps)))
        self.rows[row.key] = row

    def append_sameness(self, verdict: Sameness) -> None:
        """Keep a verdict."""
        self.parcel.verdicts.append(verdict)
        self.judged.add(verdict.key)

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

    def handed_over(self) -> Parcel:
        """Return what was kept since this was last asked for."""
        parcel, self.parcel = self.parcel, Parcel()
        return parcel


P = TypeVar("P", Sample, Row)


@dataclass(frozen=True, slots=True)
class Job:
    """What every worker of a run needs. It travels to other machines: paths in it have to be good there as well.

    out: the run directory, for messages; workers do not write to it. command: for the manifest.
    """

    config: RunConfig
    data: SuiteData
    device: str
    dtype: str
    dtype_choice: str
    recording: Recording
    timeout: float | None
    out: Path
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """One question. One worker makes all that is missing of it, so that methods are compared on one device.

    samples: in their order, those that are there too. rows, judged: what is there. drafts: whose drafts are missing.
    """

    question_id: str
    samples: tuple[Sample, ...]
    rows: tuple[Row, ...]
    judged: frozenset[Key]
    drafts: tuple[Sample, ...]


def shards(samples: Sequence[Sample], ledger: Ledger, baseline: str, drafts: str, seed: int) -> Iterator[Shard]:
    """Yield the questions of which something is missing, in order. drafts, seed: as of `drafts.chosen`."""
    wanted = {sample.key for sample in samples_to_record(samples, drafts, seed)}
    wanted -= {one.key for one in read_drafts(ledger.path)} if wanted else set()
    there = _by_question(ledger.rows.values())
    for question_id, own in _by_question(samples).items():  # of all rounds: later repeats are held against the first
        unrecorded = tuple(sample for sample in own if sample.key in wanted)
        if all(_complete(sample, ledger, baseline) for sample in own) and not unrecorded:
            continue
        rows = tuple(there.get(question_id, ()))
        judged = frozenset(row.key for row in rows if row.key in ledger.judged)
        yield Shard(question_id, tuple(own), rows, judged, unrecorded)


def _complete(sample: Sample, ledger: Ledger, baseline: str) -> bool:
    """Say whether a sample is there with its verdict; the reference's first answer has none where it is greedy."""
    greedy = not ledger.manifest["config"]["temperature"]
    first = greedy and sample.method == baseline and sample.repeat == 0
    return sample.key in ledger.rows and (first or sample.key in ledger.judged)


def _by_question(parts: Iterable[P]) -> dict[str, list[P]]:
    """Group samples or rows by their question, in the order in which questions first appear."""
    found: dict[str, list[P]] = {}
    for part in parts:
        found.setdefault(part.key[0], []).append(part)
    return found


class Worker:
    """Makes what it is asked for. `start` comes first."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._loaded: Loaded | None = None
        self._ledger: Collected | None = None
        self._session: LocalSession | None = None

    def start(self) -> dict[str, Any]:
        """Load and warm up; return the manifest of a run that begins here. Raises UserError as the loaders do."""
        job = self.job
        _load_plugins(job.config)
        if job.timeout is not None:
            check_thread()
        suite = registry.load_suite(job.config.suite)
        plan = Plan(job.config, suite, job.data, {}, job.device, job.dtype, 0, dtype_choice=job.dtype_choice)
        loaded = self._loaded = load(plan)
        manifest = loaded.manifest(plan, job.command)
        ledger = self._ledger = Collected(job.out, manifest)
        where = RunTarget(job.out, recording=job.recording, timeout=job.timeout)
        session = LocalSession(
            job.config, loaded.target, suite, job.data, loaded.decoders, ledger, _Told(ledger), where
        )
        self._session = session
        for note in preset_notes(job.config, loaded.target, job.data, loaded.decoders):
            ledger.keep_warning(note)
        session.notes()
        if note := session.busy():
            session.warn_and_keep(note)
        if job.config.warmup:
            session.warm_up()
        return manifest

    def make(self, shard: Shard) -> Parcel:
        """Make what is missing of a question. Raises UserError where the device no longer works."""
        if self._session is None or self._ledger is None:
            raise RuntimeError("the worker was not started")
        self._ledger.know(shard.rows, shard.judged)
        with frozen_heap():
            self._session.make_missing(shard.samples)
            self._session.second_passes().record_drafts(shard.drafts)
        return self._ledger.handed_over()

    def finish(self) -> str:
        """Stop reading the machine; return by how much the model's logits have changed since it was loaded, or ''."""
        if self._session is None or self._loaded is None:
            return ""
        self._session.machine.close()
        return self._loaded.changed()


class _Told(Events):
    """The session's `Events`: warnings travel with what was made."""

    def __init__(self, ledger: Collected) -> None:
        self._ledger = ledger

    def on_warning(self, text: str) -> None:
        """Keep what whoever watches the run should hear."""
        self._ledger.parcel.told.append(text)


def _load_plugins(config: RunConfig) -> None:
    """Register the methods of the run's files. Raises UserError where a file is another one here."""
    for file in config.plugin:
        if load_plugin(Path(file.file)).sha256 != file.sha256:
            raise UserError(f"plugin {file.file} is another file where a worker reads it")


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
        one, other = engine_of(first), engine_of(manifest)
        if one != other:  # as where one of the machines cannot replay steps
            raise UserError(f"workers differ in their engine, {one} and {other}: give --engine eager, which all have")
        for name in ("model", "methods"):
            if _without_place(manifest[name]) != _without_place(first[name]):
                raise UserError(f"workers differ in their {name}: is the same version installed on all machines?")
        self._lost[STARTING] = 0
        self.workers.append({"machine": machine, "environment": manifest["environment"]})


def _without_place(entry: Any) -> Any:
    """Return a part of a manifest without what may be otherwise from machine to machine."""
    if isinstance(entry, list):
        return entry
    return {name: value for name, value in entry.items() if name not in ("device", "computed", "origin")}


class Pool(Protocol):
    """Workers, wherever they are."""

    workers: list[dict[str, Any]]  # what each one that was ever started runs on: its `environment`, and its `machine`
    lost: list[str]  # at what each one that was lost was: 'starting', 'question ID'

    def make(self, wanted: Sequence[Shard]) -> Iterator[Parcel]:
        """Have these shards made, each by one worker, and yield what was made in the order in which it arrives.

        A shard whose worker is lost is made again by another one. Raises UserError where that happens too often.
        """
        ...

    def finish(self) -> list[str]:
        """Let the workers end; return by how much the model's logits have changed in each of them, without ''."""
        ...


class ShardedRun(RunLoop):
    """Hands questions out to the workers of a pool. labels: of the methods, in the order that the schedule shuffles."""

    def __init__(
        self,
        config: RunConfig,
        data: SuiteData,
        labels: Sequence[str],
        run_dir: RunDir,
        events: Events,
        where: RunTarget,
        pool: Pool,
    ) -> None:
        super().__init__(config, data, labels, run_dir, events, where.goal)
        self.pool, self.recording = pool, where.recording
        self._seen: list[dict[str, Any]] = []
        self._losses = 0
        self._before = deepcopy(run_dir.manifest) if run_dir.rows else None  # as earlier sessions left it

    @property
    def baseline(self) -> str:
        return REFERENCE

    def changes(self) -> list[str]:
        """Nothing yet: the machines of the workers are what counts, and `_note_workers` compares them."""
        return []

    def make_missing(self, samples: Sequence[Sample]) -> None:
        wanted = list(shards(samples, self.run_dir, self.baseline, self.recording.record_drafts, self.config.seed))
        for parcel in self.pool.make(wanted):
            for text in dict.fromkeys(parcel.told):
                if text not in self._told:
                    self.events.on_warning(text)
                self._told.add(text)
            for problem in parcel.commit(self.run_dir):
                self.warn_and_keep(f"a side file is incomplete: {problem}")
            for row, _ in parcel.samples:
                self.events.on_sample(row)
            self._note_workers()
            self._note_losses()

    def afterwards(self, samples: Sequence[Sample]) -> None:
        if changed := self.pool.finish():
            self.run_dir.update(target_changed=changed[0])
        if len(self._seen) > 1:
            machines = len({worker["machine"] for worker in self._seen})
            self.warn_and_keep(
                f"{len(self._seen)} workers on {'one machine' if machines == 1 else f'{machines} machines'} made the "
                "samples, several at a time, all of a question on one of them: methods compare; seconds of different "
                "questions may be of different conditions"
            )

    def _note_losses(self) -> None:
        """Write down where workers were lost."""
        new = self.pool.lost[self._losses :]
        self._losses += len(new)
        for place in new:
            self.warn_and_keep(f"a worker was lost at {place}, which another one does anew")

    def _note_workers(self) -> None:
        """Write down what the workers of this session run on, once more whenever one was added."""
        new = self.pool.workers[len(self._seen) :]
        if not new:
            return
        self._seen = list(self.pool.workers)
        sessions = [dict(session) for session in self.run_dir.manifest["sessions"]]
        sessions[-1]["workers"] = self._seen
        self.run_dir.update(sessions=sessions)
        before = self._before
        if not before or not sessions[-1].get("measures", True):
            return
        changed = [what for worker in new for what in changed_since(before, worker["environment"])]
        if changed:
            what = ", ".join(dict.fromkeys(changed))
            self.warn_and_keep(f"earlier sessions of this run had other conditions: {what}; times do not compare")


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


def measure(plan: Plan, where: RunTarget, command: Sequence[str], watch: Watch = unwatched) -> Results:
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
        return finished(run_dir, events)


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
