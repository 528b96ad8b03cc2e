"""Runs every method on every prompt, interleaved, and commits each sample as it is finished. Knows no method by name.

Timing discipline: warm-up first, never recorded; the collector runs before each sample and is off during it;
scoring, comparing and writing happen between samples.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from specbench_ss.benchmark.answering import Answering, Decode, Request
from specbench_ss.benchmark.events import Events as Events
from specbench_ss.benchmark.quiet_timing import frozen_heap, peak_memory, quiet_collector, warm_up
from specbench_ss.benchmark.requests import check_ids, limits, prompt_ids
from specbench_ss.benchmark.schedule import Sample, plan, sample_seed, tasks_in_turn
from specbench_ss.benchmark.second_passes import SecondPasses
from specbench_ss.benchmark.telemetry.record import MachineRecord
from specbench_ss.benchmark.warm_prompts import warm_prompts
from specbench_ss.decoding.decoder import Decoder
from specbench_ss.decoding.generation import Generation, Step
from specbench_ss.decoding.loop import decode as decode_once
from specbench_ss.decoding.loop import looked_into
from specbench_ss.decoding.sampling import Sampling
from specbench_ss.decoding.step_clock import check_device
from specbench_ss.errors import UserError, error_text
from specbench_ss.method_spec import REFERENCE
from specbench_ss.runs import sameness
from specbench_ss.runs.config import RunConfig, RunTarget
from specbench_ss.runs.environment import busy, changed_since, environment
from specbench_ss.runs.manifest import now
from specbench_ss.runs.rows import Row
from specbench_ss.runs.run_directory import RunDir
from specbench_ss.runs.suite import Suite, SuiteData
from specbench_ss.time_limit import check_thread

if TYPE_CHECKING:
    from specbench_ss.benchmark.telemetry.seen import Seen
    from specbench_ss.decoding.target import Target


def run(
    config: RunConfig,
    target: Target,
    suite: Suite,
    suite_data: SuiteData,
    decoders: dict[str, Decoder],
    run_dir: RunDir,
    events: Events,
    where: RunTarget,
    decode: Decode = decode_once,
) -> None:
    """Make every sample that is not yet committed, then judge sameness, question by question.

    where: what is recorded besides, and when a sample or the run is given up; `run_dir` is its open folder. A method
    that fails leaves a failed row and the run goes on; a device that no longer works ends it. On KeyboardInterrupt,
    which is passed on, and on any other exception the directory stays resumable and its status says why it stopped.
    """
    for label in (REFERENCE, *map(reference_of, decoders.values())):
        if label not in decoders:
            raise UserError(f"the reference method {label!r} must be among the methods")
    check_ids(suite_data)
    if where.timeout is not None:
        check_thread()
    session = _Session(config, target, suite, suite_data, decoders, run_dir, events, where, decode)
    try:
        with contextlib.closing(session.machine):
            run_dir.update(status="running")
            session.run()
    except BaseException as e:
        interrupted = isinstance(e, KeyboardInterrupt)
        with contextlib.suppress(UserError):  # a full disk: the first error is the one to tell
            run_dir.update(status="interrupted" if interrupted else "failed", finished=now())
        raise
    run_dir.update(status="complete", finished=now())


def reference_of(decoder: Decoder) -> str:
    """The label of the method whose output it must equal."""
    return decoder.reference_for(decoder.options).label


class _Session:
    """One process's share of a run."""

    def __init__(
        self,
        config: RunConfig,
        target: Target,
        suite: Suite,
        data: SuiteData,
        decoders: dict[str, Decoder],
        run_dir: RunDir,
        events: Events,
        where: RunTarget,
        decode: Decode,
    ) -> None:
        self.config, self.target, self.suite, self.data = config, target, suite, data
        self.decoders, self.run_dir, self.events = decoders, run_dir, events
        self.recording, self.goal = where.recording, where.goal
        self.answering = Answering(decode, target, where.timeout, run_dir.path)
        self.limits = limits(target, config.max_new_tokens or data.max_new_tokens, config.stop)
        # last, for it has a thread
        self.machine = MachineRecord(self.recording, target.device, run_dir, self._warn_and_keep)

    def run(self) -> None:
        samples = self._planned()
        todo = [s for s in samples if s.key not in self.run_dir.rows]
        self._note_resumption(len(samples), len(todo))
        if todo and (note := busy()):
            self._warn_and_keep(note)
        for label in (label for label, decoder in self.decoders.items() if decoder.remembers):
            self._warn_and_keep(f"{label} remembers earlier prompts: its speed depends on what came before each")
        planned = len(samples)
        self.events.on_start(len(todo))
        with frozen_heap():
            if (todo or self.goal) and self.config.warmup:
                prompts = warm_prompts(self.target, self.data.questions, self.config.warmup)
                warm_up(self.decoders, prompts, self._warm_sample, self._warn_and_keep)
                for decoder in self.decoders.values():
                    decoder.forget()
            self._round(samples)
            for more in self._more_repeats():
                samples += more
                self.events.on_start(len(todo) + len(samples) - planned)
                self._round(more)
            again = SecondPasses(self.recording, self.decoders, self.run_dir, self._answer_again, self._warn_and_keep)
            again.make(samples, self.config.seed)

    def _planned(self) -> list[Sample]:
        """Every sample of the run as far as it was planned: the repeats that were asked for, then any added since."""
        asked, made = self.config.repeats, self.run_dir.manifest.get("repeats_made") or 0
        rounds = [self._repeats(0, asked), *(self._repeats(n, n + 1) for n in range(asked, made))]
        return [sample for samples in rounds for sample in samples]

    def _repeats(self, first: int, end: int) -> list[Sample]:
        questions = tasks_in_turn(self.data.questions) if self.config.order == "tasks" else self.data.questions
        return list(plan(questions, list(self.decoders), end, self.config.seed, first))

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

        labels, made = list(self.decoders), self.run_dir.manifest.get("repeats_made") or self.config.repeats
        while not (why := why_stop(list(self.run_dir.rows.values()), labels, made, self.goal)):
            made += 1
            self.run_dir.update(repeats_made=made)
            yield self._repeats(made - 1, made)
        self.run_dir.update(until_ci=reached(list(self.run_dir.rows.values()), labels, made, self.goal, why))

    def _warn_and_keep(self, text: str) -> None:
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
            self._warn_and_keep(f"earlier sessions of this run had other conditions: {what}; times do not compare")

    def _warm_sample(self, label: str, prompt: list[int], max_new_tokens: int) -> float:
        """Seconds per token of one unrecorded request."""
        self.events.on_warm_up(label)
        limits = replace(self.limits, max_new_tokens=min(max_new_tokens, self.limits.max_new_tokens))
        asked = Request(label, self.decoders[label], prompt, limits, self._sampling(self.config.seed))
        with quiet_collector():
            done = self.answering.answer(asked)
        return done.wall_s / max(1, len(done.tokens))

    def _make(self, sample: Sample) -> None:
        """Run one sample and commit it."""
        self.events.on_sample_start(sample.method, sample.question.id)
        row = Row(
            *sample.key,
            category=sample.question.category,
            index=sample.index,
            position=sample.position,
            seed=sample_seed(self.config.seed, sample.question.id, sample.turn, sample.repeat),
            suite_edition=self.data.edition,
            suite_hash=self.data.content_hash,
            status="ok",
        )
        try:
            row, steps = self._decoded(row, sample)
        except (Exception, SystemExit) as e:  # one sample of one method: the others are worth having
            check_device(self.target.device)
            row.status, row.error, steps = "failed", error_text(e), []
            self.events.on_warning(f"{row.method} failed on {row.question_id} turn {row.turn + 1}: {row.error}")
        else:
            row.quality = self._score(sample, row.text or "")
        self.run_dir.append(row, steps)
        self.events.on_sample(row)

    def _decoded(self, blank: Row, sample: Sample) -> tuple[Row, list[Step]]:
        """Decode, once more where the machine was disturbed; where that fails, the try before it counts.

        Each try fills a row of its own, so that none has numbers of another one.
        """
        row, steps = self._decode_once(replace(blank), sample)
        while self.machine.again(row, self.decoders[sample.method].remembers):
            try:
                row, steps = self._decode_once(replace(blank, remade=(row.remade or 0) + 1), sample)
            except (Exception, SystemExit) as e:
                check_device(self.target.device)
                where = f"{row.method} on {row.question_id} turn {row.turn + 1}"
                self.events.on_warning(f"{where} was disturbed, and failed when it was made again: {error_text(e)}")
                break
        return row, steps

    def _decode_once(self, row: Row, sample: Sample) -> tuple[Row, list[Step]]:
        """Decode, check and fill the row, which is of this try alone: a failure leaves no number in another one."""
        asked = self._request(self.decoders[sample.method], sample)
        seen: Seen | None = None

        def measured() -> Generation:
            nonlocal seen
            row.started = time.time()
            with quiet_collector(), peak_memory(self.target.device) as peak, self.machine.watch() as seen:
                done = self.answering.answer(asked, self.events.on_tokens)
            row.ended, row.peak_memory_bytes = time.time(), peak()
            done.check()
            return done

        done = looked_into(measured, lambda: self.answering.probe(asked))
        row.text = self.target.decode_text(done.tokens)
        row.fill(done)
        self.machine.note(row, seen)
        return row, done.steps

    def _request(self, decoder: Decoder, sample: Sample) -> Request:
        seed = sample_seed(self.config.seed, sample.question.id, sample.turn, sample.repeat)
        return Request(sample.method, decoder, self._prompt(sample), self.limits, self._sampling(seed))

    def _answer_again(self, decoder: Decoder, sample: Sample, most: int | None = None) -> Generation:
        """Answer a prompt once more, unrecorded. most: tokens, where that is fewer than the run's own limit."""
        own = self.limits.max_new_tokens
        limits = replace(self.limits, max_new_tokens=min(most or own, own))
        return self.answering.answer(replace(self._request(decoder, sample), limits=limits))

    def _sampling(self, seed: int) -> Sampling:
        return Sampling(self.config.temperature, self.config.top_p, self.config.top_k, seed)

    def _score(self, sample: Sample, answer: str) -> float | None:
        try:
            quality = self.suite.score(sample.question, sample.turn, answer)
            if quality is not None and not 0 <= quality <= 1:
                raise ValueError(f"{quality} is not in [0, 1]")
            return quality
        except Exception as e:  # the times are still good
            self.events.on_warning(f"no quality for {sample.question.id}: the scorer failed: {error_text(e)}")
            return None

    def _prompt(self, sample: Sample) -> list[int]:
        return prompt_ids(self.target, sample.question.turns, self._history(sample))

    def _history(self, sample: Sample) -> list[str]:
        """The earlier answers that this turn continues. Raises LookupError where one of them failed."""
        own = self.config.history == "own"
        source = (sample.method, sample.repeat) if own else (REFERENCE, 0)
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
        first = row.method == REFERENCE and row.repeat == 0
        if first or row.key in self.run_dir.judged:
            return
        repeat = 0 if row.method == REFERENCE else row.repeat
        label = reference_of(self.decoders[row.method])
        reference = self.run_dir.rows[(row.question_id, row.turn, label, repeat)]
        reason = self._why_not(sample, row, reference)
        if reason:
            self.run_dir.append_sameness(sameness.not_compared(row, reason))
            return
        verdict = sameness.judge(self.decoders[label], self._prompt(sample), reference, row)
        self.run_dir.append_sameness(verdict)
        if verdict.verdict == "mismatch":
            self.events.on_warning(f"{row.method} differs from {label} on {row.question_id} turn {row.turn + 1}")

    def _why_not(self, sample: Sample, row: Row, reference: Row) -> str:
        """Why equality is not to be expected; '' where it is."""
        if not row.ok or not reference.ok:
            return sameness.FAILED[0 if not row.ok else 1]
        if not self.decoders[row.method].lossless:
            return "the method does not promise the same output"
        if self.config.temperature > 0:
            return "sampled, not greedy"
        other = Sample(sample.question, sample.turn, reference.repeat, reference.method, 0, 0)
        return "another history" if self._history(sample) != self._history(other) else ""
