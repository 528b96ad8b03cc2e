"""Figures of single answers: decoding replayed pass by pass (22, 23), and device utilisation (17, 19)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from specbench_ss import registry
from specbench_ss.bench.draft_recording import Recorder
from specbench_ss.engine.decoder import Decoder
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.options import REFERENCE
from specbench_ss.reports import charts
from specbench_ss.reports.paper.experiment import (
    PaperExperiment,
    RunExperiment,
    config_for,
    missing_for,
    questions,
    spec_for,
    table,
)
from specbench_ss.reports.paper.figures import bars, plot
from specbench_ss.results.analysis import Results
from specbench_ss.results.report import BRACKETS, Bench, Experiment, Mark, Request, Result, Span, Value
from specbench_ss.runs.config import Recording, RunConfig

CHAIN = "ss[mode=chain,n_draft=0,prune=off]"
LEGEND = (
    "each line is a pass: the answer before it, then the drafted tokens that it accepted (green), the model's own "
    "token (bold), and rejected drafts (struck out). Without colours, accepted drafts have no mark, the model's own "
    f"token stands in {'so'.join(BRACKETS['next'])} and rejected drafts in {'so'.join(BRACKETS['rejected'])}. "
    "gamma = 4, k = 1 as in the paper"
)


@dataclass(frozen=True, slots=True)
class Pass:
    """One verification pass over a chain: its marked text, and the number of accepted drafts and tokens."""

    spans: tuple[Span, ...]
    accepted: int
    tokens: int

    def text(self, mark: Mark) -> str:
        """Return the text with this mark."""
        return next((span.text for span in self.spans if span.mark == mark), "")


def replay(decoder: Decoder, prompt: Sequence[int], limits: StopParams) -> Iterator[Pass]:
    """Yield every pass of a greedy answer. The first begins after prefill's token; counts are after the cut."""
    recorder = Recorder(decoder)
    made = generate(recorder, prompt, limits, SamplingParams())
    at = made.prefill_tokens
    for draft, step in zip(recorder.steps, made.steps, strict=True):
        accepted, end = min(step.accepted_tokens, step.tokens), at + step.tokens
        before, kept, after = (made.tokens[:n] for n in (at, at + accepted, end))
        parts: list[tuple[Mark, list[int], list[int]]] = [
            ("plain", [], before),
            ("accepted", before, kept),
            ("next", kept, after),
            ("rejected", kept, kept + draft.tokens[1 + accepted :]),
        ]
        texts = [Span(_added(decoder.target, known, ids), mark) for mark, known, ids in parts if len(ids) > len(known)]
        yield Pass(tuple(texts), accepted, step.tokens)
        at = end


