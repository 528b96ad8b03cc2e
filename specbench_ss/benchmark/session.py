"""One process's share of a run, whatever answers: which sample when, what is committed, what is compared.

A local run (`runner`) and a run of served engines (`served`) fill in how a sample is made and how answers compare.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import groupby

from specbench_ss.benchmark.events import Events
from specbench_ss.benchmark.quiet_timing import frozen_heap
from specbench_ss.benchmark.schedule import Sample, plan, sample_seed, tasks_in_turn
from specbench_ss.decoding.generation import Step
from specbench_ss.errors import UserError, error_text
from specbench_ss.runs.config import Goal, RunConfig
from specbench_ss.runs.environment import busy, changed_since, environment
from specbench_ss.runs.now import now
from specbench_ss.runs.rows import Row, Sameness
from specbench_ss.runs.run_directory import RunDir
from specbench_ss.runs.sameness import FAILED, not_compared
from specbench_ss.runs.suite import Suite, SuiteData


class Session(ABC):
    """Makes what is missing of a run. labels: of its methods, in the order that the schedule shuffles."""

    def __init__(
        self,
        config: RunConfig,
        suite: Suite,
        data: SuiteData,
        labels: Sequence[str],
        run_dir: RunDir,
        events: Events,
        goal: Goal | None = None,
    ) -> None:
        self.config, self.suite, self.data, self.labels = config, suite, data, list(labels)
        self.run_dir, self.events, self.goal = run_dir, events, goal

    @property
    @abstractmethod
    def baseline(self) -> str:
        """The label of the run's reference."""

    @abstractmethod
    def warm_up(self) -> None:
        """Let every method answer unmeasured."""

    @abstractmethod
    def made(self, blank: Row, sample: Sample) -> tuple[Row, list[Step]]:
        """Return the sample's row, filled, with its steps. What it raises makes the sample a failed one."""

    @abstractmethod
    def same_as(self, label: str) -> str:
        """Return the label of the method whose answers this one's are compared with."""

    @abstractmethod
    def verdict(self, sample: Sample, row: Row, reference: Row) -> Sameness:
        """Compare two good answers."""

    def after_failure(self, row: Row) -> None:
        """End the run where a failure says that nothing more can be made. The failed row is committed already."""
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
        if todo and (note := self._busy()):
            self.warn_and_keep(note)
        self.notes()
        planned = len(samples)
        self.events.on_start(len(todo))
        with frozen_heap():
            if (todo or self.goal) and self.config.warmup:
                self.warm_up()
            self._round(samples)
            for more in self._more_repeats():
                samples += more
                self.events.on_start(len(todo) + len(samples) - planned)
                self._round(more)
            self.afterwards(samples)

    def _busy(self) -> str:
        return busy()

    def _planned(self) -> list[Sample]:
        """Every sample of the run as far as it was planned: the repeats that were asked for, then any added since."""
        asked, made = self.config.repeats, self.run_dir.manifest.get("repeats_made") or 0
        rounds = [self._repeats(0, asked), *(self._repeats(n, n + 1) for n in range(asked, made))]
        return [sample for samples in rounds for sample in samples]

    def _repeats(self, first: int, end: int) -> list[Sample]:
        questions = tasks_in_turn(self.data.questions) if self.config.order == "tasks" else self.data.questions
        return list(plan(questions, self.labels, end, self.config.seed, first))

    def _round(self, samples: Sequence[Sample]) -> None:
        """Make what is missing of these samples and judge it, question by question."""
        for _, group in groupby(samples, key=lambda s: s.question.id):
            of_question = list(group)
            for sample in of_question:
                if sample.key not in self.run_dir.rows:
                    self._make(sample)
            for sample in of_question:
                self._judge(sample)

    def _more_repeats(self) -> Iterator[list[Sample]]:
        """Yield one repeat more, as long as the goal takes it; then write down why no more follow."""
        if self.goal is None:
            return
        from specbench_ss.benchmark.narrowing import reached, why_stop

        labels = sorted(self.labels, key=lambda label: label != self.baseline)
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

    def _note_resumption(self, total: int, todo: int) -> None:
        if not self.run_dir.rows:
            return
        self.events.on_warning(f"resuming: {total - todo} of {total} samples are already there")
        changed = changed_since(self.run_dir.manifest, environment())
        if changed:
            what = ", ".join(changed)
            self.warn_and_keep(f"earlier sessions of this run had other conditions: {what}; times do not compare")

    def blank(self, sample: Sample) -> Row:
        """Return the sample's row as it is before it is made."""
        return Row(
            *sample.key,
            category=sample.question.category,
            index=sample.index,
            position=sample.position,
            seed=sample_seed(self.config.seed, sample.question.id, sample.turn, sample.repeat),
            suite_edition=self.data.edition,
            suite_hash=self.data.content_hash,
            status="ok",
        )

    def _make(self, sample: Sample) -> None:
        """Run one sample and commit it."""
        self.events.on_sample_start(sample.method, sample.question.id)
        row, steps = self.tried(sample)
        self.run_dir.append(row, steps)
        self.events.on_sample(row)
        if not row.ok:
            self.after_failure(row)

    def tried(self, sample: Sample) -> tuple[Row, list[Step]]:
        """Return the sample's row and steps, made and scored; a failed row where it could not be made."""
        row, steps = self.blank(sample), list[Step]()
        try:
            row, steps = self.made(row, sample)
        except (Exception, SystemExit) as e:  # one sample of one method: the others are worth having
            self.failed(e)
            row.status, row.error = "failed", error_text(e)
            self.events.on_warning(f"{row.method} failed on {row.question_id} turn {row.turn + 1}: {row.error}")
        else:
            row.quality = self._score(sample, row.text or "")
        return row, steps

    def failed(self, error: BaseException) -> None:
        """Raise UserError where an error means that nothing works any more."""
        return

    def _score(self, sample: Sample, answer: str) -> float | None:
        try:
            quality = self.suite.score(sample.question, sample.turn, answer)
            if quality is not None and not 0 <= quality <= 1:
                raise ValueError(f"{quality} is not in [0, 1]")
            return quality
        except Exception as e:  # the times are still good
            self.events.on_warning(f"no quality for {sample.question.id}: the scorer failed: {error_text(e)}")
            return None

    def history(self, sample: Sample) -> list[str]:
        """The earlier answers that this turn continues. Raises LookupError where one of them failed."""
        own = self.config.history == "own"
        source = (sample.method, sample.repeat) if own else (self.baseline, 0)
        answers = []
        for turn in range(sample.turn):
            row = self.run_dir.rows[(sample.question.id, turn, *source)]
            if not row.ok or row.text is None:
                raise LookupError(f"no answer to turn {turn + 1} of {source[0]} to continue: it failed")
            answers.append(row.text)
        return answers

    def _judge(self, sample: Sample) -> None:
        """Commit the sample's sameness verdict, once; the reference's repeats are held against its first."""
        row = self.run_dir.rows[sample.key]
        first = row.method == self.baseline and row.repeat == 0
        if first or row.key in self.run_dir.judged:
            return
        repeat = 0 if row.method == self.baseline else row.repeat
        label = self.same_as(row.method)
        reference = self.run_dir.rows[(row.question_id, row.turn, label, repeat)]
        if reason := self._why_not(sample, row, reference):
            self.run_dir.append_sameness(not_compared(row, reason))
            return
        verdict = self.verdict(sample, row, reference)
        self.run_dir.append_sameness(verdict)
        if verdict.verdict == "mismatch":
            self.events.on_warning(f"{row.method} differs from {label} on {row.question_id} turn {row.turn + 1}")

    def promises(self, label: str) -> bool:
        """Say whether a method promises the output of the one that it is compared with."""
        return True

    def _why_not(self, sample: Sample, row: Row, reference: Row) -> str:
        """Why equality is not to be expected; '' where it is."""
        if not row.ok or not reference.ok:
            return FAILED[0 if not row.ok else 1]
        if not self.promises(row.method):
            return "the method does not promise the same output"
        if self.config.temperature > 0:
            return "sampled, not greedy"
        other = Sample(sample.question, sample.turn, reference.repeat, reference.method, 0, 0)
        return "another history" if self.history(sample) != self.history(other) else ""
