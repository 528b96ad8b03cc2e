"""Progress of a run to its last sample: commits, output matches, repeats and resumption.

A local run (`runner`) and a run of served engines (`server_run`) fill in how a sample is made and how answers compare.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Generic, Protocol, TypeVar

from specbench_ss.bench.history import HistorySource
from specbench_ss.bench.schedule import Sample, interleave_tasks, method_order, plan, sample_seed
from specbench_ss.bench.stopping import reached, why_stop
from specbench_ss.bench.timed_sample import frozen_heap
from specbench_ss.engine.decoder import Step
from specbench_ss.errors import RunStopped, UserError, error_text, failure_text
from specbench_ss.runs.config import Load, RunConfig, StoppingRule
from specbench_ss.runs.environment import busy, changed_since, environment, now
from specbench_ss.runs.output_match import FAILED, check_readable, not_compared, wrong_methods
from specbench_ss.runs.records import ConcurrencyKey, OutputMatch, SampleRecord
from specbench_ss.runs.run_dir import RunDir, RunStore, read_concurrency, read_verdicts
from specbench_ss.runs.server_tokens import accounted
from specbench_ss.suite import Suite, SuiteData


class RunCallbacks(Protocol):
    """Callbacks of a run. They must be quick: on_tokens is called between the steps of a sample."""

    def on_start(self, total: int) -> None:
        """Called with the number of samples to be made."""
        return

    def on_warm_up(self, label: str) -> None:
        """Called before a method decodes a warm-up prompt."""
        return

    def on_estimate(self, seconds: float, samples: int) -> None:
        """Called after warm-up with an upper bound of the time that the samples take."""
        return

    def on_sample_start(self, label: str, question_id: str) -> None:
        """Called before a method decodes a prompt."""
        return

    def on_tokens(self, n: int) -> None:
        """Called with the number of new tokens of the current sample."""
        return

    def on_sample(self, row: SampleRecord) -> None:
        """Called after a sample is committed."""
        return

    def on_recording(self, answers: int) -> None:
        """Called before drafts are recorded, for which so many answers are decoded again, untimed."""
        return

    def on_warning(self, text: str) -> None:
        """Called with a warning for the user; the run continues."""
        return


class NullCallbacks(RunCallbacks):
    """No-op callbacks."""


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A run about to start. notes: sentences for its readers, in addition to those of the plan."""

    plan: Any
    run_dir: RunDir
    notes: tuple[str, ...] = ()


Watch = Callable[[Any], AbstractContextManager[RunCallbacks]]  # takes a PreparedRun


@contextlib.contextmanager
def unwatched(ready: PreparedRun) -> Iterator[RunCallbacks]:
    """Report no progress; keep the notes with the run's warnings in its manifest."""
    for note in (*ready.plan.notes, *ready.notes):
        ready.run_dir.keep_warning(note)
    yield NullCallbacks()


