"""How samples are made one after the other, whatever answers: what is committed, what is compared.

A local run (`runner`) and a run of served engines (`served`) fill in how a sample is made and how answers compare.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import groupby

from specbench_ss.benchmark.run_loop import RunLoop
from specbench_ss.benchmark.schedule import Sample, sample_seed
from specbench_ss.decoding.generation import Step
from specbench_ss.error_place import failure_text
from specbench_ss.errors import error_text
from specbench_ss.runs.environment import busy
from specbench_ss.runs.readable import check_readable
from specbench_ss.runs.rows import Row, Sameness
from specbench_ss.runs.sameness import FAILED, not_compared
from specbench_ss.runs.suite import Suite


class Session(RunLoop):
    """Makes samples in this process. suite: whose scores its answers get; a subclass sets it."""

    suite: Suite

    @abstractmethod
    def made(self, blank: Row, sample: Sample) -> tuple[Row, list[Step]]:
        """Return the sample's row, filled, with its steps. What it raises makes the sample a failed one."""

    @abstractmethod
    def same_as(self, label: str) -> str:
        """Return the label of the method whose answers this one's are compared with."""

    @abstractmethod
    def verdict(self, sample: Sample, row: Row, reference: Row) -> Sameness:
        """Compare two good answers."""

    def sampled(self, sample: Sample, row: Row) -> Sameness | None:
        """Compare a good answer at a temperature above 0 with its distribution; None where nothing can be asked."""
        return None

    def after_failure(self, row: Row) -> None:
        """End the run where a failure says that nothing more can be made. The failed row is committed already."""
        return

    def busy(self) -> str:
        return busy()

    def make_missing(self, samples: Sequence[Sample]) -> None:
        """Make what is missing of these samples and judge it, question by question."""
        for _, group in groupby(samples, key=lambda s: s.question.id):
            of_question = list(group)
            for sample in of_question:
                if sample.key not in self.run_dir.rows:
                    self._make(sample)
            for sample in of_question:
                self._judge(sample)

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
        if sample.method in self.dropped:
            row.status, row.error = "failed", self.dropped[sample.method]
            return row, steps
        try:
            made, made_steps = self.made(row, sample)
            check_readable(made, made_steps)
            row, steps = made, made_steps
        except (Exception, SystemExit) as e:  # one sample of one method: the others are worth having
            self.failed(e, row)
            row = self.blank(sample)
            row.status, row.error = "failed", failure_text(e)
            self.events.on_warning(f"{row.method} failed on {row.question_id} turn {row.turn + 1}: {row.error}")
        else:
            row.quality = self._score(sample, row.text or "")
        return row, steps

    def failed(self, error: BaseException, row: Row) -> None:
        """Drop what is kept of a failed sample. Raise UserError for an error of the device."""
        return

    def _score(self, sample: Sample, answer: str) -> float | None:
        try:
            quality = self.suite.score(sample.question, sample.turn, answer)
            if quality is not None and not 0 <= quality <= 1:
                raise ValueError(f"{quality} is not in [0, 1]")
            return quality
        except ImportError as e:  # a package of the scorer is missing: the same for every answer that it would score
            text = f"no quality where a package is missing: {error_text(e)}"
            if text not in self._told:
                self._told.add(text)
                self.warn_and_keep(text)
            return None
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
        """Append the verdict once; compare later repeats of the reference with its first.

        Sampled answers are each compared with their distribution, those of the reference too.
        """
        row = self.run_dir.rows[sample.key]
        if row.key in self.run_dir.judged:
            return
        if self.config.temperature > 0 and row.ok and (tested := self.sampled(sample, row)):
            self.run_dir.append_sameness(tested)
            return
        first = row.method == self.baseline and row.repeat == 0
        if first:
            return
        repeat = 0 if row.method == self.baseline else row.repeat
        label = self.same_as(row.method)
        reference = self.run_dir.rows[(row.question_id, row.turn, label, repeat)]
        if reason := self._why_not(sample, row, reference):
            self.run_dir.append_sameness(self.without_comparison(sample, row, reason))
            return
        verdict = self.verdict(sample, row, reference)
        self.run_dir.append_sameness(verdict)
        if verdict.verdict == "mismatch":
            self.events.on_warning(f"{row.method} differs from {label} on {row.question_id} turn {row.turn + 1}")

    def without_comparison(self, sample: Sample, row: Row, reason: str) -> Sameness:
        """Return the verdict on an answer that is not compared. reason: why it is not."""
        return not_compared(row, reason)

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
