"""Untimed second passes: drafts of every step recorded, or one request profiled.

Greedy answers, and sampled ones with their seed, come out the same again. Methods that remember prompts are left out.

On a GPU it is of kernels, copies and fills; on a processor of operators that no other operator called. The profiler
takes time itself, so times in a trace are no measurement of a method's speed.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Sequence
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
from specbench_ss.errors import error_text
from specbench_ss.runs.config import Recording, RunConfig
from specbench_ss.runs.run_dir import DRAFTS, TRACES, Drafts, DraftStep, RunStore, read_drafts

MOST_STEPS = 256  # recorded of an answer, so that a record stays small
REMEMBERS = "the method remembers prompts: a second pass would be answered from memory"
DIGITS = 5  # of a probability


def samples_to_record(samples: Sequence[Sample], which: str, seed: int) -> list[Sample]:
    """Return the samples whose drafts are recorded: first turns and first repeats of some questions, every method.

    which: `first`, the first question of each task, or a share of all questions, drawn by the seed.
    """
    own = [s for s in samples if s.turn == 0 and s.repeat == 0]
    questions = list({s.question.id: s.question for s in own}.values())
    if which == "first":
        kept = {q.category: q.id for q in reversed(questions)}.values()
        return [s for s in own if s.question.id in set(kept)]
    many = round(float(which) * len(questions))
    drawn = {q.id for q in random.Random(f"drafts:{seed}").sample(questions, many)}
    return [s for s in own if s.question.id in drawn]


class Recorder(DecoderWrapper):
    """Wraps another decoder, and keeps the draft of each of its first steps."""

    name, summary = "recorder", "another decoder, whose drafts are kept"

    def __init__(self, inner: Decoder) -> None:
        super().__init__(inner)
        self.steps: list[DraftStep] = []
        self._drafted: DraftTree | None = None

    def forward(self, state: DecodeState, tree: DraftTree) -> Output:
        """Delegates to the wrapped decoder, and keeps the draft as it was verified against."""
        self._drafted = tree
        return self.inner.forward(state, tree)

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        """Delegates to the wrapped decoder, and keeps what was accepted."""
        verdict = self.inner.accept(state, tree, output)
        if len(self.steps) < MOST_STEPS and self._drafted is not None:
            self.steps.append(draft_step(self.target, self._drafted, tree, output.logits[0], verdict, state.sampling))
        return verdict


def draft_step(
    target: Any, drafted: DraftTree, kept: DraftTree, logits: Tensor, verdict: VerifyResult, sampling: SamplingParams
) -> DraftStep:
    """Return the record of a step. logits [n, V]: of the n nodes of `kept`, what is left of `drafted`."""
    tokens, parents = drafted.tokens.tolist(), list(drafted.topology.parents)
    place = places(drafted, kept)
    p: list[float | None] = [None] * len(tokens)
    for node, value in enumerate(_target_probs(kept, logits, sampling), start=1):
        p[place[node]] = value
    return DraftStep(
        tokens,
        parents,
        [_text(target, token) for token in tokens],
        path=[place[node] for node in verdict.path],
        next=int(verdict.next_token),
        next_text=_text(target, int(verdict.next_token)),
        pruned=sorted(set(range(len(tokens))) - set(place)),
        p=p,
        q=_draft_probs(drafted),
    )


def places(drafted: DraftTree, kept: DraftTree) -> list[int]:
    """Return for each kept node its number in the drafted tree: the kept ones are in the same order there.

    Raises ValueError where `kept` is no part of `drafted`.
    """
    tokens, wanted = drafted.tokens.tolist(), kept.tokens.tolist()
    found = [0]
    for node in range(1, len(kept)):
        parent = found[kept.topology.parents[node]]
        rest = range(found[-1] + 1, len(drafted))
        here = (i for i in rest if tokens[i] == wanted[node] and drafted.topology.parents[i] == parent)
        number = next(here, None)
        if number is None:
            raise ValueError("the verified tree is no part of the drafted one")
        found.append(number)
    return found


def _target_probs(kept: DraftTree, logits: Tensor, sampling: SamplingParams) -> list[float]:
    """Return the target's probability of every node but the root, behind its parent; at T=0 that of T=1."""
    if len(kept) == 1:
        return []
    p = logits.float().softmax(-1) if sampling.greedy else sampling.probs(logits)
    return [round(x, DIGITS) for x in p[kept.parents()[1:], kept.tokens[1:]].tolist()]


def _draft_probs(drafted: DraftTree) -> list[float] | None:
    """With which probability each node was drawn; that of the root is 1."""
    if drafted.draft_probs is None:
        return None
    q = drafted.draft_probs[drafted.parents(), drafted.tokens].tolist()
    return [1.0, *(round(x, DIGITS) for x in q[1:])]


