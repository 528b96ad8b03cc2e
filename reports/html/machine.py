"""Machine and servers: roofline, counted cost of a step, device readings, timeline, load levels."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specbench_ss.reports import charts
from specbench_ss.reports.html.page_parts import Cell, Chart, Column, Table, View, figure, percent_cell, shared
from specbench_ss.reports.html.steps import WAITS
from specbench_ss.results.concurrency import ConcurrencyRow, kv_caches
from specbench_ss.results.cost_model import MachineRow, points, roof_of
from specbench_ss.results.draft_schedule import ScheduleEntry
from specbench_ss.results.summary import SummaryRow
from specbench_ss.results.table import level_columns
from specbench_ss.results.text import MISSING, format_number, format_speedup, interval


def _share(title: str, of: str, digits: int = 0) -> Column:
    return Column(title, of, digits=digits, unit="%", per=0.01)


COUNTED = (
    Column("decode speedup", "decode_speedup", unit="×"),
    Column("at the limits", "predicted_speedup", unit="×"),
    Column("step, ms", "step_s", "Mean step time, over all paired samples", per=1e-3),
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
    """Return the counted cost of a step, and the readings during the samples, as far as they are known."""
    counted = [row for row in rows if row.flops_per_step is not None]
    read = [row for row in rows if any(_known(column, row) for column in SEEN)]
    what = "One step: FLOP and bytes counted from shapes, with the measured limits of the machine"
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
        Column("FLOP/byte", "intensity", "Arithmetic intensity: FLOP per byte read, counted from shapes"),
        Column("GFLOP/s", "rate", "Counted FLOP / measured seconds of that part", per=1e9),
        Column(
            "of the limit",
            lambda point: percent_cell(point.rate / roof.at(point.intensity)),
            "Share of this machine's limit at this arithmetic intensity",
        ),
    ]
    return Chart(
        "roofline",
        "Roofline",
        charts.roofline(roof, found, view.look).to_plotly_json(),
        Table.of("roofline", columns, found),
        note=f"Line: this machine's limit, {format_number(roof.peak_bandwidth / 1e9, 1)} GB/s, then "
        f"{format_number(roof.peak_flops / 1e9, 0)} GFLOP/s. Filled: verification; hollow: drafting with weights.",
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
            "busy",
            "busy_share",
            "Share of time with at least one of them running, from the first to the last",
            0,
            "%",
            0.01,
        ),
        Column("ms", "wall_s", "From the first to the last one, overhead of the profiler included", 1, per=1e-3),
        Column("tokens", "tokens", "Of the output", 0),
        Column("launches per token", "launches_per_token", "Kernels that the host launched; operators on a CPU", 0),
        Column("gaps", "number", "Spans of time without any of them", 0),
        Column("mean gap, µs", "mean_s", "Mean length of these spans", 1, per=1e-6),
        Column("longest gap, ms", "longest_s", "Longest of these spans", per=1e-3),
    ]
    what = next(iter(found.values()))["what"]
    where = "" if what == "kernels" else " Without a GPU it shows operators of the processor."
    note = (
        f"One profiled request: the share of each span of time with running {what}. The profiler has overhead, so that "
        f"shares are reliable and totals are not.{where} Perfetto opens the files in `traces`, in the run directory."
    )
    drawn = charts.timeline(found, view.look).to_plotly_json()
    table = Table.of("timeline", columns, [{"method": label, **of, **of["gaps"]} for label, of in found.items()])
    return Chart("timeline", "One request in the profiler", drawn, table, note)


MEASURED = "Token counts are those of the servers; if a server reports none, streamed chunks are counted."
REPORTED = ("address or command", "model", "software", "tokens", "acceptance")  # of a server


def servers(view: View) -> Table | None:
    """Return a row for each server; None for a run of methods in this process."""
    if not view.served:
        return None
    caches = kv_caches(view.run.manifest)
    by_counts = "Tokens after the first / steps, by the server's counts of drafts and accepted tokens"
    columns = [
        view.method("server"),
        *(Column(name, name, numeric=False) for name in REPORTED),
        Column("τ", "τ", by_counts),
        Column("relative step time", "step_time", "τ / speedup of the tokens after the first", unit="×"),
        Column(
            "acceptance rate",
            lambda row: percent_cell(row["accepted"]),
            "Accepted / drafted tokens, by the same counts",
        ),
        Column("KV cache", lambda row: Cell(*caches[row["method"]]), "Tokens, and requests of the longest context"),
    ]
    rows = [_server(entry, view.overall[entry["label"]]) for entry in view.run.manifest["methods"]]
    return Table.of("servers", columns, rows, "Properties that the servers report", notes=[MEASURED])


def _server(entry: Mapping[str, Any], row: SummaryRow) -> dict[str, Any]:
    about, found = entry.get("served", {}), entry["resolved"]
    software = " ".join(filter(None, (about.get("software"), found.get("version") or about.get("version"))))
    address, model = found.get("url") or found.get("command"), found.get("model") or about.get("model")
    values = (address, model, software, about.get("tokens"), about.get("acceptance"))
    reported = {name: text or "not reported" for name, text in zip(REPORTED, values, strict=True)}
    measured = {"τ": row.mean_acceptance_length, "step_time": row.relative_step_time, "accepted": row.acceptance_rate}
    return {"method": row.method, **reported, **measured}


def in_flight(view: View) -> Table | None:
    """Return a row for each load and method; None if requests ran one at a time."""
    found, shown = view.results.concurrency_rows, level_columns(view.results, wide=True)
    if not found:
        return None
    own = {
        "load": shared(shown[0], of=_load(found), fields=("concurrency", "rate")),
        "method": view.method("server" if view.served else "method"),
        **{f"{name}_s_p50": _wait(title, name) for name, title in WAITS.items()},
    }
    columns = [own.get(column.key) or shared(column) for column in shown if column.key != "failed"]
    requests = Column(
        "requests", lambda row: figure(row.requests, 0, small=[f"{row.failed} failed"] * (row.failed > 0))
    )
    return Table.of("in-flight", [*columns, requests], found, "Load levels: throughput and latency")


def _load(rows: Sequence[ConcurrencyRow]) -> Callable[[ConcurrencyRow], Cell]:
    """Return the cell of a load, which sorts as the rows do."""
    loads = list(dict.fromkeys(row.load for row in rows))
    return lambda row: Cell(str(row.load), loads.index(row.load), values=(row.concurrency, row.rate))


def draft_schedule(view: View) -> Table | None:
    """Return speedups by server and requests in flight, the recommended servers in bold; None without k."""
    if (schedule := view.results.draft_schedule) is None:
        return None
    entries = {(entry.method, entry.concurrency): entry for entry in schedule.entries}
    chosen = set(filter(None, schedule.choices.values()))

    def column(level: int) -> Column:
        def of(row: Mapping[str, str]) -> Cell:
            entry = entries.get((row["method"], level))
            return _scheduled(entry, entry in chosen) if entry else Cell(MISSING)

        return Column(f"{level} in flight", of, "Time per token of a request: baseline / server, with its 95% CI")

    values = [f"vLLM, {group}, fields of --speculative-config: {json.dumps(f)}" for group, f in schedule.vllm().items()]
    return Table.of(
        "draft-schedule",
        [view.method("server"), *map(column, schedule.choices)],
        [{"method": label} for label in dict.fromkeys(entry.method for entry in schedule.entries)],
        "Draft schedule: speedup of a request over the baseline, the recommended server in bold",
        notes=[f"{schedule.text()}.", *values],
    )


def _scheduled(entry: ScheduleEntry, chosen: bool) -> Cell:
    return Cell(format_speedup(entry.speedup), entry.speedup, [interval(entry.speedup_interval)], strong=chosen)


def _wait(title: str, name: str) -> Column:
    digits = 2 if name == "tpot" else 1

    def of(row: ConcurrencyRow) -> Cell:
        median, late = (row.waits[f"{name}_s_{quantile}"] for quantile in ("p50", "p95"))
        small = [] if late is None else [f"95%: {format_number(1000 * late, digits)}"]
        return figure(None if median is None else 1000 * median, digits, small=small)

    return Column(title, of, "Milliseconds: median and 95th percentile")
