"""From plain decoding's milliseconds a token to the method's: a panel a method."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specbench_ss.errors import UserError
from specbench_ss.options import REFERENCE
from specbench_ss.reports.plots.canvas import INK, MUTED, panels, shown
from specbench_ss.reports.plots.numbers import Numbers
from specbench_ss.results.cost_model import Waterfall, waterfalls

COLUMNS, PANEL = 3, 1.5  # panels side by side; inches
LESS, MORE = "#4B3F9E", "#A3324A"  # those of the page, which no method has


def height(numbers: Numbers) -> float:
    """Return the inches that the panels need."""
    return 0.5 + PANEL * -(-len(_found(numbers)) // COLUMNS)


def waterfall(figure: Figure, numbers: Numbers) -> None:
    """Draw what each method saves and adds. Raises UserError where no method was timed beside plain decoding."""
    found = _found(numbers)
    for one, axes in zip(found, panels(figure, len(found), COLUMNS), strict=True):
        _panel(axes, one)
        axes.set_title(f"{shown(one.method)}, {one.reference_ms / one.method_ms:.2f}×")
    figure.supxlabel(f"milliseconds a token; {shown(numbers.title)}", color=MUTED, fontsize=8)


def _panel(axes: Axes, one: Waterfall) -> None:
    names, at = [REFERENCE, *one.parts, "the method"], one.reference_ms
    starts, sizes, colours = [0.0], [one.reference_ms], [MUTED]
    for part in one.parts.values():
        starts.append(at)
        sizes.append(part)
        colours.append(LESS if part < 0 else MORE)
        at += part
    starts, sizes, colours = [*starts, 0.0], [*sizes, one.method_ms], [*colours, INK]
    axes.barh(range(len(names)), sizes, left=starts, color=colours, height=0.7)
    axes.set_yticks(range(len(names)), [shown(name) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)


def _found(numbers: Numbers) -> list[Waterfall]:
    made = waterfalls(numbers.run)
    found = [made[row.method] for row in numbers.contestants if row.method in made]
    if not found:
        raise UserError("nothing to draw: no method of the run was timed beside plain decoding")
    return found