class RunLoop(ABC):
    """Makes the missing samples of a run. labels: of its methods, in the order that the schedule shuffles."""

    def __init__(
        self,
        config: RunConfig,
        data: SuiteData,
        labels: Sequence[str],
        run_dir: RunStore,
        events: RunCallbacks,
        goal: StoppingRule | None = None,
    ) -> None:
        self.config, self.data, self.labels = config, data, list(labels)
        self.run_dir, self.events, self.goal = run_dir, events, goal
        self.part: int | None = None  # session that this process makes, from 0; None: the only one
        self.dropped: dict[str, str] = {}  # method -> reason why none of its samples is made
        self.token_s: dict[str, float] = {}  # method -> seconds per token of its last warm-up prompt
        self._warned: set[str] = set()  # warnings that are given once

    @property
    @abstractmethod
    def baseline(self) -> str:
        """Return the label of the baseline."""

    @abstractmethod
    def run_pending(self, samples: Sequence[Sample]) -> None:
        """Make the missing ones of these samples and compare their outputs."""

    def warm_up(self) -> None:
        """Decode warm-up prompts with every method."""
        return

    def notes(self) -> None:
        """Keep warnings that are known before the first sample."""
        return

    def prepare(self, samples: Sequence[Sample]) -> None:
        """Make the passes after warm-up, before the first sample."""
        return

    def finalize(self, samples: Sequence[Sample]) -> None:
        """Make the passes after the last sample."""
        return

    def run(self) -> None:
        """Make every sample that is not yet committed. An interrupted run stays resumable.

        Raises RunStopped for a UserError after the first sample, since what was measured is worth going on with.
        """
        try:
            self.run_dir.update(status="running")
            self._run()
        except BaseException as e:
            interrupted = isinstance(e, KeyboardInterrupt)
            with contextlib.suppress(UserError):  # a full disk: the first error matters
                self.run_dir.update(status="interrupted" if interrupted else "failed", finished=now())
            if isinstance(e, UserError) and self.run_dir.rows:
                raise RunStopped(str(e)) from e
            raise
        self.run_dir.update(status="complete" if self._all_made() else "running", finished=now())

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
            self.prepare(samples)
            max_new_tokens = self.config.max_new_tokens or self.data.max_new_tokens
            if seconds := sum(self.token_s.get(sample.method, 0.0) * max_new_tokens for sample in todo):
                self.events.on_estimate(seconds, len(todo))
            self.run_pending(samples)
            for more in self._more_repeats():
                samples += more
                self.events.on_start(len(todo) + len(samples) - planned)
                self.run_pending(more)
            self.finalize(samples)

    def _all_made(self) -> bool:
        """Return whether the other sessions of the run have their samples too."""
        wanted = self.config.repeats * len(self.labels) * sum(len(question.turns) for question in self.data.questions)
        return self.part is None or len(self.run_dir.rows) >= wanted * int(self.run_dir.manifest["n_sessions"])

    def busy(self) -> str:
        """Return a warning if other processes load this machine, else ''."""
        return ""

    def _planned(self) -> list[Sample]:
        """Return every planned sample: the requested repeats, then those added since."""
        if self.part is not None:
            return self._repeats(self.part * self.config.repeats, (self.part + 1) * self.config.repeats)
        planned, made = self.config.repeats, self.run_dir.manifest.get("repeats_made") or 0
        rounds = [self._repeats(0, planned), *(self._repeats(n, n + 1) for n in range(planned, made))]
        return [sample for samples in rounds for sample in samples]

    def _repeats(self, first: int, end: int) -> list[Sample]:
        questions = interleave_tasks(self.data.questions) if self.config.order == "interleaved" else self.data.questions
        return list(plan(questions, self.labels, end, self.config.seed, first))

    def _more_repeats(self) -> Iterator[list[Sample]]:
        """Yield one more repeat until the stopping rule ends the run; then record its reason."""
        if self.goal is None:
            return

        made = self.run_dir.manifest.get("repeats_made") or self.config.repeats
        while not (why := why_stop(rows := self._accounted(), self._with_speedup(), made, self.goal)):
            made += 1
            self.run_dir.update(repeats_made=made)
            yield self._repeats(made - 1, made)
        self.run_dir.update(target_ci=reached(rows, self._with_speedup(), made, self.goal, why))

    def _accounted(self) -> list[SampleRecord]:
        return accounted([*self.run_dir.rows.values()])

    def _with_speedup(self) -> list[str]:
        """Return the baseline, then the methods that still make outputs and have none that is wrong."""
        wrong = wrong_methods(read_verdicts(self.run_dir.path), self.run_dir.manifest)
        answering = {row.method for row in self.run_dir.rows.values() if row.ok} - wrong - self.dropped.keys()
        return [self.baseline, *(x for x in self.labels if x != self.baseline and x in answering)]

    def warn_and_keep(self, text: str) -> None:
        """Give a warning now and keep it for the readers of the results."""
        self.events.on_warning(text)
        self.run_dir.keep_warning(text)

    def changes(self) -> list[str]:
        """Return the names of the conditions that differ from earlier sessions."""
        return list(changed_since(self.run_dir.manifest, environment()))

    def _note_resumption(self, total: int, todo: int) -> None:
        if not self.run_dir.rows:
            return
        if self.part is None or todo < total:
            self.events.on_warning(f"resuming: {total - todo} of {total} samples are done")
        if not todo and self.goal is None:  # second passes at most, which are not timed
            *before, last = self.run_dir.manifest["sessions"]
            self.run_dir.update(sessions=[*before, {**last, "measures": False}])
            return
        if changed := self.changes():
            what = ", ".join(changed)
            self.warn_and_keep(f"earlier sessions of this run had other conditions: {what}; times do not compare")


