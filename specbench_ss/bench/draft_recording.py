"""Untimed passes: drafts of every step recorded after the samples, or one request profiled before them.

Greedy answers, and sampled ones with their seed, are reproduced. Methods with cross-request state are left out.

A profile covers kernels, copies and fills on a GPU, and top-level operators on a CPU. The profiler adds time, so times
in a trace do not measure a method's speed.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from specbench_ss.bench.schedule import Sample
from specbench_ss.engine.decoder import Decoder, DecoderWrapper, DecodeState, Generation
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Output
from specbench_ss.engine.tree import DraftTree
from specbench_ss.engine.verify import VerifyResult
from specbench_ss.errors import UserError, error_text, plugin_code
from specbench_ss.runs.config import Recording, RunConfig
from specbench_ss.runs.run_dir import DRAFTS, TRACES, Drafts, DraftStep, RunStore, read_drafts

MOST_STEPS = 256  # recorded steps of an answer
STATEFUL = "the method has cross-request state, so a second pass would differ"
DIGITS = 5  # of a probability


def samples_to_record(samples: Sequence[Sample], which: str, seed: int) -> list[Sample]:
    """Return the samples whose drafts are recorded: first turns and first repeats of some questions, every method.

    which: `first`, the first question of each task, or a share of all questions, sampled by the seed.
    """
    eligible = [s for s in samples if s.turn == 0 and s.repeat == 0]
    questions = list({s.question.id: s.question for s in eligible}.values())
    if which == "first":
        kept = {q.category: q.id for q in reversed(questions)}.values()
        return [s for s in eligible if s.question.id in set(kept)]
    many = round(float(which) * len(questions))
    chosen = {q.id for q in random.Random(f"drafts:{seed}").sample(questions, many)}
    return [s for s in eligible if s.question.id in chosen]


class Recorder(DecoderWrapper):
    """Wrapper that records the draft of each of a decoder's first steps."""

    name, summary = "recorder", "another decoder, whose drafts are kept"

    def __init__(self, inner: Decoder) -> None:
        super().__init__(inner)
        self.steps: list[DraftStep] = []
        self._drafted: DraftTree | None = None

    def forward(self, state: DecodeState, tree: DraftTree) -> Output:
        """Delegate to the wrapped decoder and keep the draft."""
        self._drafted = tree
        return self.inner.forward(state, tree)

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        """Delegate to the wrapped decoder and record the accepted tokens."""
        result = self.inner.accept(state, tree, output)
        if len(self.steps) < MOST_STEPS and self._drafted is not None:
            self.steps.append(draft_step(self.target, self._drafted, tree, output.logits[0], result, state.sampling))
        return result


def draft_step(
    target: Any, drafted: DraftTree, kept: DraftTree, logits: Tensor, result: VerifyResult, sampling: SamplingParams
) -> DraftStep:
    """Return the record of a step. logits [n, V]: of the n nodes of `kept`, the pruned tree of `drafted`."""
    tokens, parents = drafted.tokens.tolist(), list(drafted.topology.parents)
    index = places(drafted, kept)
    p: list[float | None] = [None] * len(tokens)
    for node, value in enumerate(_target_probs(kept, logits, sampling), start=1):
        p[index[node]] = value
    return DraftStep(
        tokens,
        parents,
        [_text(target, token) for token in tokens],
        path=[index[node] for node in result.path],
        next=int(result.next_token),
        next_text=_text(target, int(result.next_token)),
        pruned=sorted(set(range(len(tokens))) - set(index)),
        p=p,
        q=_draft_probs(drafted),
    )


def places(drafted: DraftTree, kept: DraftTree) -> list[int]:
    """Return the index of each kept node in the drafted tree, which has them in the same order.

    Raise ValueError if `kept` is no part of `drafted`.
    """
    tokens, wanted = drafted.tokens.tolist(), kept.tokens.tolist()
    index = [0]
    for node in range(1, len(kept)):
        parent = index[kept.topology.parents[node]]
        rest = range(index[-1] + 1, len(drafted))
        matches = (i for i in rest if tokens[i] == wanted[node] and drafted.topology.parents[i] == parent)
        number = next(matches, None)
        if number is None:
            raise ValueError("the verified tree is no part of the drafted one")
        index.append(number)
    return index


