"""The forest plot: speedups with their intervals on a logarithmic axis, with a line at 1."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from specbench_ss.reports.html import svg
from specbench_ss.reports.html.axis import APART, Axis, of_ratios
from specbench_ss.results.text import number, times
from specbench_ss.stats import Interval

ROW, NAME, NUMBERS, TOP, BOTTOM, WIDTH = 26, 130, 150, 34, 42, 760  # pixels of a picture


@dataclass(frozen=True, slots=True)
class Mark:
    """One method: its speedup and interval, None where there is none. colour: a colour of CSS."""

    value: float | None
    interval: Interval | None
    colour: str
    symbol: str
    width: float = 3.0  # pixels of the line


def axis_of(marks: Sequence[Mark]) -> Axis:
    """Return the axis that all of them fit on."""
    return of_ratios(x for mark in marks for x in (mark.value, *(mark.interval or ())) if x is not None)


def strip(grid: str, *content: Markup) -> Markup:
    """Return a drawing as wide and as high as it is given room. grid: the name of its `grid_of`."""
    return svg.element("svg", svg.element("use", href=f"#grid-{grid}"), *content, class_="strip", aria_hidden="true")


def grid_of(axis: Axis, name: str) -> Markup:
    """Return the definition of the lines behind the strips of an axis, which each strip refers to."""
    return svg.element("defs", svg.element("g", lines(axis), id=f"grid-{name}"))


def lines(axis: Axis) -> Markup:
    """Return an upright line for each tick; that at 1 of a logarithmic axis is stronger."""
    return svg.join(_upright(axis.at(tick), "one" if axis.log and tick == 1 else "grid") for tick in axis.ticks())


def drawn(mark: Mark, axis: Axis) -> Markup:
    """Return the interval as a line and the speedup as a symbol, hollow where there is no interval."""
    if mark.value is None:
        return Markup()
    line = _interval(mark, axis, mark.interval) if mark.interval else Markup()
    hollow: dict[str, svg.Value] = (
        {} if mark.interval else {"fill_opacity": 0, "stroke": mark.colour, "stroke_width": 1.5}
    )
    place: dict[str, svg.Value] = {"x": svg.percent(axis.at(mark.value)), "y": "50%"}
    return line + svg.element("use", href=f"#sy-{mark.symbol}", fill=mark.colour, **place, **hollow)


def scale(axis: Axis, unit: str = "×", apart: float = APART) -> Markup:
    """Return the numbers below the strips. apart: as in `Axis.ticks`."""
    return svg.element(
        "svg",
        *(
            svg.element("text", f"{tick:g}{unit}", x=svg.percent(axis.at(tick)), y=12, text_anchor="middle")
            for tick in axis.ticks(apart)
        ),
        class_="scale",
        aria_hidden="true",
    )


def _upright(share: float, kind: str) -> Markup:
    x = svg.percent(share)
    return svg.element("line", class_=kind, x1=x, x2=x, y1=0, y2="100%")


def _interval(mark: Mark, axis: Axis, bounds: Interval) -> Markup:
    low, high = (svg.percent(axis.at(bound)) for bound in bounds)
    return svg.element("line", x1=low, x2=high, y1="50%", y2="50%", stroke=mark.colour, stroke_width=mark.width)


@dataclass(frozen=True, slots=True)
class PictureRow:
    """A row of a picture that stands alone."""

    label: str
    mark: Mark
    tau: float | None


def picture(rows: Sequence[PictureRow], title: str, symbols: Markup) -> Markup:
    """Return an SVG file: a row a method with its speedup and tokens per step. symbols: as `palette.symbols` has them.

    title: the sentence below it.
    """
    foot = TOP + ROW * len(rows)
    return svg.element(
        "svg",
        svg.element("title", title),
        svg.element("style", Markup(".grid{stroke:#ddd}.one{stroke:#333}")),
        symbols,
        svg.element("rect", width=WIDTH, height=foot + BOTTOM, fill="#fff"),
        svg.element("g", *_picture(rows, title, foot), fill="#333"),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {foot + BOTTOM}",
        font_size=13,
        font_family="system-ui, sans-serif",
        role="img",
    )


def _picture(rows: Sequence[PictureRow], title: str, foot: float) -> Iterator[Markup]:
    axis, end = axis_of([row.mark for row in rows]), WIDTH - NUMBERS
    yield svg.element("text", "speedup", x=end + 16, y=20, font_weight=600)
    yield svg.element("text", "τ", x=WIDTH - 12, y=20, font_weight=600, text_anchor="end")
    yield _inside(lines(axis), TOP, foot - TOP)
    for tick in axis.ticks():
        x = NAME + axis.at(tick) * (end - NAME)
        yield svg.element("text", f"{tick:g}×", x=x, y=foot + 16, text_anchor="middle", fill="#555")
    yield svg.element("text", title, x=12, y=foot + 36, fill="#555")
    for i, row in enumerate(rows):
        y = TOP + ROW * (i + 0.5) + 4
        yield svg.element("text", row.label, x=NAME - 10, y=y, text_anchor="end")
        yield _inside(drawn(row.mark, axis), TOP + ROW * i, ROW)
        yield svg.element("text", times(row.mark.value), x=end + 16, y=y)
        yield svg.element("text", number(row.tau), x=WIDTH - 12, y=y, text_anchor="end")


def _inside(content: Markup, y: float, height: float) -> Markup:
    """Return content whose percentages are of the plot alone."""
    area: dict[str, svg.Value] = {
        "x": NAME,
        "y": y,
        "width": WIDTH - NUMBERS - NAME,
        "height": height,
        "overflow": "visible",
    }
    return svg.element("svg", content, **area)