class Session(RunLoop):
    """Makes samples in this process. suite: scores their outputs; a subclass sets it."""

    suite: Suite

    @abstractmethod
    def run_sample(self, blank: SampleRecord, sample: Sample) -> tuple[SampleRecord, list[Step]]:
        """Return the filled record of the sample with its steps. An exception makes the sample a failed one."""

    @abstractmethod
    def lossless_reference(self, label: str) -> str:
        """Return the label of the method whose outputs this one must match."""

    @abstractmethod
    def verdict(self, sample: Sample, row: SampleRecord, reference: SampleRecord) -> OutputMatch:
        """Compare two good outputs."""

    def sampled(self, sample: Sample, row: SampleRecord) -> OutputMatch | None:
        """Test a sampled output against the target's distribution; None without access to it."""
        return None

    def after_failure(self, row: SampleRecord) -> None:
        """End the run after a failure that concerns all samples. The failed record is committed already."""
        return

    def busy(self) -> str:
        return busy()

    def run_pending(self, samples: Sequence[Sample]) -> None:
        """Make the missing ones of these samples and compare their outputs, question by question."""
        for _, group in groupby(samples, key=lambda s: s.question.id):
            of_question = list(group)
            for sample in of_question:
                if sample.key not in self.run_dir.rows:
                    self._make(sample)
            for sample in of_question:
                self._judge(sample)

    def blank(self, sample: Sample) -> SampleRecord:
        """Return the record of a sample before decoding."""
        return SampleRecord(
            *sample.key,
            category=sample.question.category,
            index=sample.index,
            position=sample.position,
            seed=sample_seed(self.config.seed, sample.question.id, sample.turn, sample.repeat),
            suite_edition=self.data.edition,
            suite_hash=self.data.content_hash,
            status="ok",
            session=self.part or 0,
        )

    def _make(self, sample: Sample) -> None:
        """Run one sample and commit it."""
        self.events.on_sample_start(sample.method, sample.question.id)
        row, steps = self.run_sample_safely(sample)
        self.run_dir.append(row, steps)
        self.events.on_sample(row)
        if not row.ok:
            self.after_failure(row)

    def run_sample_safely(self, sample: Sample) -> tuple[SampleRecord, list[Step]]:
        """Return the record and steps of a scored sample, or a failed record."""
        row, steps = self.blank(sample), list[Step]()
        if sample.method in self.dropped:
            row.status, row.error = "failed", self.dropped[sample.method]
            return row, steps
        try:
            made, made_steps = self.run_sample(row, sample)
            check_readable(made, made_steps)
            row, steps = made, made_steps
        except (Exception, SystemExit) as e:  # one sample of one method: the others continue
            self.failed(e, row)
            row = self.blank(sample)
            row.status, row.error = "failed", failure_text(e)
            self.events.on_warning(f"{row.method} failed on {row.question_id} turn {row.turn + 1}: {row.error}")
        else:
            row.quality = self._score(sample, row.text or "")
        return row, steps

    def failed(self, error: BaseException, row: SampleRecord) -> None:
        """Drop data of a failed sample. Raise UserError for an error of the device."""
        return

    def _score(self, sample: Sample, answer: str) -> float | None:
        try:
            quality = self.suite.score(sample.question, sample.turn, answer)
            if quality is not None and not 0 <= quality <= 1:
                raise ValueError(f"{quality} is not in [0, 1]")
            return quality
        except ImportError as e:  # a package of the scorer is missing: the same for every answer that it would score
            text = f"no quality where a package is missing: {error_text(e)}"
            if text not in self._warned:
                self._warned.add(text)
                self.warn_and_keep(text)
            return None
        except Exception as e:  # the times are still good
            self.events.on_warning(f"no quality for {sample.question.id}: the scorer failed: {error_text(e)}")
            return None

    def history(self, sample: Sample) -> list[str]:
        """Return the earlier outputs that this turn continues. Raises LookupError if one of them failed."""
        return HistorySource(self.baseline, self.config.history == "own", self.run_dir.rows).answers(sample.key)

    def _judge(self, sample: Sample) -> None:
        """Append the verdict on an output once; compare later repeats of the baseline with its first one.

        Sampled outputs, those of the baseline included, are tested against the target's distribution.
        """
        row = self.run_dir.rows[sample.key]
        if row.key in self.run_dir.compared_keys:
            return
        if self.config.temperature > 0 and row.ok and (tested := self.sampled(sample, row)):
            self.run_dir.append_output_match(tested)
            return
        first = row.method == self.baseline and row.repeat == 0
        if first:
            return
        repeat = 0 if row.method == self.baseline else row.repeat
        label = self.lossless_reference(row.method)
        reference = self.run_dir.rows[(row.question_id, row.turn, label, repeat)]
        if reason := self._why_not(sample, row, reference):
            self.run_dir.append_output_match(self.without_comparison(sample, row, reason))
            return
        verdict = self.verdict(sample, row, reference)
        self.run_dir.append_output_match(verdict)
        if verdict.verdict == "mismatch":
            self.events.on_warning(f"{row.method} differs from {label} on {row.question_id} turn {row.turn + 1}")

    def without_comparison(self, sample: Sample, row: SampleRecord, reason: str) -> OutputMatch:
        """Return the verdict on an output that is not compared. reason: the cause."""
        return not_compared(row, reason)

    def lossless_methods(self, label: str) -> bool:
        """Return whether a method preserves the output of its reference."""
        return True

    def _why_not(self, sample: Sample, row: SampleRecord, reference: SampleRecord) -> str:
        """Return the reason why equal outputs are not expected, or ''."""
        if not row.ok or not reference.ok:
            return FAILED[0 if not row.ok else 1]
        if not self.lossless_methods(row.method):
            return "the method does not preserve the output"
        if self.config.temperature > 0:
            return "sampled, not greedy"
        other = Sample(sample.question, sample.turn, reference.repeat, reference.method, 0, 0)
        return "another history" if self.history(sample) != self.history(other) else ""


