"""Figures of single answers: decoding replayed pass by pass (22, 23), and device utilisation (17, 19)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from specbench_ss import registry
from specbench_ss.engine.decoder import Decoder, State, Wrapped
from specbench_ss.engine.generate import Limits, generate
from specbench_ss.engine.sampling import Sampling
from specbench_ss.engine.target import Target
from specbench_ss.engine.tree import DraftTree
from specbench_ss.options import REFERENCE
from specbench_ss.reports.paper.claims import number_or_none
from specbench_ss.reports.paper.experiment import (
    ACL,
    PaperExperiment,
    config_for,
    first_turn,
    health,
    machine,
    missing_for,
    questions,
    source,
    table,
)
from specbench_ss.reports.paper.figures import Axis, Points, Text, bars, lines
from specbench_ss.results.analysis import analyse
from specbench_ss.results.cost_model import MachineRow
from specbench_ss.results.report import Bench, Experiment, Mark, Part, Request, Result, Span, Value
from specbench_ss.results.terminal import BRACKETS
from specbench_ss.runs.config import Recording, RunConfig
from specbench_ss.runs.records import Run

CHAIN = "ss[mode=chain,n_draft=0,prune=off]"
LEGEND = (
    "each line is a pass: the answer before it, then the drafted tokens that it accepted (green), the model's own "
    "token (bold), and rejected drafts (struck out). Without colours, accepted drafts have no mark, the model's own "
    f"token stands in {'so'.join(BRACKETS['next'])} and rejected drafts in {'so'.join(BRACKETS['rejected'])}. "
    "gamma = 4, k = 1 as in the paper"
)


class Watched(Wrapped):
    """A decoder that keeps its drafts: drafts[i] are the tokens drafted for step i."""

    def __init__(self, inner: Decoder) -> None:
        super().__init__(inner)
        self.name = inner.name  # type: ignore[misc] # what the loop's messages call it
        self.drafts: list[list[int]] = []

    def propose(self, state: State) -> DraftTree:
        """Draft as the wrapped decoder, and keep the draft."""
        tree = self.inner.propose(state)
        self.drafts.append(tree.tokens[1:].tolist())
        return tree


@dataclass(frozen=True, slots=True)
class Pass:
    """One verifying pass over a chain: the answer before and after it, the drafted tokens, how many were accepted."""

    before: list[int]
    drafted: list[int]
    accepted: int
    after: list[int]


def replay(decoder: Decoder, prompt: Sequence[int], limits: Limits) -> list[Pass]:
    """Return every pass of a greedy answer. The first begins after prefill's token.

    Accepted counts are after the cut.
    """
    watched = Watched(decoder)
    made = generate(watched, prompt, limits, Sampling())
    found, at = [], made.prefill_tokens
    for drafted, step in zip(watched.drafts, made.steps, strict=True):
        end = at + step.tokens
        found.append(Pass(made.tokens[:at], drafted, min(step.accepted, step.tokens), made.tokens[:end]))
        at = end
    return found


def line(target: Target, p: Pass) -> list[Span]:
    """Return the answer before the pass, what was accepted, the model's own token (unless cut), what was rejected."""
    n = len(p.before)
    kept = p.after[: n + p.accepted]
    parts: list[tuple[Mark, list[int], list[int]]] = [
        ("plain", [], p.before),
        ("accepted", p.before, kept[n:]),
        ("next", kept, p.after[len(kept) :]),
        ("rejected", kept, p.drafted[p.accepted :]),
    ]
    return [Span(_added(target, known, ids), mark) for mark, known, ids in parts if ids]


