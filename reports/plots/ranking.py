"""Speedups with their intervals, a row a method."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from specbench_ss.errors import UserError
from specbench_ss.reports.plots.canvas import GRID, INK, MUTED, marker, shown
from specbench_ss.reports.plots.numbers import Numbers
from specbench_ss.results.summary import SummaryRow
from specbench_ss.results.text import number, times

ROW, FRAME = 0.2, 0.75  # inches
TICKS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)


def height(numbers: Numbers) -> float:
    """Return the inches that the rows need."""
    return FRAME + ROW * len(_rows(numbers))


def ranking(figure: Figure, numbers: Numbers) -> None:
    """Draw a logarithmic axis with a line at 1; hollow: not distinguishable from plain decoding. Raises UserError."""
    rows = _rows(numbers)
    axes = figure.subplots()
    axes.set_xscale("log")
    axes.axvline(1, color=INK, linewidth=0.8, zorder=0)
    axes.grid(axis="x", color=GRID, linewidth=0.5, zorder=0)
    for at, row in enumerate(rows):
        style = numbers.styles[row.method]
        sure = row.comparison in ("faster", "slower")
        if row.speedup_interval is not None:
            axes.plot(row.speedup_interval, (at, at), color=style.colour, zorder=2)
        axes.plot(
            [row.speedup or 0.0], [at], **marker(style), markerfacecolor=style.colour if sure else "white", zorder=3
        )
        said = f"{times(row.speedup)}  τ {number(row.tau)}"
        axes.annotate(said, (1.01, at), xycoords=("axes fraction", "data"), va="center", color=INK)
    axes.set_yticks(range(len(rows)), [shown(row.method) for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.xaxis.set_major_locator(FixedLocator(TICKS))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.set_xlabel(f"speedup over plain decoding, 95 % intervals\n{shown(numbers.title)}", color=MUTED)


def _rows(numbers: Numbers) -> list[SummaryRow]:
    rows = [row for row in numbers.contestants if row.speedup is not None]
    if not rows:
        raise UserError("nothing to draw: no method of the run has a speedup")
    return rows
