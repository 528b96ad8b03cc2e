"""Machine and servers: roofline, counted cost of a step, device readings, timeline, requests in flight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specbench_ss.options import REFERENCE
from specbench_ss.reports import charts
from specbench_ss.reports.html.page_parts import Cell, Chart, Column, Table, figure, plain
from specbench_ss.reports.palette import Style
from specbench_ss.results import ranking
from specbench_ss.results.concurrency import LevelRow, level_rows
from specbench_ss.results.cost_model import MachineRow, Point, Roof
from specbench_ss.results.summary import SummaryRow
from specbench_ss.results.text import interval, number, percent, times
from specbench_ss.runs.records import Run


@dataclass(frozen=True, slots=True)
class _Figure:
    """A column. field: of `MachineRow`. per: what one unit of the column is in the field's own unit."""

    title: str
    field: str
    help: str
    per: float = 1.0
    digits: int = 2
    unit: str = ""

    def cell(self, row: MachineRow) -> Cell:
        value = getattr(row, self.field)
        return figure(None if value is None else value / self.per, self.digits, self.unit)


COUNTED = (
    _Figure(
        "decoding speedup", "decode_speedup", f"τ times the step of {REFERENCE} over the method's: no prefill", unit="×"
    ),
    _Figure(
        "at the limits", "predicted_speedup", f"τ times the fastest step of {REFERENCE} over the method's", unit="×"
    ),
    _Figure("step, ms", "step_s", "Mean milliseconds of a step, as measured", 1e-3),
    _Figure("fastest step, ms", "fastest_step_s", "Milliseconds of a step that reaches the nearer limit", 1e-3),
    _Figure(
        "bandwidth",
        "bandwidth_share",
        "Counted bytes per second over the measured bandwidth; above 100 % where caches hold the weights",
        0.01,
        0,
        "%",
    ),
    _Figure("products", "compute_share", "Counted operations per second over the measured limit", 0.01, 1, "%"),
    _Figure("GFLOP", "flops_per_step", "Operations of a step, counted from shapes, the drafter's included", 1e9),
    _Figure("MB", "bytes_per_step", "Bytes that a step reads, counted from shapes, the drafter's included", 1e6, 1),
    _Figure("drafter's MB", "drafter_bytes_per_step", "Of these, weights of the method's own drafter", 1e6, 1),
    _Figure("FLOP/byte", "intensity", "Arithmetic intensity: operations for each byte that is read", digits=1),
)
READ = (
    _Figure("samples", "samples", "Good samples", digits=0),
    _Figure("disturbed", "disturbed", "Of these, samples that something else on the machine disturbed", digits=0),
    _Figure("made again", "remade", "How often disturbed samples were made again", digits=0),
    _Figure("own cores", "host_cpu_share", "Share of the usable cores that this process took", 0.01, 0, "%"),
    _Figure("others", "host_foreign_share", "Share of the usable cores that everything else took", 0.01, 0, "%"),
    _Figure("kernels", "nvml_kernel_busy", "Share of the time in which any kernel ran, by NVML", 0.01, 0, "%"),
    _Figure("memory", "nvml_memory_busy", "Share of the time in which device memory was used, by NVML", 0.01, 0, "%"),
    _Figure("SMs", "gpm_sm_active", "Share of the multiprocessors that were busy, by GPM", 0.01, 0, "%"),
    _Figure("tensor cores", "gpm_tensor_active", "Share of the time in which tensor cores worked", 0.01, 0, "%"),
    _Figure("DRAM", "gpm_dram_active", "Share of the device memory's bandwidth that was used", 0.01, 0, "%"),
    _Figure("W", "nvml_power_w", "Mean power of the device, in watts", digits=0),
    _Figure("J per token", "joules_per_token", "Energy of all samples over the tokens of their answers"),
    _Figure(
        "traced busy",
        "trace_busy_share",
        "Of one request under the profiler: share of the time in which a kernel ran, on a CPU an operator",
        0.01,
        0,
        "%",
    ),
    _Figure("launches per token", "trace_launches_per_token", "Kernels, on a CPU operators, of that request", digits=0),
)


