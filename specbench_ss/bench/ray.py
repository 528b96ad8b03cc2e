"""Runs by workers on a Ray cluster, one shard of questions at a time."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from specbench_ss.bench import run_loop
from specbench_ss.bench.draft_recording import SecondPasses, samples_to_record
from specbench_ss.bench.preflight import Plan, preset_notes
from specbench_ss.bench.run_loop import RunCallbacks, RunLoop, Watch, unwatched
from specbench_ss.bench.runner import Loaded, LocalSession, load
from specbench_ss.bench.schedule import Sample
from specbench_ss.bench.timed_sample import frozen_heap
from specbench_ss.engine.decoder import Step
from specbench_ss.errors import RunStopped, UserError, first_line
from specbench_ss.options import REFERENCE
from specbench_ss.registry import load_plugin
from specbench_ss.runs.config import OutputOptions, RunConfig, Workers
from specbench_ss.runs.environment import changed_since
from specbench_ss.runs.manifest import engine_of
from specbench_ss.runs.records import Key, KeyedRecord, OutputMatch, SampleRecord
from specbench_ss.runs.run_dir import RunDir, RunStore, read_drafts
from specbench_ss.suite import SuiteData
from specbench_ss.time_limit import check_thread


@dataclass(slots=True)
class ShardResult:
    """Results of a worker since its last transfer."""

    samples: list[tuple[SampleRecord, list[Step]]] = field(default_factory=list)
    verdicts: list[OutputMatch] = field(default_factory=list)
    optional_lines: list[tuple[str, KeyedRecord]] = field(default_factory=list)  # of optional files
    warnings: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)  # warnings to show
    question_id: str = ""  # the finished question
    machine: str = ""  # of a worker that has just started: Ray's name of its machine
    manifest: dict[str, Any] = field(default_factory=dict)  # of a worker that has just started
    token_s: dict[str, float] = field(default_factory=dict)  # of a warm-up: method -> seconds per token

    def commit(self, store: RunStore) -> list[str]:
        """Store the results: optional lines, then samples, then verdicts, as in a local run.

        So a kill in between leaves no sample without its optional lines. Return the reasons of failed writes.
        """
        problems = [store.append_optional(name, line) for name, line in self.optional_lines]
        for row, steps in self.samples:
            store.append(row, steps)
        for verdict in self.verdicts:
            store.append_output_match(verdict)
        for text in self.warnings:
            store.keep_warning(text)
        return list(dict.fromkeys(problem for problem in problems if problem))


class MemoryStore(RunCallbacks):
    """A `RunStore` in memory, and the session's `RunCallbacks`, since warnings are sent with the results.

    path, manifest: of the run directory, which is not changed.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path, self.manifest = path, manifest
        self.rows: dict[Key, SampleRecord] = {}
        self.compared_keys: set[Key] = set()
        self.result = ShardResult()

    def append(self, row: SampleRecord, steps: Sequence[Step]) -> None:
        """Keep a sample."""
        self.result.samples.append((row, list(steps)))
        self.rows[row.key] = row

    def append_output_match(self, verdict: OutputMatch) -> None:
        """Keep a verdict."""
        self.result.verdicts.append(verdict)
        self.compared_keys.add(verdict.key)

    def append_optional(self, name: str, line: KeyedRecord) -> str:
        """Keep a line of an optional file; return no error."""
        self.result.optional_lines.append((name, line))
        return ""

    def update(self, **changes: Any) -> None:
        """Change this copy of the manifest."""
        self.manifest |= changes

    def keep_warning(self, text: str) -> None:
        """Keep a warning."""
        self.result.warnings.append(text)

    def on_warning(self, text: str) -> None:
        """Keep a message for the user."""
        self.result.messages.append(text)

    def take_result(self) -> ShardResult:
        """Return the results since the last call."""
        result, self.result = self.result, ShardResult()
        return result


@dataclass(frozen=True, slots=True)
class Job:
    """Inputs of every worker of a run; their paths must be valid on all machines.

    output: with the run directory, for messages; workers do not write to it. command: for the manifest.
    """

    plan: Plan
    output: OutputOptions
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """One question. One worker runs all its missing samples, so that methods are compared on one device."""

    question_id: str
    samples: tuple[Sample, ...]  # all, in order
    rows: tuple[SampleRecord, ...]  # existing records
    compared_keys: frozenset[Key]  # of existing verdicts
    drafts: tuple[Sample, ...]  # samples with missing draft records


