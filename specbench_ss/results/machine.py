"""What steps cost by their shapes, what share of the machine's limits they reached, and what that predicts.

docs/metrics.md has the definitions. No method is known by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specbench_ss.method_spec import REFERENCE
from specbench_ss.results.counted_cost import Cost, counted
from specbench_ss.results.paired_times import over, paired
from specbench_ss.results.step_tally import PARTS, tally
from specbench_ss.results.summary import disbelieved
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


def machine_rows(run: Run, void: Collection[str] | None = None) -> list[MachineRow]:
    """Return a row for each method, in the order in which the methods were asked for.

    void: the methods without a speedup over all tasks, where the summaries are known; they are found out otherwise.
    """
    rows = {label: [row for row in run.rows if row.method == label] for label in run.labels}
    found = []
    for label in run.labels:
        own, ref = paired(rows[label], rows.get(REFERENCE, []))
        untold = bool(disbelieved(run, label)) if void is None else label in void
        found.append(_Of(run, label, own).row(_Of(run, REFERENCE, ref), void=untold))
    return found


class _Of:
    """One method's samples, with what the manifest says of its shapes and of the machine."""

    def __init__(self, run: Run, label: str, rows: Sequence[Row]) -> None:
        about = run.manifest.get("machine") or {}
        self.run, self.label, self.rows = run, label, rows
        self.limits: Mapping[str, Any] = about.get("limits") or {}
        self.dtype: str = run.manifest["model"]["dtype"]
        shape = (about.get("shapes") or {}).get(label)
        self.cost: Cost | None = counted(rows, shape) if shape else None
        self.tally = tally(rows, run.steps)

    @property
    def fastest_s(self) -> float | None:
        return self.cost.fastest_s(self.limits, self.dtype) if self.cost else None

    def row(self, plain: _Of, void: bool) -> MachineRow:
        """Return the method's row. plain: the reference on the same prompts. void: no speedup is told."""
        step_s, cost, tau = self.tally.step_s, self.cost, self.tally.tau
        columns = self.tally.columns()
        shares = {name.replace("_s", "_share"): over(columns[name], step_s) for name in PARTS}
        steps = cost.steps if cost else 0
        traced = (self.run.manifest.get("traces") or {}).get(self.label) or {}
        energy = [row for row in self.rows if row.energy_j is not None]
        return MachineRow(
            method=self.label,
            step_s=step_s,
            **shares,
            parts_residual=over(columns["parts_residual_s"], step_s),
            flops_per_step=over(cost.flops if cost else None, steps),
            bytes_per_step=over(cost.bytes if cost else None, steps),
            drafter_bytes_per_step=over(cost.drafter_bytes if cost else None, steps),
            intensity=cost.intensity if cost else None,
            bandwidth_share=self._share(cost.bytes if cost else None, self.limits.get("read_bytes_per_s")),
            compute_share=self._share(
                cost.flops if cost else None, (self.limits.get("flops_per_s") or {}).get(self.dtype)
            ),
            fastest_step_s=self.fastest_s,
            predicted_speedup=None if void else self._predicted(plain),
            decode_speedup=None if void else _times(tau, over(plain.tally.step_s, step_s)),
            samples=len(self.rows),
            disturbed=sum(bool(row.disturbed) for row in self.rows),
            remade=sum(row.remade or 0 for row in self.rows),
            **{name: _weighted(self.rows, name) for name in TELEMETRY},
            joules_per_token=over(sum(r.energy_j or 0.0 for r in energy), sum(r.tokens or 0 for r in energy)),
            trace_busy_share=traced.get("busy_share"),
            trace_launches_per_token=traced.get("launches_per_token"),
        )

    def _predicted(self, plain: _Of) -> float | None:
        """Return what tau and shapes promise; None where nobody knows what the drafter reads."""
        if self.cost is None or self.cost.drafter_bytes is None:
            return None
        return _times(self.tally.tau, over(plain.fastest_s, self.fastest_s))

    def _share(self, amount: float | None, limit: float | None) -> float | None:
        """Return the share of a limit that all steps together reached."""
        return over(over(amount, sum(row.decode_s or 0.0 for row in self.rows)), limit)


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