def _added(target: Target, known: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text that these tokens add, with special tokens written out."""

    def text(ids: Sequence[int]) -> str:
        return str(target.tokenizer.decode(list(ids), skip_special_tokens=False))

    return text([*known, *ids])[len(text(known)) :]


class _Replay(PaperExperiment):
    """One answer of the lab, pass by pass. --seed chooses the question."""

    uses = tuple(name for name in Experiment.uses if name != "limit")
    category: ClassVar[str]

    def parts(self, request: Request) -> Sequence[Part]:
        """Return a single row for the one answer."""
        return [Part(f"SS-Lossless on {request.model}", missing_for(CHAIN, request))]

    def make(self, bench: Bench) -> Result:
        """Decode one prompt and mark every drafted token as accepted or rejected."""
        target = bench.target()
        category = questions(bench.request, "apps", self.category, 0)
        question = category[bench.request.seed % len(category)]
        decoder = registry.load_method(config_for(bench.request, [CHAIN]).methods[1], target)
        passes = replay(decoder, first_turn(target, question), Limits(128, target.eos_ids))
        lines = [tuple(line(target, p)) for p in passes]
        rows = [_pass_row(i, p, spans) for i, (p, spans) in enumerate(zip(passes, lines, strict=True), start=1)]
        forms = {
            "pass": "count", "accepted": "text", "own token": "text", "rejected": "text", "drafts accepted": "count",
            "tokens": "count",
        }  # fmt: skip
        grid = table("passes", forms, rows, f"{question.id}: one row a pass")
        tokens, steps = sum(len(p.after) - len(p.before) for p in passes), len(rows)
        notes = (
            f"asked: {' '.join(question.turns[0].split())}",
            f"{tokens} tokens in {steps} passes after prefill: tau {tokens / max(1, steps):.2f} on this one answer",
            LEGEND,
        )
        return Result((grid,), (), tuple(lines), notes)


def _pass_row(number: int, p: Pass, spans: Sequence[Span]) -> tuple[Value, ...]:
    texts = [next((s.text for s in spans if s.mark == mark), "") for mark in ("accepted", "next", "rejected")]
    return (number, *texts, p.accepted, len(p.after) - len(p.before))


class Figure22(_Replay):
    """Figure 22: a query."""

    name, source = "figure-22", source(ACL, "figure", 22)
    title = "an SQL query, decoded pass by pass"
    category = "sql"


class Figure23(_Replay):
    """Figure 23: a summary."""

    name, source = "figure-23", source(ACL, "figure", 23)
    title = "a dialogue summary, decoded pass by pass"
    category = "dialogue_summary"


# -- utilisation ----------------------------------------------------------------------------------------------------

NAMES = {REFERENCE: "autoregressive", "sd": "draft and target", "ss": "speculative streaming", "medusa": "Medusa"}
ON_CPU = (
    "There is no GPU here: what is shown is the share of the time in which an operator ran on the processor. It tells "
    "how much of the time goes into starting operators, and nothing of how well a kernel uses a device."
)
COUNTED = (
    "Memory is the share of this machine's measured bandwidth that the counted bytes make up. It is missing where "
    "`ssbench doctor --calibrate` was not run before, and above 100 % where caches hold the weights."
)
DRAWN = "The paper draws its values, measured on an NVIDIA A100 with OPT-1.3B and OPT-125M, and prints none."


class _Utilisation(PaperExperiment):
    """One run of some methods, with telemetry and traces.

    On a GPU both figures are of kernels and of NVML's readings. Without one they are of operators on the processor and
    of the memory bandwidth counted from shapes, and say so.
    """

    methods: ClassVar[tuple[str, ...]]
    recording = Recording(telemetry=0.1, trace=True)

    def parts(self, request: Request) -> Sequence[Part]:
        """Return a row for each method."""
        return [Part(NAMES[m], "" if m == REFERENCE else missing_for(m, request)) for m in self.methods]

    def configs(self, request: Request) -> dict[str, RunConfig]:
        """Return the one run, of the methods that can run."""
        able = [m for m in self.methods if m != REFERENCE and not missing_for(m, request)]
        return {"run": config_for(request, able, suite="specbench", limit=1, max_new_tokens=128)} if able else {}

    def able(self, request: Request) -> bool:
        """Return whether a method besides plain decoding can run."""
        return bool(self.configs(request))

    def make(self, bench: Bench) -> Result:
        """Make the run, and show what was recorded."""
        run = bench.measure(self.configs(bench.request)["run"], "run")
        result = self.show(run)
        return replace(result, notes=(*result.notes, DRAWN, machine(run), *health(run)))

    @abstractmethod
    def show(self, run: Run) -> Result:
        """Return the figure."""


class Figure17(_Utilisation):
    """Figure 17: the timeline of one request."""

    name, source = "figure-17", source(ACL, "figure", 17)
    title = "kernel utilisation over time, of one answer"
    methods = ("sd", "ss")

    def show(self, run: Run) -> Result:
        """Show the busy share of equally long spans of time as lines."""
        traces: dict[str, Any] = run.manifest.get("traces") or {}
        found = {m: traces[m] for m in (*self.methods, REFERENCE) if traces.get(m, {}).get("timeline")}
        forms = {
            "method": "text", "of": "text", "busy": "percent 1", "tokens": "count", "launches per token": "number 1",
            "gaps": "count", "mean gap, µs": "number 1",
        }  # fmt: skip
        rows = [
            (NAMES[method], t["what"], t["busy_share"], t["tokens"], t["launches_per_token"], t["gaps"]["number"],
             1e6 * t["gaps"]["mean_s"])
            for method, t in found.items()
        ]  # fmt: skip
        grid = table("timeline", forms, rows, "One answer under the profiler")
        series: dict[str, Points] = {
            NAMES[method]: [(1e3 * t["span_s"] * (i + 0.5), share) for i, share in enumerate(t["timeline"])]
            for method, t in found.items()
        }
        what = next((str(t["what"]) for t in found.values()), "kernels")
        label = f"Line chart: share of the time in which {what} ran, over one answer of each method."
        y = Axis(f"share of the time in which {what} ran", bounds=(0, 1))
        plot = lines(Text("timeline", self.title, label), series, grid, Axis("ms"), y)
        files = "The traces are in run/traces; Perfetto (https://ui.perfetto.dev) opens them."
        return Result((grid,), (plot,), notes=(files, *([ON_CPU] if what == "operators" else [])))


class Figure19(_Utilisation):
    """Figure 19: kernel and memory utilisation on average."""

    name, source = "figure-19", source(ACL, "figure", 19)
    title = "kernel and memory utilisation while each method decodes"
    methods = (REFERENCE, "sd", "medusa", "ss")

    def show(self, run: Run) -> Result:
        """Show both as bars: NVML's where it was read, else those of the trace and of the counted bytes."""
        found = analyse(run).machine_rows
        read = any(row.nvml_kernel_busy is not None for row in found)
        forms = {
            "method": "text", "kernel": "percent 1", "memory": "percent 1", "FLOP per byte": "number",
            "step, ms": "number",
        }  # fmt: skip
        rows = [_mean(row, read) for row in found]
        grid = table("utilisation", forms, rows, "Means over all samples")
        series = {
            title: [(row[0], number_or_none(row[place])) for row in rows]
            for place, title in ((1, "kernel"), (2, "memory"))
        }
        text = Text("utilisation", self.title, "Bar chart: kernel and memory utilisation of each method.")
        return Result((grid,), (bars(text, series, grid, Axis("share")),), notes=() if read else (ON_CPU, COUNTED))


def _mean(row: MachineRow, read: bool) -> tuple[Value, ...]:
    busy = (row.nvml_kernel_busy, row.nvml_memory_busy) if read else (row.trace_busy_share, row.bandwidth_share)
    return (NAMES.get(row.method, row.method), *busy, row.intensity, None if row.step_s is None else 1e3 * row.step_s)