def shards(samples: Sequence[Sample], store: RunStore, baseline: str, drafts: str, seed: int) -> Iterator[Shard]:
    """Yield the questions with missing results, in order. drafts, seed: as for `samples_to_record`."""
    missing_drafts = {sample.key for sample in samples_to_record(samples, drafts, seed)}
    missing_drafts -= {record.key for record in read_drafts(store.path)} if missing_drafts else set()
    of_question, existing = defaultdict[str, list[Sample]](list), defaultdict[str, list[SampleRecord]](list)
    for sample in samples:  # of all rounds: later repeats are compared with the first
        of_question[sample.question.id].append(sample)
    for row in store.rows.values():
        existing[row.question_id].append(row)
    for question_id, own in of_question.items():
        unrecorded = tuple(sample for sample in own if sample.key in missing_drafts)
        if unrecorded or not all(_complete(sample, store, baseline) for sample in own):
            rows = tuple(existing[question_id])
            compared_keys = frozenset(row.key for row in rows if row.key in store.compared_keys)
            yield Shard(question_id, tuple(own), rows, compared_keys, unrecorded)


def _complete(sample: Sample, store: RunStore, baseline: str) -> bool:
    """Return True if a sample exists with its verdict; the baseline's first greedy answer has none."""
    greedy = not store.manifest["config"]["temperature"]
    first = greedy and sample.method == baseline and sample.repeat == 0
    return sample.key in store.rows and (first or sample.key in store.compared_keys)


class Worker:
    """Worker in a Ray process, which Ray replaces if it is lost."""

    def __init__(self) -> None:
        self._loaded: Loaded | None = None

    def start(self, job: Job) -> ShardResult:
        """Load and warm up. Raise UserError as the loaders do."""
        plan, output = job.plan, job.output
        for file in plan.config.plugin:
            if load_plugin(Path(file.file)).sha256 != file.sha256:
                raise UserError(f"plugin {file.file} is a different file on a worker")
        if output.timeout is not None:
            check_thread()
        loaded = self._loaded = load(plan)
        manifest = loaded.manifest(plan, job.command)
        store = self._store = MemoryStore(output.out, manifest)
        session = self._session = LocalSession(
            plan.config, loaded.target, plan.suite, plan.data, loaded.decoders, store, store, output
        )
        for note in preset_notes(plan.config, loaded.target, plan.data, loaded.methods):
            store.keep_warning(note)
        session.notes()
        if note := session.busy():
            session.warn_and_keep(note)
        if plan.config.warmup:
            session.warm_up()
        store.result.machine, store.result.manifest = self.machine(), manifest
        store.result.token_s = session.token_s
        return store.take_result()

    def machine(self) -> str:
        """Return Ray's opaque id of the machine."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def make(self, shard: Shard, job: Job) -> ShardResult:
        """Run the missing samples of a question."""
        if self._loaded is None:  # a replacement of a lost process
            started = self.start(job)
            lost = f"a worker was lost at question {shard.question_id}, which is run again"
            self._store.result = replace(
                started, warnings=[*started.warnings, lost], messages=[*started.messages, lost]
            )
        self._store.rows = {row.key: row for row in shard.rows}
        self._store.compared_keys = set(shard.compared_keys)
        self._store.result.question_id = shard.question_id
        try:
            with frozen_heap():
                self._session.run_pending(shard.samples)
                SecondPasses(self._session).record_drafts(shard.drafts)
        except UserError as error:  # the device failed: Ray starts another process
            print(f"ssbench: {error}", file=sys.stderr)
            os._exit(1)
        return self._store.take_result()

    def finish(self) -> str:
        """Stop telemetry; return a description of changes of the model's logits since loading, or ''."""
        if self._loaded is None:
            return ""
        self._session.close()
        return self._loaded.changed()


LOSSES = 3  # maximum lost processes per question or start
STARTING_S = 3600.0  # maximum wait for the first worker, which may read a large model
STARTING = "starting"
ADDRESS = "RAY_ADDRESS"  # the environment variable in which Ray looks for a cluster


