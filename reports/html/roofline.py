"""The roofline: each method's verifying and drafting under the machine's measured limits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from specbench_ss.reports.html import svg
from specbench_ss.reports.html.axis import Axis
from specbench_ss.reports.html.page_parts import Cell, Column, Drawing, Panel, Table, figure, plain
from specbench_ss.reports.html.palette import Style
from specbench_ss.results.cost_model import Point, Roof
from specbench_ss.results.text import number, percent

ROOM = 1.6  # factor beyond the outermost points
COLUMNS = (
    ("FLOP/byte", "Arithmetic intensity: operations for each byte that is read, counted from shapes"),
    ("GFLOP/s", "Counted operations over the measured seconds of that part"),
    ("of the limit", "Of what this machine could do at most with so many operations a byte"),
)


def drawing(roof: Roof, found: Sequence[Point], styles: Mapping[str, Style], ranked: Sequence[str]) -> Drawing:
    """Return a panel for each method, in the order of `ranked`, with the table."""
    of = {label: [point for point in found if point.method == label] for label in ranked}
    intensity = _axis([roof.ridge, *(point.intensity for point in found)])
    rate = _axis([roof.products, *(point.rate for point in found)])
    panels = [
        Panel(
            label,
            styles[label].swatch,
            picture=_plot(roof, points, styles[label], intensity, rate),
            axis=_below(intensity),
            text=_said(roof, points),
        )
        for label, points in of.items()
        if points
    ]
    columns = [Column("method", False), Column("part", False), *(Column(name, help=help) for name, help in COLUMNS)]
    rows = [_row(roof, point, styles[label]) for label, points in of.items() for point in points]
    return Drawing(
        "roofline",
        "Under the machine's limits",
        Table("roofline", columns, rows),
        panels=panels,
        note=(
            "To the right operations a byte, up billions of operations a second (GFLOP/s), both logarithmic, the same "
            "in all panels. The "
            f"line is this machine's limit: reading {number(roof.read / 1e9, 1)} GB/s, then "
            f"{number(roof.products / 1e9, 0)} GFLOP/s; the number is the share of it that verifying reached. Filled: "
            "verifying; hollow: drafting, where a drafter has weights."
        ),
    )


def _axis(values: Sequence[float]) -> Axis:
    return Axis(min(values) / ROOM, max(values) * ROOM, log=True)


def _said(roof: Roof, points: Sequence[Point]) -> str:
    return percent(points[0].rate / roof.at(points[0].intensity))


def _row(roof: Roof, point: Point, style: Style) -> list[Cell]:
    share = point.rate / roof.at(point.intensity)
    return [
        style.cell(),
        plain(point.part),
        figure(point.intensity),
        figure(point.rate / 1e9),
        Cell(percent(share, 1), share),
    ]


def _plot(roof: Roof, points: Sequence[Point], style: Style, intensity: Axis, rate: Axis) -> Markup:
    """Return the roof and the points of one method."""
    corners = [intensity.low, roof.ridge, intensity.high]
    ends = [(intensity.at(x), 1 - rate.at(roof.at(x))) for x in corners]
    lines = [
        svg.element("line", x1=svg.percent(a), y1=svg.percent(b), x2=svg.percent(c), y2=svg.percent(d), class_="one")
        for (a, b), (c, d) in zip(ends, ends[1:], strict=False)
    ]
    return svg.element(
        "svg",
        *_beside(rate),
        *lines,
        *_numbers(rate),
        *(_mark(point, style, intensity, rate) for point in points),
        class_="small-plot",
        aria_hidden="true",
    )


def _powers(axis: Axis) -> list[float]:
    """Return the powers of ten on an axis, no more than four."""
    ends = math.ceil(math.log10(axis.low)), math.floor(math.log10(axis.high))
    return [10.0**n for n in range(ends[0], ends[1] + 1, 1 + (ends[1] - ends[0]) // 4)]


def _below(intensity: Axis) -> Markup:
    """Return the numbers below a panel and what they are of."""
    numbers = [_number(x, svg.percent(intensity.at(x)), 11, "middle") for x in _powers(intensity)]
    title = svg.element("text", "operations a byte", x="50%", y=25, text_anchor="middle")
    return svg.element("svg", *numbers, title, class_="scale two", aria_hidden="true")


def _beside(rate: Axis) -> Iterator[Markup]:
    """Yield a line for each power of ten of operations a second."""
    for x in _powers(rate):
        y = svg.percent(1 - rate.at(x))
        yield svg.element("line", class_="grid", x1=0, x2="100%", y1=y, y2=y)


def _numbers(rate: Axis) -> Iterator[Markup]:
    """Yield the numbers of these lines in GFLOP/s. They come after all lines, which they interrupt."""
    for x in _powers(rate):
        unit = " GFLOP/s" if x == _powers(rate)[-1] else ""
        yield _number(x / 1e9, 0, svg.percent(1 - rate.at(x)), "start", unit, dy=3)


def _number(value: float, x: svg.Value, y: svg.Value, anchor: str, unit: str = "", **rest: svg.Value) -> Markup:
    return svg.element("text", f"{value:g}{unit}", x=x, y=y, text_anchor=anchor, **rest)


def _mark(point: Point, style: Style, intensity: Axis, rate: Axis) -> Markup:
    colour = f"var(--{style.css})"
    hollow: dict[str, Any] = (
        {} if point.part == "verifying" else {"fill_opacity": 0, "stroke": colour, "stroke_width": 1.5}
    )
    place = {"x": svg.percent(intensity.at(point.intensity)), "y": svg.percent(1 - rate.at(point.rate))}
    return svg.element("use", href=f"#sy-{style.symbol}", fill=colour, **place, **hollow)
