"""The suite decoded in this process with several requests at a time: what a batch gains, and what a request waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from specbench_ss.benchmark.answering import Answering, Request
from specbench_ss.benchmark.levels import Levels
from specbench_ss.benchmark.out_of_memory import told
from specbench_ss.benchmark.quiet_timing import quiet_collector
from specbench_ss.benchmark.schedule import Sample
from specbench_ss.benchmark.session import Session
from specbench_ss.benchmark.telemetry.disturbance import disturbed_by
from specbench_ss.benchmark.telemetry.record import MachineRecord
from specbench_ss.decoding.decoder import Decoder
from specbench_ss.decoding.generation import Generation, Offer
from specbench_ss.decoding.sampling import Sampling
from specbench_ss.decoding.step_clock import check_device
from specbench_ss.decoding.together import Answered, Asked, Together
from specbench_ss.runs.betting_score import BIASED, bound, pool, too_coarse
from specbench_ss.runs.level import Level
from specbench_ss.runs.readable import check_readable
from specbench_ss.runs.rows import Row, Sameness
from specbench_ss.runs.run_directory import RunDir

WARM_TOKENS = 4  # of each answer before a level is measured


class LevelsTogether(Levels[Request]):
    """Decodes in this process. request: what is asked for a sample; answering, machine: those of the run.
    tested: the comparison of a sampled answer with its distribution."""

    def __init__(
        self,
        session: Session,
        run_dir: RunDir,
        decoders: Mapping[str, Decoder],
        request: Callable[[Sample], Request],
        answering: Answering,
        machine: MachineRecord,
        tested: Callable[[Row, Sequence[int], Sampling, Sequence[Offer]], Sameness],
    ) -> None:
        super().__init__(session, run_dir)
        self.decoders, self.request, self.answering, self.machine = decoders, request, answering, machine
        self.target, self.tested = answering.target, tested

    def prompt(self, sample: Sample) -> Request:
        """Return the request of the sample's own method."""
        return self.request(sample)

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
                self.machine.watch() as seen,
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
            self.tested(row, asked.prompt, asked.sampling, done.generation.offers).sampled
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
