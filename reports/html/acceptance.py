"""Drawings of how much of what is drafted is accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
from markupsafe import Markup

from specbench_ss.reports.html import svg
from specbench_ss.reports.html.axis import from_zero, nice_step
from specbench_ss.reports.html.page_parts import Cell, Column, Drawing, Panel, Table, figure
from specbench_ss.reports.html.palette import Style
from specbench_ss.results.summary import SummaryRow
from specbench_ss.results.text import number, percent

GIVEN = "Share of the steps that accepted this draft position, among those that had accepted the one before it"
AT = "Share of the steps that accepted this draft position, among those that drafted it"
REACHED = "Share of all steps whose draft is at least that long"
FEW, PALE = 20, 0.35  # steps below which a share is drawn pale, and how pale
GAP = 0.18  # of a bar's place
PLACES = 12  # of a plot, at most: what lies beyond would leave most panels empty


def histogram(
    counted: pd.DataFrame, overall: Mapping[str, SummaryRow], styles: Mapping[str, Style], ranked: Sequence[str]
) -> Drawing:
    """Show the share of steps by the number of tokens that they kept, as `frames.tokens_per_step` counts them."""
    of = {label: own for label in ranked if len(own := counted[counted["method"] == label])}
    longest = max((int(own["tokens"].max()) for own in of.values()), default=1)
    most = min(longest, PLACES)
    panels = [
        Panel(
            label,
            styles[label].swatch,
            picture=_bars(own.groupby(own["tokens"].clip(upper=most))["share"].sum().to_dict(), most, styles[label]),
            axis=_places(1, most, longest > most),
            text=f"τ {number(overall[label].tau)}",
        )
        for label, own in of.items()
    ]
    rows = [
        [styles[label].cell(), figure(tokens, 0), figure(n, 0), _share(share)]
        for label, own in of.items()
        for tokens, n, share in zip(own["tokens"], own["steps"], own["share"], strict=True)
    ]
    columns = [Column("method", False), Column("tokens"), Column("steps"), Column("share of steps")]
    return Drawing(
        "tokens-per-step",
        "Tokens kept by a step",
        Table("tokens-per-step", columns, rows),
        panels=panels,
        note="Bars: share of steps, from 0 to 100 %, by how many tokens they kept. A step is one verifying pass of the "
        "model; plain decoding keeps exactly one token a step."
        + (f" The last bar has all that kept {most} or more." if longest > most else ""),
    )


def by_position(
    overall: Mapping[str, SummaryRow], steps: Mapping[str, int], styles: Mapping[str, Style], ranked: Sequence[str]
) -> Drawing:
    """Show conditional acceptance by draft position. steps: how many each method made on the same samples."""
    drafting = {label: overall[label] for label in ranked if overall[label].acceptance_given}
    longest = max((len(row.acceptance_given) for row in drafting.values()), default=1)
    most = min(longest, PLACES)
    panels = [
        Panel(
            label,
            styles[label].swatch,
            picture=_dots(row, steps[label], most, styles[label]),
            axis=_places(1, most),
            text=f"first {percent(row.acceptance_given[0])}",
        )
        for label, row in drafting.items()
    ]
    columns = [
        Column("method", False),
        Column("position"),
        Column("accepted, given the one before", help=GIVEN),
        Column("n"),
        Column("accepted at", help=AT),
        Column("n"),
        Column("reached", help=REACHED),
    ]
    rows = [cells for label, row in drafting.items() for cells in _positions(row, steps[label], styles[label])]
    return Drawing(
        "acceptance",
        "Acceptance by draft position",
        Table("acceptance", columns, rows),
        panels=panels,
        note="Dots: share of steps, from 0 to 100 %, that accept a draft position once the one before is accepted; "
        f"pale where fewer than {FEW} steps are behind it. Grey bars: share of all steps whose draft is that long."
        " Tokens behind an answer's end are accepted here and count in no τ."
        + (f" Positions beyond {most} are in the table." if longest > most else ""),
    )


def _bars(shares: Mapping[int, float], most: int, style: Style) -> Markup:
    """Return a bar for each number of tokens from 1 to `most`."""
    fill = f"var(--{style.css})"
    return _plot([_bar(tokens - 1, 1 / most, share, fill) for tokens, share in shares.items() if tokens > 0])


def _bar(place: int, wide: float, share: float, fill: str | None, **rest: svg.Value) -> Markup:
    """Return a bar from the ground up. place: its number, from 0; wide: the part of the plot that each place takes."""
    return svg.element(
        "rect",
        x=svg.percent(wide * (place + GAP / 2)),
        width=svg.percent(wide * (1 - GAP)),
        y=svg.percent(1 - share),
        height=svg.percent(share),
        fill=fill,
        **rest,
    )


def _dots(row: SummaryRow, steps: int, most: int, style: Style) -> Markup:
    """Return a symbol for each draft position, joined by lines, over bars of how many steps reach it."""
    places = [((i + 0.5) / most, 1 - share) for i, share in enumerate(row.acceptance_given[:most])]
    pale = [None if n >= FEW else PALE for n in row.acceptance_given_n[:most]]
    colour = f"var(--{style.css})"
    bars = [_bar(i, 1 / most, n / steps, None, class_="reached") for i, n in enumerate(row.acceptance_at_n[:most])]
    lines = [
        svg.element("line", **_ends(a, b), stroke=colour, stroke_width=1.5, opacity=seen)
        for a, b, seen in zip(places, places[1:], pale[1:], strict=False)
    ]
    dots = [
        svg.element("use", href=f"#sy-{style.symbol}", x=svg.percent(x), y=svg.percent(y), fill=colour, opacity=seen)
        for (x, y), seen in zip(places, pale, strict=True)
    ]
    return _plot([*bars, *lines, *dots])


def _ends(a: tuple[float, float], b: tuple[float, float]) -> dict[str, str]:
    return dict(zip(("x1", "y1", "x2", "y2"), map(svg.percent, (*a, *b)), strict=True))


def _plot(content: Sequence[Markup]) -> Markup:
    """Return a plot on the lines of `halves`."""
    grid = svg.element("use", href="#grid-halves")
    return svg.element("svg", grid, *content, class_="small-plot", aria_hidden="true")


def halves() -> Markup:
    """Return the definition of the lines at 0, a half and 1 of all these plots."""
    drawn = (svg.element("line", class_="grid", x1=0, x2="100%", y1=y, y2=y) for y in ("0%", "50%", "100%"))
    return svg.element("defs", svg.element("g", *drawn, id="grid-halves"))


def _places(first: int, most: int, more: bool = False) -> Markup:
    """Return the numbers below a plot whose places are numbered from `first`. more: the last place is open."""
    step = max(1, round(nice_step(from_zero([most]).high))) if most > 8 else 1
    numbers = [n for n in range(first, most + 1) if n == first or n % step == 0 or (more and n == most)]
    texts = [
        svg.element(
            "text",
            f"{n}+" if more and n == most else str(n),
            x=svg.percent((n - first + 0.5) / most),
            y=12,
            text_anchor="middle",
        )
        for n in numbers
    ]
    return svg.element("svg", *texts, class_="scale", aria_hidden="true")


def _positions(row: SummaryRow, steps: int, style: Style) -> list[list[Cell]]:
    columns = (row.acceptance_given, row.acceptance_given_n, row.acceptance_at, row.acceptance_at_n)
    return [
        [
            style.cell(),
            figure(i, 0),
            _share(given),
            figure(given_n, 0),
            _share(at),
            figure(at_n, 0),
            _share(at_n / steps),
        ]
        for i, (given, given_n, at, at_n) in enumerate(zip(*columns, strict=False), start=1)
    ]


def _share(value: float) -> Cell:
    return Cell(percent(value, 1), value)
