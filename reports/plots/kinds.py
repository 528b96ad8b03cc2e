"""The kinds of figures, by name."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from specbench_ss.reports.plots import acceptance, pareto, ranking, roofline, waterfall
from specbench_ss.reports.plots.canvas import draw
from specbench_ss.reports.plots.numbers import Numbers, numbers_of
from specbench_ss.runs.records import Run

SHARE = 0.7  # height over width of a figure with one pair of axes


@dataclass(frozen=True, slots=True)
class Kind:
    """draw: puts the numbers into a figure. height: the inches that it needs, None where it takes any."""

    draw: Callable[[Figure, Numbers], None]
    height: Callable[[Numbers], float] | None = None


KINDS = {
    "ranking": Kind(ranking.ranking, ranking.height),
    "acceptance": Kind(acceptance.acceptance, acceptance.height),
    "waterfall": Kind(waterfall.waterfall, waterfall.height),
    "roofline": Kind(roofline.roofline),
    "pareto": Kind(pareto.pareto),
}


def write_plot(
    run: Run, kind: str, path: Path, methods: Collection[str] = (), width: float = 5.0, height: float = 0.0
) -> None:
    """Write one figure of a run, in inches; a height of 0 is what the content needs. Raises UserError."""
    numbers, drawn = numbers_of(run, methods), KINDS[kind]
    needed = SHARE * width if drawn.height is None else drawn.height(numbers)
    draw(path, width, height or needed, lambda figure: drawn.draw(figure, numbers))