def _text(target: Any, token: int) -> str:
    if target.tokenizer is None:
        return ""
    return str(target.tokenizer.decode([token], skip_special_tokens=False))


def recorded(sample: Sample, recorder: Recorder, again: Generation, timed: Sequence[int]) -> Drafts:
    """Return the record of an answer. again: the second pass. timed: the tokens of the first one.

    Raises RuntimeError where other steps were recorded than those of the answer.
    """
    if len(recorder.steps) != min(len(again.steps), MOST_STEPS):
        raise RuntimeError(f"{len(recorder.steps)} steps were recorded of an answer of {len(again.steps)}")
    same = again.tokens == list(timed)
    reason = "" if same else "the second pass gave another answer"
    reason = f"only the first {MOST_STEPS} steps are kept" if len(again.steps) > MOST_STEPS and same else reason
    return Drafts(*sample.key, same_answer=same, reason=reason, steps=recorder.steps)


Span = tuple[float, float]  # start and end, microseconds
BINS = 120  # of the timeline in the summary
MOST_TOKENS = 64  # of a traced answer: a trace of hundreds is too large to look at
NO_CHATTER = ("KINETO_LOG_LEVEL", "6")  # the profiler's library else says on stderr when it starts and stops: "USDT:"
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "hipLaunchKernel")


def traced(request: Callable[[], int], device: torch.device, file: Path) -> dict[str, Any]:
    """Profile a request, write its trace, and return its summary. request: answers, and returns how many tokens."""
    os.environ.setdefault(*NO_CHATTER)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as watched:
        tokens = request()
    file.parent.mkdir(parents=True, exist_ok=True)
    watched.export_chrome_trace(str(file))
    return summary(list(watched.events() or ()), tokens) | {"file": file.name}


def trace_file(label: str, taken: Sequence[str] = ()) -> str:
    """Return a file name of plain characters for a method's label; another one than those taken."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", label).strip("-.") or "method"
    names = [f"{stem}{'' if not i else f'-{i}'}.json.gz" for i in range(len(taken) + 1)]
    return next(name for name in names if name not in taken)


def summary(events: Sequence[Any], tokens: int) -> dict[str, Any]:
    """Return what a profile adds up to, as JSON-ready data; times in seconds.

    what: `kernels` or `operators`. busy_share: share of the time from the first one to the last one in which any ran.
    launches_per_token: kernels that the host started, or operators. gaps: their number, mean and longest. timeline: the
    busy share of each of equally long spans of `span_s`.
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
    """Return the union of spans, as spans that do not touch, in order."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def timeline(spans: Sequence[Span], bins: int) -> list[float]:
    """Return the share of each bin, from the first span to the last one, that spans which do not touch cover."""
    edges = np.linspace(spans[0][0], spans[-1][1], bins + 1)
    busy = np.cumsum([part for start, end in spans for part in (0.0, end - start)])  # until each start and end
    covered, width = np.diff(np.interp(edges, np.ravel(spans), busy)), np.diff(edges)
    return [float(share) for share in np.divide(covered, width, out=np.zeros(bins), where=width > 0).clip(0, 1)]


class Session(Protocol):
    """As much of a session as second passes need."""

    config: RunConfig
    recording: Recording
    run_dir: RunStore
    decoders: dict[str, Decoder]

    def answer_again(self, decoder: Decoder, sample: Sample, most: int | None = None) -> Generation: ...
    def warn_and_keep(self, text: str) -> None: ...


class PostRunPasses:
    """The second passes of a session's methods."""

    def __init__(self, session: Session) -> None:
        self.session, self.recording, self.run_dir = session, session.recording, session.run_dir
        self.decoders, self.answer, self.warn = session.decoders, session.answer_again, session.warn_and_keep

    def make(self, samples: Sequence[Sample]) -> None:
        """Record what was asked for and is not there yet. A failure is told, and ends no run."""
        chosen = samples_to_record(samples, self.recording.record_drafts, self.session.config.seed)
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
        if decoder.stateful:
            return Drafts(*sample.key, reason=REMEMBERS)
        recorder = Recorder(decoder)
        try:
            return recorded(sample, recorder, self.answer(recorder, sample, None), timed)
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
            name = trace_file(label, [str(t.get("file")) for t in traces.values()])
            request = partial(self._tokens, decoder, sample)
            try:
                request()
                file = self.run_dir.path / TRACES / name
                found = traced(request, decoder.target.device, file)
                traces[label] = found | {"question_id": sample.question.id}
                self.run_dir.update(traces=traces)
            except Exception as error:  # the samples are there: nothing of them is lost
                self.warn(f"no trace of {label}: {error_text(error)}")
            decoder.reset_history()

    def _tokens(self, decoder: Decoder, sample: Sample) -> int:
        return len(self.answer(decoder, sample, MOST_TOKENS).tokens)