def counted(rows: Sequence[MachineRow], styles: Mapping[str, Style]) -> Table | None:
    """Show what a step costs by its shapes, and what the machine's limits make of that; None where shapes are lacking.

    A run that was made before shapes were recorded has none.
    """
    known = [row for row in rows if row.flops_per_step is not None]
    caption = "One step, counted from shapes: what it computes and reads, and what this machine could make of it"
    return _table("machine-counted", COUNTED, known, styles, caption)


def read(rows: Sequence[MachineRow], styles: Mapping[str, Style]) -> Table | None:
    """Show what was read while samples were made; None where nothing was."""
    known = [row for row in rows if any(getattr(row, one.field) is not None for one in READ[3:])]
    return _table("machine-read", READ, known, styles, "Readings while the samples were made, weighted by time")


def _table(
    name: str, figures: Sequence[_Figure], rows: Sequence[MachineRow], styles: Mapping[str, Style], caption: str
) -> Table | None:
    """Return a table of the columns that have a value, None where there is no row."""
    shown = [one for one in figures if any(getattr(row, one.field) is not None for row in rows)]
    columns = [Column("method", False), *(Column(one.title, help=one.help) for one in shown)]
    cells = [[styles[row.method].cell(), *(one.cell(row) for one in shown)] for row in rows]
    return Table(name, columns, cells, caption) if rows else None


ROOFLINE = (
    ("FLOP/byte", "Arithmetic intensity: operations for each byte that is read, counted from shapes"),
    ("GFLOP/s", "Counted operations over the measured seconds of that part"),
    ("of the limit", "Of what this machine could do at most with so many operations a byte"),
)


def roofline(roof: Roof, found: Sequence[Point], styles: Mapping[str, Style], ranked: Sequence[str]) -> Chart:
    """Return the parts of all methods' steps under the machine's limits."""
    ordered = [point for label in ranked for point in found if point.method == label]
    columns = [Column("method", False), Column("part", False), *(Column(name, help=help) for name, help in ROOFLINE)]
    rows = [_roofline_row(roof, point, styles[point.method]) for point in ordered]
    return Chart(
        "roofline",
        "Under the machine's limits",
        charts.roofline(roof, ordered, styles).to_plotly_json(),
        Table("roofline", columns, rows),
        note=f"The line is this machine's limit: reading {number(roof.read / 1e9, 1)} GB/s, then "
        f"{number(roof.products / 1e9, 0)} GFLOP/s. Filled: verifying; hollow: drafting, where a drafter has weights.",
    )


def _roofline_row(roof: Roof, point: Point, style: Style) -> list[Cell]:
    share = point.rate / roof.at(point.intensity)
    return [
        style.cell(),
        plain(point.part),
        figure(point.intensity),
        figure(point.rate / 1e9),
        Cell(percent(share, 1), share),
    ]


TIMELINE = (
    ("busy", "Share of the time in which any of them ran, from the first to the last one"),
    ("ms", "From the first to the last one; the profiler takes time itself"),
    ("tokens", "Of the answer"),
    ("launches per token", "Kernels that the host started, on a CPU operators, for each token"),
    ("gaps", "How often none ran"),
    ("mean gap, µs", "Mean time in which none ran"),
    ("longest gap, ms", "Longest time in which none ran"),
)


def timeline(traces: Mapping[str, Any], styles: Mapping[str, Style], ranked: Sequence[str]) -> Chart | None:
    """Return a row for each method that was traced; None where none was. traces: those of the manifest, by method."""
    found = {label: traces[label] for label in ranked if (traces.get(label) or {}).get("timeline")}
    if not found:
        return None
    columns = [Column("method", False), Column("of", False), *(Column(name, help=help) for name, help in TIMELINE)]
    table = Table("timeline", columns, [_timeline_row(trace, styles[label]) for label, trace in found.items()])
    what = next(iter(found.values()))["what"]
    where = "" if what == "kernels" else " There is no GPU here: what is shown is operators on the processor."
    note = (
        f"To the right milliseconds of one profiled request, from its first {what[:-1]} on; up the share of each span "
        f"of time in which any ran. The profiler takes time itself: this says where time goes, not how much.{where} "
        "Perfetto opens the files in the run's folder `traces`."
    )
    drawn = charts.timeline(found, styles).to_plotly_json()
    return Chart("timeline", "One request, as the profiler saw it", drawn, table, note)