def _target_probs(kept: DraftTree, logits: Tensor, sampling: SamplingParams) -> list[float]:
    """Return the target's probability of every node but the root, given its parent; at T=0 that of T=1."""
    if len(kept) == 1:
        return []
    p = logits.float().softmax(-1) if sampling.greedy else sampling.probs(logits)
    return [round(x, DIGITS) for x in p[kept.parents()[1:], kept.tokens[1:]].tolist()]


def _draft_probs(drafted: DraftTree) -> list[float] | None:
    """Return the draft probability of each node; 1 for the root."""
    q = drafted.token_probs()
    return None if q is None else [1.0, *(round(x, DIGITS) for x in q[1:].tolist())]


def _text(target: Any, token: int) -> str:
    if target.tokenizer is None:
        return ""
    return str(target.tokenizer.decode([token], skip_special_tokens=False))


def recorded(sample: Sample, recorder: Recorder, again: Generation, timed: Sequence[int]) -> Drafts:
    """Return the draft record of an answer. again: the second pass. timed: the tokens of the first one.

    Raise RuntimeError if the recorded steps are not those of the answer.
    """
    if len(recorder.steps) != min(len(again.steps), MOST_STEPS):
        raise RuntimeError(f"{len(recorder.steps)} steps were recorded of an answer of {len(again.steps)}")
    same = again.tokens == list(timed)
    reason = "" if same else "the second pass gave another answer"
    reason = f"only the first {MOST_STEPS} steps are kept" if len(again.steps) > MOST_STEPS and same else reason
    return Drafts(*sample.key, same_answer=same, reason=reason, steps=recorder.steps)


Span = tuple[float, float]  # start and end, microseconds
BINS = 120  # of the timeline in the summary
MOST_TOKENS = 64  # of a traced answer: longer traces are too large for a viewer
NO_CHATTER = ("KINETO_LOG_LEVEL", "6")  # suppresses messages of the profiler's library on stderr ("USDT:")
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "hipLaunchKernel")


def traced(request: Callable[[], Generation], device: torch.device, file: Path) -> dict[str, Any]:
    """Profile a request, write its trace, and return its summary."""
    os.environ.setdefault(*NO_CHATTER)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as watched:
        tokens = len(request().tokens)
    file.parent.mkdir(parents=True, exist_ok=True)
    watched.export_chrome_trace(str(file))
    return summary(list(watched.events() or ()), tokens) | {"file": file.name}


