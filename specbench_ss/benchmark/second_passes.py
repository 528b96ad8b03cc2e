"""What a run does after its last timed sample: answers again, untimed, with drafts recorded or under the profiler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from specbench_ss.benchmark import drafts, tracing
from specbench_ss.benchmark.schedule import Sample
from specbench_ss.benchmark.tracing import MOST_TOKENS
from specbench_ss.decoding.decoder import Decoder
from specbench_ss.decoding.generation import Generation
from specbench_ss.errors import error_text
from specbench_ss.runs.config import Recording
from specbench_ss.runs.ledger import Ledger
from specbench_ss.runs.side_files import DRAFTS, TRACES, Drafts, read_drafts

Answer = Callable[[Decoder, Sample, int | None], Generation]


class SecondPasses:
    """answer(decoder, sample, most): answers the sample's prompt with its seed, unrecorded, with `most` tokens."""

    def __init__(
        self,
        recording: Recording,
        decoders: Mapping[str, Decoder],
        run_dir: Ledger,
        answer: Answer,
        warn: Callable[[str], None],
    ) -> None:
        self.recording, self.decoders, self.run_dir = recording, decoders, run_dir
        self.answer, self.warn = answer, warn

    def make(self, samples: Sequence[Sample], seed: int) -> None:
        """Record what was asked for and is not there yet. A failure is told, and ends no run."""
        chosen = drafts.chosen(samples, self.recording.record_drafts, seed)
        there = {one.key for one in read_drafts(self.run_dir.path)} if chosen else set()
        self.record_drafts([sample for sample in chosen if sample.key not in there])
        if self.recording.trace:
            self._trace(samples)

    def record_drafts(self, chosen: Sequence[Sample]) -> None:
        """Record the drafts of these answers, as far as they are good."""
        for sample in chosen:
            row = self.run_dir.rows.get(sample.key)
            if row is not None and row.ok:
                line = self._drafts_of(sample, row.token_ids or [])
                if problem := self.run_dir.append_beside(DRAFTS, line.as_dict()):
                    self.warn(f"drafts are incomplete: {problem}")
                    return

    def _drafts_of(self, sample: Sample, timed: Sequence[int]) -> Drafts:
        decoder = self.decoders[sample.method]
        if decoder.remembers:
            return Drafts(*sample.key, reason=drafts.REMEMBERS)
        recorder = drafts.Recorder(decoder)
        try:
            return drafts.recorded(sample, recorder, self.answer(recorder, sample, None), timed)
        except Exception as error:  # the samples are there: nothing of them is lost
            self.warn(f"no drafts of {sample.method} on {sample.question.id}: {error_text(error)}")
            return Drafts(*sample.key, reason=error_text(error))

    def _trace(self, samples: Sequence[Sample]) -> None:
        """Profile each method's first good request, after the same one unprofiled."""
        traces: dict[str, dict[str, Any]] = dict(self.run_dir.manifest.get("traces") or {})
        for label, decoder in self.decoders.items():
            of_method = (s for s in samples if s.method == label and s.key in self.run_dir.rows)
            sample = next((s for s in of_method if self.run_dir.rows[s.key].ok), None)
            if sample is None or label in traces:
                continue
            name = tracing.trace_file(label, [str(t.get("file")) for t in traces.values()])
            request = partial(self._tokens, decoder, sample)
            try:
                request()
                file = self.run_dir.path / TRACES / name
                found = tracing.traced(request, decoder.target.device, file)
                traces[label] = found | {"question_id": sample.question.id}
                self.run_dir.update(traces=traces)
            except Exception as error:  # the samples are there: nothing of them is lost
                self.warn(f"no trace of {label}: {error_text(error)}")
            decoder.forget()

    def _tokens(self, decoder: Decoder, sample: Sample) -> int:
        return len(self.answer(decoder, sample, MOST_TOKENS).tokens)
