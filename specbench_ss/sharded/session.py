"""A run whose samples workers make: what is missing goes out by question, and is committed as it comes back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any, Protocol

from specbench_ss.benchmark.events import Events
from specbench_ss.benchmark.run_loop import RunLoop
from specbench_ss.benchmark.schedule import Sample
from specbench_ss.method_spec import REFERENCE
from specbench_ss.runs.collected import Parcel
from specbench_ss.runs.config import RunConfig, RunTarget
from specbench_ss.runs.environment import changed_since
from specbench_ss.runs.run_directory import RunDir
from specbench_ss.runs.suite import SuiteData
from specbench_ss.sharded.shard import Shard, shards


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
