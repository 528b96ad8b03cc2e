"""What the machine did: what a step costs by its shapes, what of the machine's limits it reached, what was read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specbench_ss.options import REFERENCE
from specbench_ss.reports.html.page_parts import Cell, Column, Table, figure
from specbench_ss.reports.html.palette import Style
from specbench_ss.results.cost_model import MachineRow


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
