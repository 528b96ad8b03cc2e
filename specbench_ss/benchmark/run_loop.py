"""How a run goes on to its last sample, wherever samples are made: status, repeats, resumption."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from specbench_ss.benchmark.events import Events
from specbench_ss.benchmark.narrowing import reached, why_stop
from specbench_ss.benchmark.quiet_timing import frozen_heap
from specbench_ss.benchmark.schedule import Sample, plan, tasks_in_turn
from specbench_ss.errors import UserError
from specbench_ss.runs.config import Goal, RunConfig
from specbench_ss.runs.environment import changed_since, environment
from specbench_ss.runs.ledger import Ledger
from specbench_ss.runs.now import now
from specbench_ss.runs.suite import SuiteData


class RunLoop(ABC):
    """Makes what is missing of a run. labels: of its methods, in the order that the schedule shuffles."""

    def __init__(
        self,
        config: RunConfig,
        data: SuiteData,
        labels: Sequence[str],
        run_dir: Ledger,
        events: Events,
        goal: Goal | None = None,
    ) -> None:
        self.config, self.data, self.labels = config, data, list(labels)
        self.run_dir, self.events, self.goal = run_dir, events, goal
        self.dropped: dict[str, str] = {}  # method -> why none of its samples is made
        self._told: set[str] = set()  # what is told once

    @property
    @abstractmethod
    def baseline(self) -> str:
        """The label of the run's reference."""

    @abstractmethod
    def make_missing(self, samples: Sequence[Sample]) -> None:
        """Make what is missing of these samples and judge it."""

    def warm_up(self) -> None:
        """Let every method answer unmeasured."""
        return

    def notes(self) -> None:
        """Warn of what is known before anything is made."""
        return

    def afterwards(self, samples: Sequence[Sample]) -> None:
        """Make what follows the samples."""
        return

    def carry_out(self) -> None:
        """Make every sample that is not yet committed. Whatever stops it leaves the directory resumable."""
        try:
            self.run_dir.update(status="running")
            self._run()
        except BaseException as e:
            interrupted = isinstance(e, KeyboardInterrupt)
            with contextlib.suppress(UserError):  # a full disk: the first error is the one to tell
                self.run_dir.update(status="interrupted" if interrupted else "failed", finished=now())
            raise
        self.run_dir.update(status="complete", finished=now())

    def _run(self) -> None:
        samples = self._planned()
        todo = [s for s in samples if s.key not in self.run_dir.rows]
        self._note_resumption(len(samples), len(todo))
        if todo and (note := self.busy()):
            self.warn_and_keep(note)
        self.notes()
        planned = len(samples)
        self.events.on_start(len(todo))
        with frozen_heap():
            if (todo or self.goal) and self.config.warmup:
                self.warm_up()
            self.make_missing(samples)
            for more in self._more_repeats():
                samples += more
                self.events.on_start(len(todo) + len(samples) - planned)
                self.make_missing(more)
            self.afterwards(samples)

    def busy(self) -> str:
        """Say what else works on this machine, where that matters; '' where nothing does."""
        return ""

    def _planned(self) -> list[Sample]:
        """Every sample of the run as far as it was planned: the repeats that were asked for, then any added since."""
        asked, made = self.config.repeats, self.run_dir.manifest.get("repeats_made") or 0
        rounds = [self._repeats(0, asked), *(self._repeats(n, n + 1) for n in range(asked, made))]
        return [sample for samples in rounds for sample in samples]

    def _repeats(self, first: int, end: int) -> list[Sample]:
        questions = tasks_in_turn(self.data.questions) if self.config.order == "tasks" else self.data.questions
        return list(plan(questions, self.labels, end, self.config.seed, first))

    def _more_repeats(self) -> Iterator[list[Sample]]:
        """Yield one repeat more, as long as the goal takes it; then write down why no more follow."""
        if self.goal is None:
            return

        answering = {row.method for row in self.run_dir.rows.values() if row.ok}
        labels = [self.baseline, *(x for x in self.labels if x != self.baseline and x in answering)]
        made = self.run_dir.manifest.get("repeats_made") or self.config.repeats
        while not (why := why_stop(list(self.run_dir.rows.values()), labels, made, self.goal)):
            made += 1
            self.run_dir.update(repeats_made=made)
            yield self._repeats(made - 1, made)
        self.run_dir.update(until_ci=reached(list(self.run_dir.rows.values()), labels, made, self.goal, why))

    def warn_and_keep(self, text: str) -> None:
        """Tell what whoever reads the results should know too."""
        self.events.on_warning(text)
        self.run_dir.keep_warning(text)

    def changes(self) -> list[str]:
        """Return what is otherwise than in earlier sessions, in words."""
        return list(changed_since(self.run_dir.manifest, environment()))

    def _note_resumption(self, total: int, todo: int) -> None:
        if not self.run_dir.rows:
            return
        self.events.on_warning(f"resuming: {total - todo} of {total} samples are already there")
        if not todo and self.goal is None:  # second passes at most, which are not timed
            *before, last = self.run_dir.manifest["sessions"]
            self.run_dir.update(sessions=[*before, {**last, "measures": False}])
            return
        if changed := self.changes():
            what = ", ".join(changed)
            self.warn_and_keep(f"earlier sessions of this run had other conditions: {what}; times do not compare")
