"""Tokens a step against what a step costs: lines of equal speedup go through the origin."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from specbench_ss.errors import UserError
from specbench_ss.reports.plots.canvas import GRID, INK, MUTED, key, marker, shown
from specbench_ss.reports.plots.numbers import Numbers

LINES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def pareto(figure: Figure, numbers: Numbers) -> None:
    """Draw a point a method. Raises UserError where no step was timed."""
    points = [(r.step_cost, r.tau, r.method) for r in numbers.contestants if r.step_cost and r.tau]
    if not points:
        raise UserError("nothing to draw: no method of the run has timed steps beside plain decoding")
    axes = figure.subplots()
    right, top = 1.12 * max(x for x, _, _ in points), 1.12 * max(y for _, y, _ in points)
    axes.set(xlim=(min(0.9, 0.9 * min(x for x, _, _ in points)), right), ylim=(0.9, top))
    for slope in LINES:
        ends = np.array(axes.get_xlim())
        axes.plot(ends, slope * ends, color=INK if slope == 1 else GRID, linewidth=0.8, zorder=0)
        x = min(right, top / slope)
        if x > ends[0] and slope * x > 0.9:
            axes.annotate(f"{slope:g}×", (x, slope * x), color=MUTED, ha="right", va="top")
    for x, y, method in points:
        axes.plot(x, y, **marker(numbers.styles[method]), label=shown(method))
    key(axes)
    axes.set_xlabel(f"step cost: a step in steps of plain decoding\n{shown(numbers.title)}", color=MUTED)
    axes.set_ylabel("tokens a step, τ", color=MUTED)
