"""Several requests at a time, decoded in this process.

Later turns continue the answers of the measurement with one request at a time, so that all prompts are known
beforehand and are the same at every level.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, TypeVar

from specbench_ss.bench.run_loop import Session
from specbench_ss.bench.schedule import Sample, method_order
from specbench_ss.bench.telemetry import disturbed_by
from specbench_ss.bench.timed_sample import Request, quiet_collector, told
from specbench_ss.engine.batching import Answered, Asked, Together
from specbench_ss.engine.decoder import Generation
from specbench_ss.engine.timing import check_device
from specbench_ss.errors import error_text
from specbench_ss.results.quality import BIASED, bound, pool, too_coarse
from specbench_ss.runs.output_match import check_readable
from specbench_ss.runs.records import Level, LevelKey, Row
from specbench_ss.runs.run_dir import RunDir, read_levels

if TYPE_CHECKING:
    from specbench_ss.bench.runner import LocalSession

Prompt = TypeVar("Prompt")


class Levels(ABC, Generic[Prompt]):
    """Makes the levels that a run lacks."""

    def __init__(self, session: Session, run_dir: RunDir) -> None:
        self.session, self.run_dir = session, run_dir

    @abstractmethod
    def prompt(self, sample: Sample) -> Prompt:
        """Return what is asked. Raises LookupError where the history is missing."""

    @abstractmethod
    def level(self, label: str, concurrency: int, repeat: int) -> None:
        """Make one level and commit it."""

    def make(self) -> None:
        """Ask the suite with every number of requests at a time that was asked for and is not there yet."""
        done = {level.key for level in read_levels(self.run_dir.path)[0]}
        todo = [place for place in self._planned() if place not in done]
        if todo:
            prompts = sum(len(q.turns) for q in self.session.data.questions)
            self.session.events.on_start(len(self.run_dir.rows) + len(todo) * prompts)
        for place in todo:
            self.level(*place)

    def _planned(self) -> Iterator[LevelKey]:
        """Yield every level: repeat by repeat, and the methods of each in an order of the Williams squares."""
        config, block = self.session.config, 0
        repeats = self.run_dir.manifest.get("repeats_made") or config.repeats
        for repeat in range(repeats):
            for concurrency in config.concurrency:
                for label in method_order(self.session.labels, block, config.seed):
                    if label not in self.session.dropped:
                        yield label, concurrency, repeat
                block += 1

    def asked(self, label: str, concurrency: int, repeat: int) -> Iterator[tuple[Row, Prompt | None]]:
        """Yield every prompt of the suite, with the row that its answer will fill; a failed one without history."""
        prompts = [(question, turn) for question in self.session.data.questions for turn in range(len(question.turns))]
        for index, (question, turn) in enumerate(prompts):
            sample = Sample(question, turn, repeat, label, 0, index)
            row = replace(self.session.blank(sample), concurrency=concurrency)
            try:
                yield row, self.prompt(sample)
            except LookupError as e:
                yield replace(row, status="failed", error=error_text(e)), None


WARM_TOKENS = 4  # of each answer before a level is measured


class LevelsTogether(Levels[Request]):
    """Decodes in this process."""

    session: LocalSession

    def __init__(self, session: LocalSession, run_dir: RunDir) -> None:
        super().__init__(session, run_dir)
        self.decoders, self.target, self.answering = session.decoders, session.target, session.answering

    def prompt(self, sample: Sample) -> Request:
        """Return the request of the sample's own method."""
        return self.session.request(sample)

    def level(self, label: str, concurrency: int, repeat: int) -> None:
        """Make one level, after a few tokens that are not measured. One that takes too long is left out."""
        session, wanted = self.session, list(self.asked(label, concurrency, repeat))
        session.events.on_sample_start(label, f"{concurrency} at a time")
        sent = [(row, asked) for row, asked in wanted if asked is not None]
        answers: dict[int, Answered] = {}

        def ended(place: int, answered: Answered) -> None:
            answers[place] = answered
            session.events.on_sample(sent[place][0])

        try:
            at_once = Together(self.decoders[label], concurrency)
            few = [_asked(asked, WARM_TOKENS) for _, asked in sent[:concurrency]]
            with self.answering.in_time(label, max(1, len(few))):
                at_once.answer(few, lambda *_: None)
            with (
                self.answering.in_time(label, max(1, len(sent))),
                quiet_collector(),
                session.machine.watch() as seen,
            ):
                started, began = time.time(), time.perf_counter()
                at_once.answer([_asked(one) for _, one in sent], ended)
                done, wall_s = time.time(), time.perf_counter() - began
        except Exception as error:  # the samples are there: nothing of them is lost
            check_device(*self.target.layers_on)
            why = told(error, self.decoders[label])
            session.warn_and_keep(f"{label} with {concurrency} requests at a time: {why}")
            return
        check_device(*self.target.layers_on)  # its answers would all be failed ones
        unasked = [row for row, asked in wanted if asked is None]
        made = [self._filled(sent[place][0], answered) for place, answered in answers.items()]
        rows = sorted((*made, *unasked), key=lambda row: row.index)
        good = [row for row in rows if row.ok]
        counts = (sum(getattr(row, name) or 0 for row in good) for name in ("steps", "drafted", "accepted"))
        level = Level(label, concurrency, repeat, started, done, wall_s, len(rows), *counts)
        self.run_dir.append_level(level, rows)
        self._compare(label, concurrency, good)
        self._test(
            label,
            concurrency,
            [(row, sent[place][1], answers[place]) for place, row in zip(answers, made, strict=True) if row.ok],
        )
        if seen is not None and (why := disturbed_by(seen)):
            session.warn_and_keep(f"{label} with {concurrency} requests at a time was disturbed: {why}")

    def _filled(self, blank: Row, answered: Answered) -> Row:
        """Return the row of an answer, a failed one where there is none or where the row could not be read again."""
        try:
            if answered.generation is None:
                raise answered.error or RuntimeError("no answer")
            row = self._taken(blank, answered.generation, answered)
            check_readable(row, ())
        except (Exception, SystemExit) as error:
            row = replace(blank, status="failed", error=told(error, self.decoders[blank.method]))
            self.session.events.on_warning(f"{row.method} failed on {row.question_id}: {row.error}")
        return row

    def _taken(self, blank: Row, generation: Generation, answered: Answered) -> Row:
        """Return a row with the answer. Its times are those since it was begun, waiting for the others included."""
        row = replace(blank)
        row.fill(generation)
        row.text = self.target.decode_text(generation.tokens)
        row.started, row.ended = answered.started, answered.started + answered.wall_s
        row.prefill_s, row.wall_s = answered.first_s, answered.wall_s
        row.decode_s = answered.wall_s - answered.first_s
        return row

    def _compare(self, label: str, concurrency: int, good: list[Row]) -> None:
        """Say how many greedy answers differ from those made alone: other rows beside them are other roundings."""
        if self.session.config.temperature > 0:
            return
        alone = [self.run_dir.rows.get(row.key) for row in good]
        pairs = [(row, other) for row, other in zip(good, alone, strict=True) if other is not None and other.ok]
        differ = sum(row.token_ids != other.token_ids for row, other in pairs)
        if differ:
            self.session.warn_and_keep(
                f"{label}: {differ} of {len(pairs)} answers made {concurrency} at a time differ from those made alone"
            )

    def _test(self, label: str, concurrency: int, good: list[tuple[Row, Request, Answered]]) -> None:
        """Warn where sampled answers of a method that promises its reference's distribution are biased."""
        if self.session.config.temperature == 0 or not self.decoders[label].lossless:
            return
        verdicts = [
            self.session.tested(row, asked.prompt, asked.sampling, done.generation.offers).sampled
            for row, asked, done in good
            if done.generation is not None
        ]
        pooled = pool(one for one in verdicts if one is not None)
        config = self.session.config
        if bound(pooled) < BIASED and not too_coarse(pooled, bool(config.top_k) or config.top_p < 1):
            self.session.warn_and_keep(
                f"{label}: {pooled.tokens:,} sampled tokens of answers made {concurrency} at a time are biased"
            )


def _asked(request: Request, most: int | None = None) -> Asked:
    limits = request.limits if most is None else replace(request.limits, max_new_tokens=most)
    return Asked(request.prompt, limits, request.sampling)