@contextlib.contextmanager
def ray_pool(job: Job, wanted: Workers) -> Iterator[RayPool]:
    """Run a pool of workers during the block. Raise UserError if the cluster has too few resources."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage statistics
    import ray

    owned = not ray.is_initialized()
    if owned:
        _connect(ray, wanted.address)
    pool = None
    try:
        _check_device(ray, job.plan.device, job.plan.config.device)
        pool = RayPool(ray, job, *_share(ray, wanted, on_gpu=job.plan.device.startswith("cuda")))
        yield pool
    finally:
        if pool is not None:
            pool.end()
        if owned:
            ray.shutdown()


def _connect(ray: Any, address: str | None) -> None:
    """Connect to the named cluster, or start one on this machine."""
    address = address or os.environ.get(ADDRESS) or "local"
    try:
        more = {"include_dashboard": False} if address == "local" else {}
        ray.init(address=address, log_to_driver=False, logging_level="error", **more)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        raise UserError(f"no Ray cluster at {address}: {first_line(error)}") from error


def _share(ray: Any, wanted: Workers, on_gpu: bool) -> tuple[int, int, int]:
    """Return the number of workers, and the CPUs and GPUs of each. Raise UserError for too many.

    A worker runs on one machine with the largest number of CPUs that leaves room for all workers.
    """
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    machines = [(int(has.get("CPU", 0)), int(has.get("GPU", 0))) for has in alive]
    gpus = sum(gpu for _, gpu in machines)
    count = wanted.count or (gpus if on_gpu else 0) or max(1, len(machines))
    for cpus in range(max((cpu for cpu, _ in machines), default=0), 0, -1):
        if sum(min(cpu // cpus, gpu) if on_gpu else cpu // cpus for cpu, gpu in machines) >= count:
            return count, cpus, int(on_gpu)
    required = "a GPU and a processor" if on_gpu else "a processor"
    available = f"{sum(cpu for cpu, _ in machines)} processors and {gpus} GPUs on {len(machines)} machines"
    raise UserError(f"--workers {count}: each worker requires {required}, but the Ray cluster has {available}")


def _check_device(ray: Any, device: str, requested: str) -> None:
    """Raise UserError if the workers' device would differ from the one checked in this process."""
    index = requested.partition(":")[2]
    if index:
        raise UserError(f"--device {requested}: a worker has one GPU; with --executor ray use --device cuda")
    if requested == "auto" and device == "cpu" and ray.cluster_resources().get("GPU", 0):
        raise UserError(
            "the Ray cluster has GPUs, this machine has none; start on a machine with a GPU, or use --device cpu"
        )


class RayPool:
    """Workers of one run. Ray retries a lost process, with `LOSSES` attempts in all."""

    def __init__(self, ray: Any, job: Job, count: int, cpus: int, gpus: int) -> None:
        self._ray, self.count = ray, count
        kind = ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=-1, max_task_retries=LOSSES - 1)(Worker)
        self._job = ray.put(job)
        self._workers = [kind.remote() for _ in range(count)]
        self._pending = {worker.start.remote(self._job): (worker, STARTING) for worker in self._workers}
        self._idle: list[Any] = []

    def start(self) -> ShardResult:
        """Return the result of the first worker that is ready. Raise its UserError."""
        return self._next_result(STARTING_S)

    def make(self, shards: Sequence[Shard]) -> Iterator[ShardResult]:
        """Run these shards, each on one worker, and yield results in order of arrival.

        Results of newly started workers are yielded too. Raise UserError if workers are lost too often.
        """
        todo, missing = deque(shards), len(shards)
        while missing:
            while self._idle and todo:
                worker, shard = self._idle.pop(), todo.popleft()
                self._pending[worker.make.remote(shard, self._job)] = worker, f"question {shard.question_id}"
            result = self._next_result()
            missing -= bool(result.question_id)
            yield result

    def finish(self) -> list[str]:
        """Finish the workers; return descriptions of changes of the model's logits."""
        changes = []
        for worker in self._idle:
            with contextlib.suppress(self._ray.exceptions.RayError):  # lost after its last question
                changes.append(self._ray.get(worker.finish.remote()))
        return [text for text in changes if text]

    def end(self) -> None:
        """Kill all workers."""
        for worker in self._workers:
            self._ray.kill(worker)

    def _next_result(self, longest: float | None = None) -> ShardResult:
        """Wait for one worker. longest: maximum seconds to wait; None = no limit."""
        ready, _ = self._ray.wait(list(self._pending), num_returns=1, timeout=longest)
        if not ready:
            raise UserError(
                f"no worker of the Ray cluster started within {longest:g} s; check whether the cluster is busy"
            )
        worker, stage = self._pending.pop(ready[0])
        try:
            result: ShardResult = self._ray.get(ready[0])
        except self._ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            user_error = isinstance(cause, UserError)  # would occur on any worker
            if user_error and stage == STARTING:
                raise UserError(str(cause)) from None
            lost = f"no worker can continue at {stage}" if user_error else f"{LOSSES} workers were lost at {stage}"
            reason = first_line(cause or error)
            raise RunStopped(
                f"{lost} (the last one: {reason}); stored results are intact, continue with --resume"
            ) from error
        self._idle.append(worker)
        return result


