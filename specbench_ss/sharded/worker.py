"""One worker: a model with its methods, kept loaded, that makes shard after shard. Knows nothing of what runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specbench_ss import registry
from specbench_ss.benchmark.events import Events
from specbench_ss.benchmark.measure import Loaded, load
from specbench_ss.benchmark.preflight import Plan
from specbench_ss.benchmark.preset_conditions import preset_notes
from specbench_ss.benchmark.quiet_timing import frozen_heap
from specbench_ss.benchmark.runner import LocalSession
from specbench_ss.errors import UserError
from specbench_ss.plugin_file import load_plugin
from specbench_ss.runs.collected import Collected, Parcel
from specbench_ss.runs.config import RunConfig, RunTarget
from specbench_ss.sharded.shard import Job, Shard
from specbench_ss.time_limit import check_thread


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
