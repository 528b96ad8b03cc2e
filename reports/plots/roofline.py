"""What steps do a second against what they do a byte, under the measured limits of the machine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from specbench_ss.errors import UserError
from specbench_ss.reports.plots.canvas import GRID, INK, MUTED, key, marker, shown
from specbench_ss.reports.plots.numbers import Numbers
from specbench_ss.results.machine import MachineRow, machine_rows


def roofline(figure: Figure, numbers: Numbers) -> None:
    """Draw a point a method, counted from shapes. Raises UserError where the machine's limits are not known."""
    about = numbers.run.manifest.get("machine") or {}
    limits, dtype = about.get("limits") or {}, numbers.run.manifest["model"]["dtype"]
    rate, peak = limits.get("read_bytes_per_s"), (limits.get("flops_per_s") or {}).get(dtype)
    if not rate or not peak:
        raise UserError("nothing to draw: the run does not know the machine's limits (ssbench doctor --calibrate)")
    points = _points(machine_rows(numbers.run), [row.method for row in numbers.rows])
    if not points:
        raise UserError("nothing to draw: what a step reads and computes could not be counted")
    axes = figure.subplots()
    axes.set(xscale="log", yscale="log")
    axes.grid(color=GRID, linewidth=0.5)
    x = np.geomspace(min(0.1, *(p[0] for p in points)), 4 * max(peak / rate, *(p[0] for p in points)), 200)
    axes.plot(x, np.minimum(peak, rate * x) / 1e9, color=INK)
    axes.annotate(
        f"reading {rate / 1e9:.0f} GB/s",
        (x[20], rate * x[20] / 1e9),
        xytext=(6, -2),
        textcoords="offset points",
        color=MUTED,
        va="top",
    )
    axes.annotate(f"products {peak / 1e9:,.0f} GFLOP/s", (x[-1], peak / 1e9), color=MUTED, ha="right", va="bottom")
    for intensity, achieved, method in points:
        axes.plot(intensity, achieved / 1e9, **marker(numbers.styles[method]), label=shown(method))
    key(axes)
    axes.set_xlabel(f"floating-point operations a byte\n{shown(numbers.title)}", color=MUTED)
    axes.set_ylabel("10⁹ floating-point operations a second", color=MUTED)


def _points(rows: Sequence[MachineRow], wanted: Sequence[str]) -> list[tuple[float, float, str]]:
    return [
        (row.intensity, row.flops_per_step / row.step_s, row.method)
        for row in rows
        if row.method in wanted and row.intensity and row.flops_per_step and row.step_s
    ]
