"""What steps do a second against what they do a byte, under the measured limits of the machine."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from specbench_ss.errors import UserError
from specbench_ss.reports.plots.canvas import GRID, INK, MUTED, key, marker, shown
from specbench_ss.reports.plots.numbers import Numbers
from specbench_ss.results.cost_model import pairs, points, roof_of


def roofline(figure: Figure, numbers: Numbers) -> None:
    """Draw verifying filled and drafting hollow. Raises UserError where the machine's limits are not known."""
    roof, wanted = roof_of(numbers.run), {row.method for row in numbers.rows}
    if roof is None:
        raise UserError("nothing to draw: the run does not know the machine's limits (ssbench doctor --calibrate)")
    found = [point for point in points(pairs(numbers.run)) if point.method in wanted]
    if not found:
        raise UserError("nothing to draw: what a step reads and computes could not be counted")
    axes = figure.subplots()
    axes.set(xscale="log", yscale="log")
    axes.grid(color=GRID, linewidth=0.5)
    places = [point.intensity for point in found]
    x = np.geomspace(min(0.1, *places), 4 * max(roof.ridge, *places), 200)
    axes.plot(x, np.minimum(roof.products, roof.read * x) / 1e9, color=INK)
    reading = (x[60], roof.at(x[60]) / 1e9)
    text: Any = {"color": MUTED, "textcoords": "offset points"}
    axes.annotate(f"reading {roof.read / 1e9:.0f} GB/s", reading, xytext=(-4, 4), ha="right", va="bottom", **text)
    said = f"products {roof.products / 1e9:,.0f} GFLOP/s"
    axes.annotate(said, (x[-1], roof.products / 1e9), xytext=(0, 2), ha="right", va="bottom", **text)
    for point in found:
        style = numbers.styles[point.method]
        verifying = point.part == "verifying"
        label: Any = {"label": shown(point.method)} if verifying else {}
        inside = style.colour if verifying else "white"
        axes.plot(point.intensity, point.rate / 1e9, **marker(style), markerfacecolor=inside, **label)
    key(axes)
    axes.set_xlabel(
        f"floating-point operations a byte; filled: verifying, hollow: drafting\n{shown(numbers.title)}", color=MUTED
    )
    axes.set_ylabel("10⁹ floating-point operations a second", color=MUTED)