def trace_file(label: str, taken: Sequence[str] = ()) -> str:
    """Return an unused file name of plain characters for a method's label."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", label).strip("-.") or "method"
    names = [f"{stem}{'' if not i else f'-{i}'}.json.gz" for i in range(len(taken) + 1)]
    return next(name for name in names if name not in taken)


def summary(events: Sequence[Any], tokens: int) -> dict[str, Any]:
    """Return the summary of a profile, JSON-ready; times in seconds.

    what: `kernels` or `operators`. busy_share: fraction of the time from the first to the last one with any running.
    launches_per_token: kernels launched by the host, or operators. gaps: their number, mean and longest. timeline: the
    busy share of equally long spans of `span_s`.
    """
    on_device = [e for e in events if e.device_type.name != "CPU"]
    chosen = on_device or [e for e in events if e.cpu_parent is None]
    spans = merged([(e.time_range.start, e.time_range.end) for e in chosen])
    if not spans:
        return {"what": "nothing", "tokens": tokens}
    first, last = spans[0][0], spans[-1][1]
    launched = sum(e.name.startswith(LAUNCHES) for e in events) if on_device else len(chosen)
    gaps = [b[0] - a[1] for a, b in zip(spans, spans[1:], strict=False)]
    return {
        "what": "kernels" if on_device else "operators",
        "tokens": tokens,
        "wall_s": (last - first) / 1e6,
        "busy_share": sum(b - a for a, b in spans) / (last - first) if last > first else 0.0,
        "launches_per_token": launched / tokens if tokens else None,
        "gaps": {
            "number": len(gaps),
            "mean_s": sum(gaps) / len(gaps) / 1e6 if gaps else 0.0,
            "longest_s": max(gaps, default=0.0) / 1e6,
        },
        "span_s": (last - first) / BINS / 1e6,
        "timeline": [round(share, 4) for share in timeline(spans, BINS)],
    }


def merged(spans: Sequence[Span]) -> list[Span]:
    """Return the union of spans as disjoint spans, in order."""
    union: list[Span] = []
    for start, end in sorted(spans):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((start, end))
    return union


def timeline(spans: Sequence[Span], bins: int) -> list[float]:
    """Return the share of each bin, from the first to the last span, that disjoint spans cover."""
    edges = np.linspace(spans[0][0], spans[-1][1], bins + 1)
    busy = np.cumsum([part for start, end in spans for part in (0.0, end - start)])  # until each start and end
    covered, width = np.diff(np.interp(edges, np.ravel(spans), busy)), np.diff(edges)
    return [float(share) for share in np.divide(covered, width, out=np.zeros(bins), where=width > 0).clip(0, 1)]


class Session(Protocol):
    """Interface of a session for second passes."""

    config: RunConfig
    recording: Recording
    run_dir: RunStore
    decoders: dict[str, Decoder]
    dropped: dict[str, str]

    def answer_again(self, decoder: Decoder, sample: Sample) -> Generation: ...
    def answer_prompt(self, label: str, prompt: list[int], most: int) -> Generation: ...
    def warn_and_keep(self, text: str) -> None: ...


class SecondPasses:
    """The untimed passes of a session's methods."""

    def __init__(self, session: Session) -> None:
        self.session, self.recording, self.run_dir = session, session.recording, session.run_dir
        self.decoders, self.answer, self.warn = session.decoders, session.answer_again, session.warn_and_keep

    def make(self, samples: Sequence[Sample], announce: Callable[[int], None]) -> None:
        """Record requested drafts that are missing. A failure only gives a warning.

        announce: called first with the number of answers that are decoded again, unless it is 0.
        """
        chosen = samples_to_record(samples, self.recording.record_drafts, self.session.config.seed)
        existing = {record.key for record in read_drafts(self.run_dir.path)} if chosen else set()
        missing = [sample for sample in chosen if sample.key not in existing]
        if missing:
            announce(len(missing))
        self.record_drafts(missing)

    def record_drafts(self, chosen: Sequence[Sample]) -> None:
        """Record the drafts of these answers, except failed ones."""
        for sample in chosen:
            row = self.run_dir.rows.get(sample.key)
            if row is not None and row.ok:
                line = self._drafts_of(sample, row.token_ids or [])
                if problem := self.run_dir.append_optional(DRAFTS, line):
                    self.warn(f"drafts are incomplete: {problem}")
                    return

    def _drafts_of(self, sample: Sample, timed: Sequence[int]) -> Drafts:
        decoder = self.decoders[sample.method]
        if decoder.stateful:
            return Drafts(*sample.key, reason=STATEFUL)
        recorder = Recorder(decoder)
        try:
            return recorded(sample, recorder, self.answer(recorder, sample), timed)
        except (Exception, SystemExit) as error:  # the samples are stored already
            self.warn(f"no drafts of {sample.method} on {sample.question.id}: {error_text(error)}")
            return Drafts(*sample.key, reason=error_text(error))

    def trace(self, prompt: list[int]) -> None:
        """Profile each method's answer to a warm-up prompt, after an unprofiled one. A failure only gives a warning."""
        traces: dict[str, dict[str, Any]] = dict(self.run_dir.manifest.get("traces") or {})
        for label, decoder in self.decoders.items():
            if label in traces or label in self.session.dropped:
                continue
            name = trace_file(label, [str(t.get("file")) for t in traces.values()])
            request = partial(self.session.answer_prompt, label, prompt, MOST_TOKENS)
            try:
                with plugin_code("profiling failed"), ExitStack() as end:
                    end.callback(decoder.reset_history)
                    request()
                    traces[label] = traced(request, decoder.target.device, self.run_dir.path / TRACES / name)
                self.run_dir.update(traces=traces)
            except UserError as error:  # the samples matter more
                self.warn(f"no trace of {label}: {error}")
