"""What a run does after its last timed sample: answers again, untimed, with drafts recorded or under the profiler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from specbench_ss.benchmark import drafts
from specbench_ss.benchmark.schedule import Sample
from specbench_ss.decoding.decoder import Decoder
from specbench_ss.decoding.generation import Generation
from specbench_ss.errors import error_text
from specbench_ss.runs.config import Recording
from specbench_ss.runs.run_directory import RunDir
from specbench_ss.runs.side_files import DRAFTS, Drafts, read_drafts

Answer = Callable[[Decoder, Sample], Generation]


class SecondPasses:
    """answer(decoder, sample): answers the sample's prompt with its seed, unrecorded."""

    def __init__(
        self,
        recording: Recording,
        decoders: Mapping[str, Decoder],
        run_dir: RunDir,
        answer: Answer,
        warn: Callable[[str], None],
    ) -> None:
        self.recording, self.decoders, self.run_dir = recording, decoders, run_dir
        self.answer, self.warn = answer, warn

    def make(self, samples: Sequence[Sample], seed: int) -> None:
        """Record what was asked for and is not there yet. A failure is told, and ends no run."""
        self._record_drafts(drafts.chosen(samples, self.recording.record_drafts, seed))

    def _record_drafts(self, chosen: Sequence[Sample]) -> None:
        there = {one.key for one in read_drafts(self.run_dir.path)} if chosen else set()
        for sample in chosen:
            row = self.run_dir.rows.get(sample.key)
            if sample.key not in there and row is not None and row.ok:
                line = self._drafts_of(sample, row.token_ids or [])
                self.run_dir.append_beside(DRAFTS, line.as_dict())

    def _drafts_of(self, sample: Sample, timed: Sequence[int]) -> Drafts:
        decoder = self.decoders[sample.method]
        if decoder.remembers:
            return Drafts(*sample.key, reason=drafts.REMEMBERS)
        recorder = drafts.Recorder(decoder)
        try:
            return drafts.recorded(sample, recorder, self.answer(recorder, sample).tokens, timed)
        except Exception as error:  # the samples are there: nothing of them is lost
            self.warn(f"no drafts of {sample.method} on {sample.question.id}: {error_text(error)}")
            return Drafts(*sample.key, reason=error_text(error))
