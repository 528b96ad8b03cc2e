"""How often a drafted token is accepted where all before it were, by its position: a panel a method."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from specbench_ss.errors import UserError
from specbench_ss.reports.plots.canvas import GRID, MUTED, marker, panels, shown
from specbench_ss.reports.plots.numbers import Numbers
from specbench_ss.results.summary import SummaryRow
from specbench_ss.results.text import number

COLUMNS, PANEL = 4, 1.25  # panels side by side; inches
LEAST = 20  # drafted tokens that a share must rest on to be drawn


def height(numbers: Numbers) -> float:
    """Return the inches that the panels need."""
    return 0.5 + PANEL * -(-len(_rows(numbers)) // COLUMNS)


def acceptance(figure: Figure, numbers: Numbers) -> None:
    """Draw a method's shares over those of the others in grey. Raises UserError where no draft was recorded."""
    rows = _rows(numbers)
    for row, axes in zip(rows, panels(figure, len(rows), COLUMNS), strict=True):
        axes.grid(axis="y", color=GRID, linewidth=0.5)
        for other in rows:
            axes.plot(*_shares(other), color=GRID, linewidth=0.8)
        style = numbers.styles[row.method]
        axes.plot(*_shares(row), **marker(style) | {"linestyle": "-"}, markersize=3)
        axes.set_title(f"{shown(row.method)}  τ {number(row.tau)}")
        axes.set_ylim(0, 1)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.supxlabel(f"position in the draft; {shown(numbers.title)}", color=MUTED, fontsize=8)
    figure.supylabel("accepted, where all before it were", color=MUTED, fontsize=8)


def _shares(row: SummaryRow) -> tuple[list[int], list[float]]:
    given = zip(row.acceptance_given, row.acceptance_given_n, strict=True)
    kept = [(i, share) for i, (share, n) in enumerate(given, start=1) if n >= LEAST]
    return [i for i, _ in kept], [share for _, share in kept]


def _rows(numbers: Numbers) -> list[SummaryRow]:
    rows = [row for row in numbers.contestants if _shares(row)[0]]
    if not rows:
        raise UserError(f"nothing to draw: no method drafted {LEAST} tokens at any position")
    return rows
