"""Machine and servers: roofline, counted cost of a step, device readings, timeline, requests in flight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specbench_ss.reports import charts
from specbench_ss.reports.html.page_parts import Cell, Chart, Column, Table, View, figure, plain
from specbench_ss.results import ranking
from specbench_ss.results.concurrency import ConcurrencyRow, concurrency_rows
from specbench_ss.results.cost_model import MachineRow, points, roof_of
from specbench_ss.results.summary import SummaryRow
from specbench_ss.results.text import format_number, format_speedup, interval, percent


def _share(title: str, of: str, digits: int = 0) -> Column:
    return Column(title, of, digits=digits, unit="%", per=0.01)


COUNTED = (
    Column("decoding speedup", "decode_speedup", unit="×"),
    Column("at the limits", "predicted_speedup", unit="×"),
    Column("step, ms", "step_s", "Mean time of a step, over all paired samples", per=1e-3),
    Column("fastest step, ms", "fastest_step_s", per=1e-3),
    _share("bandwidth", "bandwidth_share"),
    _share("peak FLOP/s", "compute_share", 1),
    Column("GFLOP per step", "flops_per_step", per=1e9),
    Column("MB per step", "bytes_per_step", digits=1, per=1e6),
    Column("drafter MB per step", "drafter_bytes_per_step", digits=1, per=1e6),
    Column("FLOP/byte", "intensity", digits=1),
)
SEEN = (  # readings
    _share("CPU, this process", "host_cpu_share"),
    _share("CPU, others", "host_foreign_share"),
    _share("kernels", "nvml_kernel_busy"),
    _share("memory", "nvml_memory_busy"),
    _share("SMs", "gpm_sm_active"),
    _share("tensor cores", "gpm_tensor_active"),
    _share("DRAM", "gpm_dram_active"),
    Column("W", "nvml_power_w", digits=0),
    Column("J per token", "joules_per_token"),
    _share("traced busy", "trace_busy_share"),
    Column("launches per token", "trace_launches_per_token", digits=0),
)
READ = (
    Column("samples", "samples", digits=0),
    Column("noisy", "n_noisy", digits=0),
    Column("re-runs", "n_reruns", digits=0),
    *SEEN,
)


def tables(view: View, rows: Sequence[MachineRow]) -> list[Table]:
    """Return what a step costs by its shapes, and what was read while samples were made, as far as it is known."""
    counted = [row for row in rows if row.flops_per_step is not None]
    read = [row for row in rows if any(_known(column, row) for column in SEEN)]
    what = "One step: FLOP and bytes counted from shapes, next to the measured limits of the machine"
    made = [
        ("machine-counted", COUNTED, counted, what),
        ("machine-read", READ, read, "Readings during the samples, weighted by time"),
    ]
    return [
        Table.of(name, [view.method(), *_with_values(columns, of)], of, caption)
        for name, columns, of, caption in made
        if of
    ]


def _with_values(columns: Sequence[Column], rows: Sequence[MachineRow]) -> list[Column]:
    return [column for column in columns if any(_known(column, row) for row in rows)]


def _known(column: Column, row: MachineRow) -> bool:
    return getattr(row, str(column.of)) is not None


def rows_of(view: View) -> list[MachineRow]:
    """Return what is known of the machine, in the order of the ranking."""
    order = list(view.look)
    return sorted(view.results.machine_rows, key=lambda row: order.index(row.method))


def roofline(view: View) -> Chart | None:
    """Return the parts of all methods' steps under the machine's limits; None where these are not known."""
    roof, order = roof_of(view.run), list(view.look)
    found = sorted(points(view.results.pairs), key=lambda point: order.index(point.method))
    if roof is None or not found:
        return None
    columns = [
        view.method(),
        Column("part", "part", numeric=False),
        Column(
            "FLOP/byte", "intensity", "Arithmetic intensity: operations for each byte that is read, counted from shapes"
        ),
        Column("GFLOP/s", "rate", "Counted operations over the measured seconds of that part", per=1e9),
        Column(
            "of the limit",
            lambda point: _percent(point.rate / roof.at(point.intensity)),
            "Of what this machine could do at most with so many operations a byte",
        ),
    ]
    return Chart(
        "roofline",
        "Roofline",
        charts.roofline(roof, found, view.look).to_plotly_json(),
        Table.of("roofline", columns, found),
        note=f"The line is this machine's limit: reading {format_number(roof.peak_bandwidth / 1e9, 1)} GB/s, then "
        f"{format_number(roof.peak_flops / 1e9, 0)} GFLOP/s. Filled: verifying; hollow: drafting, where a "
        f"drafter has weights.",
    )


def timeline(view: View) -> Chart | None:
    """Return a row for each method that was traced; None where none was."""
    traces: Mapping[str, Any] = view.run.manifest.get("traces") or {}
    found = {label: traces[label] for label in view.contestants if (traces.get(label) or {}).get("timeline")}
    if not found:
        return None
    columns = [
        view.method(),
        Column("of", "what", numeric=False),
        Column(
            "busy", "busy_share", "Share of the time in which any of them ran, from the first to the last", 0, "%", 0.01
        ),
        Column("ms", "wall_s", "From the first to the last one; the profiler takes time itself", 1, per=1e-3),
        Column("tokens", "tokens", "Of the answer", 0),
        Column("launches per token", "launches_per_token", "Kernels that the host started, on a CPU operators", 0),
        Column("gaps", "number", "How often none ran", 0),
        Column("mean gap, µs", "mean_s", "Mean time in which none ran", 1, per=1e-6),
        Column("longest gap, ms", "longest_s", "Longest time in which none ran", per=1e-3),
    ]
    what = next(iter(found.values()))["what"]
    where = "" if what == "kernels" else " There is no GPU here: what is shown is operators on the processor."
    note = (
        f"To the right milliseconds of one profiled request, from its first {what[:-1]} on; up the share of each span "
        f"of time in which any ran. The profiler takes time itself: shares are reliable, totals are not.{where} "
        "Perfetto opens the files in the run's folder `traces`."
    )
    drawn = charts.timeline(found, view.look).to_plotly_json()
    table = Table.of("timeline", columns, [{"method": label, **of, **of["gaps"]} for label, of in found.items()])
    return Chart("timeline", "One request in the profiler", drawn, table, note)


MEASURED = "Tokens are counted by the servers; pieces of text if a server reports no count."
REPORTED = ("address", "model", "software", "tokens", "acceptance")  # of a server


def servers(view: View) -> Table | None:
    """Return a row for each server; None for a run of methods in this process."""
    if not view.served:
        return None
    by_counts = "Tokens per step that had a draft: 1 + accepted tokens over drafts, by the server's own counts"
    columns = [
        view.method("server"),
        *(Column(name, name, numeric=False) for name in REPORTED),
        Column("τ", "τ", by_counts),
        Column("accepted", lambda row: _percent(row["accepted"]), "Accepted over drafted tokens, by the same counts"),
    ]
    rows = [_server(entry, view.overall[entry["label"]]) for entry in view.run.manifest["methods"]]
    return Table.of("servers", columns, rows, "Properties that the servers report", notes=[MEASURED])


def _server(entry: Mapping[str, Any], row: SummaryRow) -> dict[str, Any]:
    about, found = entry.get("served", {}), entry["resolved"]
    software = " ".join(filter(None, (about.get("software"), found.get("version"))))
    values = (found.get("url"), found.get("model"), software, about.get("tokens"), about.get("acceptance"))
    reported = {name: text or "not reported" for name, text in zip(REPORTED, values, strict=True)}
    return {"method": row.method, **reported, "τ": row.mean_acceptance_length, "accepted": row.acceptance_rate}


def _percent(share: float | None) -> Cell:
    return Cell(percent(share, 1), share)


def in_flight(view: View) -> Table | None:
    """Return a row for each number of requests in flight and method; None where all were made one at a time."""
    found, baseline = concurrency_rows(view.run), view.run.baseline
    if not found:
        return None
    columns = [
        Column("in flight", "concurrency", digits=0),
        view.method("server" if view.served else "method"),
        Column("tokens/s", "tokens_per_s", "Tokens of all answers over the time of all requests together", 1),
        Column("× baseline", "throughput_ratio", f"This over that of {baseline} with as many in flight", unit="×"),
        Column("speedup", _speedup, f"Of single requests: seconds per token of {baseline} over its own, by prompt"),
        Column("95 % interval", lambda row: plain(interval(row.speedup_interval)), "Of that speedup"),
        _wait("first text" if view.served else "first token", "ttft"),
        _wait("per token", "tpot"),
        _wait("request", "latency"),
        Column(
            "τ",
            "mean_acceptance_length",
            "By the server's own counts" if view.served else "Tokens per step, as everywhere",
        ),
        Column("requests", lambda row: figure(row.requests, 0, small=[f"{row.failed} failed"] if row.failed else [])),
    ]
    return Table.of("in-flight", columns, found, "Several requests at a time: throughput and waiting times")


def _speedup(row: ConcurrencyRow) -> Cell:
    text = f"{ranking.MARKS.get(row.comparison, '')} {format_speedup(row.speedup)}".strip()
    return Cell("" if row.speedup is None else text, row.speedup)


def _wait(title: str, name: str) -> Column:
    digits = 2 if name == "tpot" else 1

    def of(row: ConcurrencyRow) -> Cell:
        median, late = (row.waits[f"{name}_s_{quantile}"] for quantile in ("p50", "p95"))
        small = [] if late is None else [f"95 %: {format_number(1000 * late, digits)}"]
        return figure(None if median is None else 1000 * median, digits, small=small)

    return Column(title, of, "Milliseconds: median and 95th percentile")
