"""Figures 17 and 19: how busy the device is while methods decode, over time and on average.

On a GPU they are of kernels and of NVML's readings. Where there is none, they are of operators on the processor and of
the memory bandwidth counted from shapes, and say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from specbench_ss.options import REFERENCE
from specbench_ss.reports.paper.figures import ACL, axes, bars, health, lines, machine, source
from specbench_ss.reports.paper.missing_parts import config_for, nothing_runs, of_method
from specbench_ss.results.cost_model import MachineRow, machine_rows
from specbench_ss.results.report import Bench, Column, Experiment, Grid, Part, Plot, Request, Result, Value
from specbench_ss.runs.config import Recording, RunConfig
from specbench_ss.runs.records import Run

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


class _Utilisation(Experiment):
    """What both figures share: one run of these methods, with its readings and its traces."""

    methods: ClassVar[tuple[str, ...]]
    recording = Recording(telemetry=0.1, trace=True)

    def parts(self, request: Request) -> Sequence[Part]:
        """Return a row for each method."""
        return [Part(NAMES[m], "" if m == REFERENCE else of_method(m, request)) for m in self.methods]

    def configs(self, request: Request) -> dict[str, RunConfig]:
        """Return the one run, of the methods that can run."""
        able = [m for m in self.methods if m != REFERENCE and not of_method(m, request)]
        return {"run": config_for(request, able, suite="specbench", limit=1, max_new_tokens=128)} if able else {}

    def run(self, bench: Bench) -> Result:
        """Make the run, and show what was recorded of it. Raises UserError where no row can run."""
        configs = self.configs(bench.request)
        if not configs:
            raise nothing_runs(self.name, self.parts(bench.request))
        run = bench.measure(configs["run"], "run")
        result = self.show(run)
        return Result(result.grids, result.plots, notes=(*result.notes, DRAWN, machine(run), *health(run)))

    def show(self, run: Run) -> Result:
        """Return the figure."""
        raise NotImplementedError


class Figure17(_Utilisation):
    """Figure 17: the timeline of one request."""

    name, source = "figure-17", source(ACL, "figure", 17)
    title = "kernel utilisation over time, of one answer"
    methods = ("sd", "ss")

    def show(self, run: Run) -> Result:
        """Show the busy share of equally long spans of time as lines."""
        traces: dict[str, Any] = run.manifest.get("traces") or {}
        found = {m: traces[m] for m in (*self.methods, REFERENCE) if traces.get(m, {}).get("timeline")}
        columns = (
            Column("method", "text"), Column("of", "text"), Column("busy", "percent", 1), Column("tokens", "count"),
            Column("launches per token", "number", 1), Column("gaps", "count"), Column("mean gap, µs", "number", 1),
        )  # fmt: skip
        rows = tuple(_traced(NAMES[method], trace) for method, trace in found.items())
        grid = Grid("timeline", columns, rows, "One answer under the profiler")
        series: dict[str, list[tuple[float, float | None]]] = {
            NAMES[method]: [(1e3 * t["span_s"] * (i + 0.5), share) for i, share in enumerate(t["timeline"])]
            for method, t in found.items()
        }
        what = next((str(t["what"]) for t in found.values()), "kernels")
        label = f"Line chart: share of the time in which {what} ran, over one answer of each method."
        layout = axes("ms", f"share of the time in which {what} ran", range=[0, 1])
        plot = Plot("timeline", self.title, label, lines(series), layout, grid)
        files = "The traces are in run/traces; Perfetto (https://ui.perfetto.dev) opens them."
        return Result((grid,), (plot,), notes=(files, *([ON_CPU] if what == "operators" else [])))


def _traced(name: str, trace: dict[str, Any]) -> tuple[Value, ...]:
    gaps = trace["gaps"]
    return (
        name, trace["what"], trace["busy_share"], trace["tokens"], trace["launches_per_token"], gaps["number"],
        1e6 * gaps["mean_s"],
    )  # fmt: skip


class Figure19(_Utilisation):
    """Figure 19: kernel and memory utilisation on average."""

    name, source = "figure-19", source(ACL, "figure", 19)
    title = "kernel and memory utilisation while each method decodes"
    methods = (REFERENCE, "sd", "medusa", "ss")

    def show(self, run: Run) -> Result:
        """Show both as bars: NVML's where it was read, else what the trace and the counted bytes tell."""
        rows = machine_rows(run)
        read = any(row.nvml_kernel_busy is not None for row in rows)
        columns = (
            Column("method", "text"), Column("kernel", "percent", 1), Column("memory", "percent", 1),
            Column("FLOP per byte", "number", 2), Column("step, ms", "number", 2),
        )  # fmt: skip
        cells = tuple(_mean(row, read) for row in rows)
        grid = Grid("utilisation", columns, cells, "Means over all samples")
        pairs = [(row, values) for row, values in zip(rows, cells, strict=True)]
        series = {
            title: [(NAMES.get(row.method, row.method), _number(values[place])) for row, values in pairs]
            for place, title in ((1, "kernel"), (2, "memory"))
        }
        label = "Bar chart: kernel and memory utilisation of each method."
        plot = Plot("utilisation", self.title, label, bars(series), axes("", "share"), grid)
        return Result((grid,), (plot,), notes=() if read else (ON_CPU, COUNTED))


def _mean(row: MachineRow, read: bool) -> tuple[Value, ...]:
    busy = (row.nvml_kernel_busy, row.nvml_memory_busy) if read else (row.trace_busy_share, row.bandwidth_share)
    return (NAMES.get(row.method, row.method), *busy, row.intensity, None if row.step_s is None else 1e3 * row.step_s)


def _number(value: Value) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None
