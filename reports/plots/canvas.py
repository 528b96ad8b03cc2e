"""An empty figure with the same fonts everywhere, and how it becomes a file. The same run gives the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specbench_ss.errors import UserError, os_reason
from specbench_ss.reports.html.palette import Style
from specbench_ss.storage import replacing

FORMATS: dict[str, Mapping[str, Any]] = {  # by suffix: what the file would else say of the hour it was made in
    ".pdf": {"CreationDate": None},
    ".svg": {"Date": None},
    ".png": {"Software": None},
}
LOOK: Any = {
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 8,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 8,
    "axes.titlelocation": "left",
    "lines.linewidth": 1.4,
    "lines.markersize": 5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "pdf.fonttype": 42,  # letters stay letters
    "svg.hashsalt": "ssbench",
}
MARKERS = {"circle": "o", "square": "s", "diamond": "D", "triangle": "^", "plus": "P", "flag": "X"}
GRID, INK, MUTED = "#dddddd", "#333333", "#777777"
DPI = 200  # of PNG


def draw(path: Path, width: float, height: float, content: Callable[[Figure], None]) -> None:
    """Write a figure of so many inches. content: is given the empty figure, and draws. Raises UserError."""
    if path.suffix not in FORMATS:
        raise UserError(f"cannot draw {path}: the name must end in {', '.join(FORMATS)}")
    if path.is_dir():
        raise UserError(f"cannot write {path}: it is a folder")
    with matplotlib.rc_context(LOOK):
        figure = Figure((width, height), layout="constrained")
        content(figure)
        try:
            with replacing(path) as file:
                figure.savefig(file, format=path.suffix[1:], metadata=dict(FORMATS[path.suffix]), dpi=DPI)
        except OSError as error:
            raise UserError(f"cannot write {path}: {os_reason(error)}") from error


def marker(style: Style) -> dict[str, Any]:
    """Return how matplotlib draws a method's points."""
    return {"color": style.colour, "marker": MARKERS.get(style.symbol, "o"), "linestyle": "none"}


def key(axes: Axes) -> None:
    """Name the points beside the axes: names at the points would cover each other."""
    axes.figure.legend(loc="outside right center", frameon=False, handletextpad=0.1, labelspacing=0.6)


def panels(figure: Figure, count: int, columns: int) -> list[Axes]:
    """Return small axes side by side that share their scales, in rows of so many; those left over are not drawn."""
    rows = -(-count // columns)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for empty in grid[count:]:
        empty.set_visible(False)
    return list(grid[:count])


def shown(text: str) -> str:
    """Return text that matplotlib takes as it is: a dollar sign would begin a formula."""
    return text.replace("$", r"\$")