Prompt = TypeVar("Prompt")


class ConcurrencySweep(ABC, Generic[Prompt]):
    """Makes the missing load levels of a run.

    Later turns continue the outputs of the measurement with one request at a time, so that prompts are the same at
    every level.
    """

    def __init__(self, session: Session, run_dir: RunDir) -> None:
        self.session, self.run_dir = session, run_dir

    @abstractmethod
    def prompt(self, sample: Sample) -> Prompt:
        """Return the request of a sample. Raises LookupError if the history is missing."""

    @abstractmethod
    def level(self, label: str, load: Load, repeat: int) -> None:
        """Make one level and commit it."""

    def make(self) -> None:
        """Make every requested level that is missing."""
        done = {level.key for level in read_concurrency(self.run_dir.path)[0]}
        todo = [place for place in self._planned() if place not in done]
        if todo:
            prompts = sum(len(q.turns) for q in self.session.data.questions)
            self.session.events.on_start(len(self.run_dir.rows) + len(todo) * prompts)
        for place in todo:
            self.level(*place)

    def _planned(self) -> Iterator[ConcurrencyKey]:
        """Yield every level: repeat by repeat, with methods in the order of the Williams squares."""
        config, block = self.session.config, 0
        repeats = self.run_dir.manifest.get("repeats_made") or config.repeats
        for repeat in range(repeats):
            for load in config.loads:
                for label in method_order(self.session.labels, block, config.seed):
                    if label not in self.session.dropped:
                        yield label, load, repeat
                block += 1

    def asked(self, label: str, load: Load, repeat: int) -> Iterator[tuple[SampleRecord, Prompt | None]]:
        """Yield a blank record for every prompt of the suite, with its request; a failed one without history."""
        prompts = [(question, turn) for question in self.session.data.questions for turn in range(len(question.turns))]
        for index, (question, turn) in enumerate(prompts):
            sample = Sample(question, turn, repeat, label, 0, index)
            row = replace(self.session.blank(sample), concurrency=load.concurrency, rate=load.rate)
            try:
                yield row, self.prompt(sample)
            except LookupError as e:
                yield replace(row, status="failed", error=error_text(e)), None
