"""What steps cost by their shapes, what share of the machine's limits they reached, and what that predicts.

docs/metrics.md has the definitions. No method is known by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specbench_ss.number_formats import arithmetic
from specbench_ss.results.paired_times import over
from specbench_ss.results.step_tally import PARTS
from specbench_ss.results.summary import disbelieved
from specbench_ss.results.work import Pair, pairs
from specbench_ss.runs.rows import Row, Run


@dataclass(frozen=True, slots=True)
class MachineRow:
    """One method over its samples that are paired with the reference's. Void results have no speedup.

    The fields are the columns of `MACHINE` in results/columns.py.
    """

    method: str
    step_s: float | None
    draft_share: float | None
    verify_share: float | None
    accept_share: float | None
    host_share: float | None
    parts_residual: float | None
    flops_per_step: float | None
    bytes_per_step: float | None
    drafter_bytes_per_step: float | None
    intensity: float | None
    bandwidth_share: float | None
    compute_share: float | None
    fastest_step_s: float | None
    predicted_speedup: float | None
    decode_speedup: float | None
    samples: int
    disturbed: int
    remade: int
    host_cpu_share: float | None
    host_foreign_share: float | None
    nvml_kernel_busy: float | None
    nvml_memory_busy: float | None
    gpm_sm_active: float | None
    gpm_tensor_active: float | None
    gpm_dram_active: float | None
    nvml_power_w: float | None
    joules_per_token: float | None
    trace_busy_share: float | None
    trace_launches_per_token: float | None


def machine_rows(
    run: Run, void: Collection[str] | None = None, worked: Sequence[Pair] | None = None
) -> list[MachineRow]:
    """Return a row for each method, in the order in which the methods were asked for.

    void: the methods without a speedup over all tasks, where the summaries are known; they are found out otherwise.
    worked: what `work.pairs` gives, where that is known.
    """
    about = run.manifest.get("machine") or {}
    limits, dtype = about.get("limits") or {}, arithmetic(run.manifest["model"]["dtype"])
    traces = run.manifest.get("traces") or {}
    found = []
    for pair in pairs(run) if worked is None else worked:
        label = pair.own.method
        untold = bool(disbelieved(run, label)) if void is None else label in void
        found.append(_row(pair, limits, dtype, traces.get(label) or {}, untold))
    return found


def _row(pair: Pair, limits: Mapping[str, Any], dtype: str, traced: Mapping[str, Any], void: bool) -> MachineRow:
    """Return a method's row. traced: what the profiler saw of one request. void: no speedup is told."""
    rows, cost, own = pair.own.rows, pair.own.cost, pair.own.tally
    columns, steps = own.columns(), cost.steps if cost else 0
    shares = {name.replace("_s", "_share"): over(columns[name], own.step_s) for name in PARTS}
    energy = [row for row in rows if row.energy_j is not None]
    decode_s = sum(row.decode_s or 0.0 for row in rows)
    return MachineRow(
        method=pair.own.method,
        step_s=own.step_s,
        **shares,
        parts_residual=over(columns["parts_residual_s"], own.step_s),
        flops_per_step=over(cost and cost.flops, steps),
        bytes_per_step=over(cost and cost.bytes, steps),
        drafter_bytes_per_step=over(cost and cost.drafter_bytes, steps),
        intensity=cost and cost.intensity,
        bandwidth_share=over(over(cost and cost.bytes, decode_s), limits.get("read_bytes_per_s")),
        compute_share=over(over(cost and cost.flops, decode_s), (limits.get("flops_per_s") or {}).get(dtype)),
        fastest_step_s=cost and cost.fastest_s(limits, dtype),
        predicted_speedup=None if void else _predicted(pair, limits, dtype),
        decode_speedup=None if void else _times(own.tau, over(pair.plain.tally.step_s, own.step_s)),
        samples=len(rows),
        disturbed=sum(bool(row.disturbed) for row in rows),
        remade=sum(row.remade or 0 for row in rows),
        **{name: _weighted(rows, name) for name in TELEMETRY},
        joules_per_token=over(sum(r.energy_j or 0.0 for r in energy), sum(r.tokens or 0 for r in energy)),
        trace_busy_share=traced.get("busy_share"),
        trace_launches_per_token=traced.get("launches_per_token"),
    )


def _predicted(pair: Pair, limits: Mapping[str, Any], dtype: str) -> float | None:
    """Return what tau and shapes promise; None where nobody knows what the drafter reads."""
    own, plain = pair.own.cost, pair.plain.cost
    if own is None or own.drafter_bytes is None or plain is None:
        return None
    return _times(pair.own.tally.tau, over(plain.fastest_s(limits, dtype), own.fastest_s(limits, dtype)))


TELEMETRY = (
    "host_cpu_share", "host_foreign_share", "nvml_kernel_busy", "nvml_memory_busy", "gpm_sm_active",
    "gpm_tensor_active", "gpm_dram_active", "nvml_power_w",
)  # fmt: skip


def _weighted(rows: Sequence[Row], name: str) -> float | None:
    """Return the mean of a row's field, samples weighted by how long they took."""
    known = [(row.wall_s or 0.0, getattr(row, name)) for row in rows if getattr(row, name) is not None]
    return over(sum(s * value for s, value in known), sum(s for s, _ in known))


def _times(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a * b