def _timeline_row(trace: Mapping[str, Any], style: Style) -> list[Any]:
    gaps = trace["gaps"]
    return [
        style.cell(),
        plain(trace["what"]),
        figure(100 * trace["busy_share"], 0, "%"),
        figure(1000 * trace["wall_s"], 1),
        figure(trace["tokens"], 0),
        figure(trace["launches_per_token"], 0),
        figure(gaps["number"], 0),
        figure(1e6 * gaps["mean_s"], 1),
        figure(1000 * gaps["longest_s"], 2),
    ]


MEASURED = "Tokens are those that the servers count, and pieces of text where a server does not tell."


def servers(run: Run, overall: Mapping[str, SummaryRow], styles: Mapping[str, Style]) -> Table | None:
    """Return a row for each server; None for a run of methods in this process."""
    if not run.manifest["config"].get("endpoints"):
        return None
    names = ("server", "address", "model", "software", "tokens", "acceptance")
    columns = [
        *(Column(name, False) for name in names),
        Column(
            "τ", help="Tokens per step that had a draft: 1 + accepted tokens over drafts, by the server's own counts"
        ),
        Column("accepted", help="Accepted over drafted tokens, by the same counts"),
    ]
    rows = []
    for entry in run.manifest["methods"]:
        about, found, row = entry.get("served", {}), entry["resolved"], overall[entry["label"]]
        software = " ".join(filter(None, (about.get("software"), found.get("version"))))
        told = (found.get("url"), found.get("model"), software, about.get("tokens"), about.get("acceptance"))
        cells = [styles[row.method].cell(), *(plain(text or "not told") for text in told)]
        rows.append([*cells, figure(row.tau), Cell(percent(row.acceptance_rate, 1), row.acceptance_rate)])
    return Table("servers", columns, rows, "What the servers tell of themselves", notes=[MEASURED])


def in_flight(run: Run, styles: Mapping[str, Style]) -> Table | None:
    """Return a row for each number of requests in flight and method; None where all were made one at a time."""
    found, served = level_rows(run), bool(run.manifest["config"].get("endpoints"))
    columns = [
        Column("in flight", help="Requests at a time"),
        Column("server" if served else "method", False),
        Column("tokens/s", help="Throughput: tokens of all answers over the time of all requests together"),
        Column("× baseline", help=f"This over that of {run.baseline} with as many in flight"),
        Column("speedup", help=f"Of single requests: seconds per token of {run.baseline} over its own, by prompt"),
        Column("95 % interval", help="Of the speedup of single requests"),
        Column(
            "first text" if served else "first token",
            help=f"Milliseconds to the first {'piece of text' if served else 'token'}: median and 95th percentile",
        ),
        Column("per token", help="Milliseconds per token after the first: median and 95th percentile"),
        Column("request", help="Milliseconds of a whole request: median and 95th percentile"),
        Column("τ", help="By the server's own counts" if served else "Tokens per step, as everywhere"),
        Column("requests"),
    ]
    rows = [_level_row(row, styles[row.method]) for row in found]
    return (
        Table("in-flight", columns, rows, "Several requests at a time: throughput and waiting times") if found else None
    )


def _level_row(row: LevelRow, style: Style) -> list[Cell]:
    mark = ranking.MARKS.get(row.comparison, "")
    said = "" if row.speedup is None else f"{mark} {times(row.speedup)}".strip()
    return [
        figure(row.concurrency, 0),
        style.cell(),
        figure(row.tokens_per_s, 1),
        Cell(times(row.throughput_ratio), row.throughput_ratio),
        Cell(said, row.speedup),
        plain(interval(row.speedup_interval)),
        *(_wait(row, name) for name in ("ttft", "tpot", "latency")),
        figure(row.tau),
        figure(row.requests, 0, small=[f"{row.failed} failed"] if row.failed else []),
    ]


def _wait(row: LevelRow, name: str) -> Cell:
    median, late = (row.waits[f"{name}_s_{quantile}"] for quantile in ("p50", "p95"))
    digits = 2 if name == "tpot" else 1
    small = [] if late is None else [f"95 %: {number(1000 * late, digits)}"]
    return figure(None if median is None else 1000 * median, digits, small=small)