def _added(target: Target, known: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text that ids add to the known ones, which they begin with; special tokens are written out."""
    whole, before = (str(target.tokenizer.decode(list(n), skip_special_tokens=False)) for n in (ids, known))
    return whole[len(before) :]


class _Replay(PaperExperiment):
    """One answer of the lab, pass by pass. --seed chooses the question."""

    uses = tuple(name for name in Experiment.uses if name != "limit")
    category: ClassVar[str]
    rows = {"SS-Lossless on {model}": CHAIN}

    def make(self, bench: Bench) -> Result:
        target = bench.target()
        category = questions(bench.request, "apps", self.category, 0)
        question = category[bench.request.seed % len(category)]
        decoder = registry.load_method(spec_for(bench.request, CHAIN), target)
        passes = list(replay(decoder, target.encode_chat(question.messages()), StopParams(128, target.eos_ids)))
        rows = [
            (i, p.text("accepted"), p.text("next"), p.text("rejected"), p.accepted, p.tokens)
            for i, p in enumerate(passes, start=1)
        ]
        forms = {
            "pass": "count", "accepted": "text", "own token": "text", "rejected": "text", "drafts accepted": "count",
            "tokens": "count",
        }  # fmt: skip
        grid = table("passes", forms, rows, f"{question.id}: one row a pass")
        tokens, steps = sum(p.tokens for p in passes), len(rows)
        notes = (
            f"asked: {' '.join(question.turns[0].split())}",
            f"{tokens} tokens in {steps} steps after prefill: τ {tokens / max(1, steps):.2f} on this one answer",
            LEGEND,
        )
        return Result((grid,), (), tuple(p.spans for p in passes), notes)


class Figure22(_Replay):
    """Figure 22: a query."""

    name, source = "figure-22", "EMNLP figure 22"
    title = "an SQL query, decoded pass by pass"
    category = "sql"


class Figure23(_Replay):
    """Figure 23: a summary."""

    name, source = "figure-23", "EMNLP figure 23"
    title = "a dialogue summary, decoded pass by pass"
    category = "dialogue_summary"


# -- utilisation ----------------------------------------------------------------------------------------------------

NAMES = {REFERENCE: "autoregressive", "sd": "draft and target", "ss": "speculative streaming", "medusa": "Medusa"}
ON_CPU = (
    "Without a GPU the chart shows the fraction of time in which an operator ran on the CPU. It measures the "
    "overhead of starting operators, not the efficiency of kernels."
)
COUNTED = (
    "Memory is the share of this machine's measured bandwidth that the counted bytes make up. It is missing "
    "without an earlier `ssbench doctor --calibrate`, and above 100 % if the weights fit in caches."
)


class _Utilisation(RunExperiment):
    """One run of some methods, with telemetry and traces.

    On a GPU both figures are of kernels and of NVML's readings. Without one they are of operators on the processor and
    of the memory bandwidth counted from shapes, with a note.
    """

    recording = Recording(telemetry=0.1, trace=True)
    published = "drawn, not printed: values of an NVIDIA A100 with OPT-1.3B and OPT-125M"

    def configs(self, request: Request) -> dict[str, RunConfig]:
        able = [method for method in self.rows.values() if method != REFERENCE and not missing_for(method, request)]
        return {"run": config_for(request, able, suite="specbench", limit=1, max_new_tokens=128)} if able else {}


class Figure17(_Utilisation):
    """Figure 17: the timeline of one request."""

    name, source = "figure-17", "EMNLP figure 17"
    title = "kernel utilisation over time, of one answer"
    rows = {NAMES[method]: method for method in ("sd", "ss")}

    def show(self, runs: Mapping[str, Results], request: Request) -> Result:
        """Show the busy share of equally long spans of time as lines."""
        traces: dict[str, Any] = runs["run"].manifest.get("traces") or {}
        found = {NAMES[m]: traces[m] for m in ("sd", "ss", REFERENCE) if traces.get(m, {}).get("timeline")}
        forms = {
            "method": "text", "of": "text", "busy": "percent 1", "tokens": "count", "launches per token": "number 1",
            "gaps": "count", "mean gap, µs": "number 1",
        }  # fmt: skip
        rows = [
            (name, t["what"], t["busy_share"], t["tokens"], t["launches_per_token"], t["gaps"]["number"],
             1e6 * t["gaps"]["mean_s"])
            for name, t in found.items()
        ]  # fmt: skip
        grid = table("timeline", forms, rows, "One answer under the profiler")
        series = {
            name: [(1e3 * t["span_s"] * (i + 0.5), share) for i, share in enumerate(t["timeline"])]
            for name, t in found.items()
        }
        what = next((str(t["what"]) for t in found.values()), "kernels")
        share = f"share of the time in which {what} ran"
        figure = plot("timeline", self.title, grid, charts.lines(series, "ms", share), yaxis_range=[0, 1])
        files = "The traces are in run/traces; Perfetto (https://ui.perfetto.dev) opens them."
        return Result((grid,), (figure,), notes=(files, *([ON_CPU] if what == "operators" else [])))


class Figure19(_Utilisation):
    """Figure 19: kernel and memory utilisation on average."""

    name, source = "figure-19", "EMNLP figure 19"
    title = "kernel and memory utilisation while each method decodes"
    rows = {NAMES[method]: method for method in (REFERENCE, "sd", "medusa", "ss")}

    def show(self, runs: Mapping[str, Results], request: Request) -> Result:
        """Show both as bars: NVML's where it was read, else those of the trace and of the counted bytes."""
        found = runs["run"].machine_rows
        read = any(row.nvml_kernel_busy is not None for row in found)
        rows: list[tuple[Value, ...]] = []
        for row in found:
            counted = (row.trace_busy_share, row.bandwidth_share)
            busy = (row.nvml_kernel_busy, row.nvml_memory_busy) if read else counted
            step_ms = None if row.step_s is None else 1e3 * row.step_s
            rows.append((NAMES.get(row.method, row.method), *busy, row.intensity, step_ms))
        forms = {
            "method": "text", "kernel": "percent 1", "memory": "percent 1", "FLOP per byte": "number",
            "step, ms": "number",
        }  # fmt: skip
        grid = table("utilisation", forms, rows, "Means over all samples")
        figure = bars("utilisation", self.title, grid, "method", ["kernel", "memory"], "share")
        return Result((grid,), (figure,), notes=() if read else (ON_CPU, COUNTED))
