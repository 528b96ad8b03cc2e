"""Pictures of the papers' experiments: lines and marks, bars, a heat map. The only module that knows Plotly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from specbench_ss.results.report import Grid, Plot

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A8089")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "circle-open")
DASHES = ("solid", "dash", "dot", "dashdot")
Points = Sequence[tuple[Any, float | None]]  # (x, y)


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis. ticks: the only values that are labelled."""

    title: str = ""
    log: bool = False
    form: Literal["number", "times", "percent"] = "number"
    bounds: tuple[float, float] | None = None
    from_zero: bool = False
    ticks: Sequence[int] = ()

    def layout(self) -> dict[str, Any]:
        """Return the axis as Plotly takes it."""
        made: dict[str, Any] = {"title": {"text": self.title}}
        made |= {"type": "log"} if self.log else {}
        made |= {"number": {}, "times": {"ticksuffix": "×"}, "percent": {"tickformat": ".0%"}}[self.form]
        made |= {"range": list(self.bounds)} if self.bounds else {}
        made |= {"rangemode": "tozero"} if self.from_zero else {}
        return made | ({"tickvals": list(self.ticks), "ticktext": [str(t) for t in self.ticks]} if self.ticks else {})


@dataclass(frozen=True, slots=True)
class Series:
    """A series of (x, y). look: a number, which decides colour and symbol."""

    name: str
    points: Points
    style: Literal["line", "marks", "hollow", "guide"] = "line"
    look: int = 0


@dataclass(frozen=True, slots=True)
class Text:
    """The words of a picture. label: what a screen reader says instead of it."""

    name: str
    title: str
    label: str
    note: str = ""


def lines(text: Text, series: Mapping[str, Points], grid: Grid, x: Axis, y: Axis) -> Plot:
    """Draw a line with marks for each series of {name: points}."""
    return chart(text, [Series(name, points, look=i) for i, (name, points) in enumerate(series.items())], grid, x, y)


def chart(text: Text, series: Sequence[Series], grid: Grid, x: Axis, y: Axis) -> Plot:
    """Draw series of lines, marks and dotted guides."""
    return _plot(text, [_trace(one) for one in series], {"xaxis": x.layout(), "yaxis": y.layout()}, grid)


def bars(text: Text, series: Mapping[str, Points], grid: Grid, y: Axis, stacked: bool = False) -> Plot:
    """Draw a group of bars, or a stack, for each x of {name of the series: points}."""
    data = [
        {"type": "bar", "name": name, "x": [x for x, _ in points], "y": [y for _, y in points],
         "marker": {"color": COLOURS[i % len(COLOURS)]}}
        for i, (name, points) in enumerate(series.items())
    ]  # fmt: skip
    layout = {"xaxis": Axis().layout(), "yaxis": y.layout(), "barmode": "stack" if stacked else "group"}
    return _plot(text, data, layout, grid)


def heat_map(
    text: Text, names: Sequence[str], kinds: Sequence[Sequence[int]], tints: Sequence[str], grid: Grid
) -> Plot:
    """Draw a square of cells, the first row at the top. kinds[row][column]: index of the cell's tint."""
    steps = [[edge, tint] for i, tint in enumerate(tints) for edge in (i / len(tints), (i + 1) / len(tints))]
    data = {
        "type": "heatmap", "x": list(names), "y": list(names), "z": [list(row) for row in kinds], "zmin": -0.5,
        "zmax": len(tints) - 0.5, "colorscale": steps, "showscale": False, "xgap": 1, "ygap": 1,
    }  # fmt: skip
    layout = {"xaxis": Axis().layout(), "yaxis": Axis().layout() | {"autorange": "reversed"}}
    return _plot(text, [data], layout, grid)


def _trace(series: Series) -> dict[str, Any]:
    n = len(COLOURS)
    colour, symbol = COLOURS[series.look % n], SYMBOLS[(series.look + series.look // n) % len(SYMBOLS)]
    made: dict[str, Any] = {
        "type": "scatter", "name": series.name, "x": [x for x, _ in series.points], "y": [y for _, y in series.points],
        "mode": {"line": "lines+markers", "guide": "lines"}.get(series.style, "markers"),
    }  # fmt: skip
    if series.style == "guide":
        return made | {"line": {"dash": "dot", "width": 1, "color": "#888"}, "showlegend": False}
    if series.style == "line":
        made["line"] = {"color": colour, "dash": DASHES[series.look % len(DASHES)], "width": 2}
    if series.style == "hollow":
        symbol = f"{symbol.removesuffix('-open')}-open"
    return made | {"marker": {"color": colour, "symbol": symbol, "size": 10}}


def _plot(text: Text, data: list[dict[str, Any]], layout: dict[str, Any], grid: Grid) -> Plot:
    return Plot(text.name, text.title, text.label, data, layout, grid, text.note)