class ShardedRun(RunLoop):
    """Run loop over the workers of a pool. begun: result of the first worker's start."""

    def __init__(
        self,
        config: RunConfig,
        data: SuiteData,
        begun: ShardResult,
        run_dir: RunDir,
        events: RunCallbacks,
        output: OutputOptions,
        pool: RayPool,
    ) -> None:
        labels = [method["label"] for method in begun.manifest["methods"]]
        super().__init__(config, data, labels, run_dir, events, output.goal)
        self.pool, self.begun, self.recording = pool, begun, output.recording
        self._workers: list[dict[str, Any]] = []
        self._before = deepcopy(run_dir.manifest) if run_dir.rows else None  # of earlier sessions

    @property
    def baseline(self) -> str:
        return REFERENCE

    def changes(self) -> list[str]:
        """Return no changes: `_add_worker` compares the machines of the workers."""
        return []

    def notes(self) -> None:
        self._take(self.begun)

    def warm_up(self) -> None:
        """Take the times of the first worker, which has warmed up; the workers share the samples."""
        self.token_s = {label: seconds / self.pool.count for label, seconds in self.begun.token_s.items()}

    def run_pending(self, samples: Sequence[Sample]) -> None:
        missing = list(shards(samples, self.run_dir, self.baseline, self.recording.record_drafts, self.config.seed))
        for result in self.pool.make(missing):
            self._take(result)

    def finalize(self, samples: Sequence[Sample]) -> None:
        if changed := self.pool.finish():
            self.run_dir.update(target_changed=changed[0])
        if len(self._workers) > 1:
            machines = len({worker["machine"] for worker in self._workers})
            self.warn_and_keep(
                f"{len(self._workers)} workers on {'one machine' if machines == 1 else f'{machines} machines'} ran "
                "the samples, all of a question on one worker; methods are comparable, but seconds of different "
                "questions may be of different conditions"
            )

    def _take(self, result: ShardResult) -> None:
        if result.manifest:
            self._add_worker(result)
        for text in dict.fromkeys(result.messages):
            if text not in self._warned:
                self.events.on_warning(text)
            self._warned.add(text)
        for problem in result.commit(self.run_dir):
            self.warn_and_keep(f"an optional file is incomplete: {problem}")
        for row, _ in result.samples:
            self.events.on_sample(row)

    def _add_worker(self, result: ShardResult) -> None:
        """Record a new worker's environment. Raise UserError if its engine, model or methods differ."""
        first, manifest = self.begun.manifest, result.manifest
        engine, other = engine_of(first), engine_of(manifest)
        if engine != other:  # for instance a machine without CUDA graphs
            raise UserError(f"workers have different engines, {engine} and {other}; use --engine eager")
        for name in ("model", "methods"):
            if _without_place(manifest[name]) != _without_place(first[name]):
                raise UserError(f"workers differ in their {name}; install the same version on all machines")
        self._workers.append({"machine": result.machine, "environment": manifest["environment"]})
        *before, session = self.run_dir.manifest["sessions"]
        self.run_dir.update(sessions=[*before, {**session, "workers": list(self._workers)}])
        if self._before and session.get("measures", True):
            changed = changed_since(self._before, manifest["environment"])
            if changed:
                names = ", ".join(changed)
                self.warn_and_keep(f"earlier sessions of this run had other conditions: {names}; times do not compare")


def _without_place(entry: Any) -> Any:
    """Return a part of a manifest without machine-dependent fields."""
    if isinstance(entry, list):
        return entry
    return {name: value for name, value in entry.items() if name not in ("device", "computed", "origin")}


@dataclass(frozen=True, kw_only=True)
class PreparedRun(run_loop.PreparedRun):
    """A run about to start. model: the manifest's entry of the model."""

    model: dict[str, Any]


def measure(plan: Plan, output: OutputOptions, command: Sequence[str], watch: Watch = unwatched) -> Path:
    """Run or continue the checked run with output.workers, and return its directory. command: as for `runner.measure`.

    Raise UserError as loading does, and if workers are lost repeatedly.
    """
    assert output.workers is not None
    config, data = plan.config, plan.data
    with ExitStack() as stack:
        out = replace(output, out=output.out.absolute(), goal=None, workers=None)
        job = Job(replace(plan, options={}, loaded=None), out, tuple(command))
        pool = stack.enter_context(ray_pool(job, output.workers))
        begun = pool.start()
        run_dir = stack.enter_context(RunDir.open(output, begun.manifest, data.questions))
        events = stack.enter_context(watch(PreparedRun(plan=plan, run_dir=run_dir, model=begun.manifest["model"])))
        run_dir.update(recording=asdict(output.recording))
        ShardedRun(config, data, begun, run_dir, events, output, pool).run()
        return run_dir.path
