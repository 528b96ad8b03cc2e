"""Drawings of why: for each method a waterfall from the reference's milliseconds per token to its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from markupsafe import Markup

from specbench_ss.options import REFERENCE
from specbench_ss.reports.html import svg
from specbench_ss.reports.html.axis import Axis
from specbench_ss.reports.html.page_parts import Cell, Column, Drawing, Line, Panel, Table, figure
from specbench_ss.reports.html.palette import Style
from specbench_ss.results.cost_model import Waterfall
from specbench_ss.results.text import number

HELP = {
    "passes saved": f"The pass of {REFERENCE}, made less often",
    "verifying widened": f"What the method's passes take beyond those of {REFERENCE}, drafts made within them included",
    "drafting added": "Making drafts",
    "reading prompts": "Prefill, and what the method does besides with the prompt",
    "other": "Accepting, and what else a step takes",
}


def why(found: Mapping[str, Waterfall], styles: Mapping[str, Style], order: Sequence[str]) -> Drawing:
    """Return a panel for each method, in the given order, on one scale, with the table."""
    ends = [x for label in order for _, start, end, _, _ in _drawn(found[label]) for x in (start, end)]
    axis = Axis(min([0.0, *ends]), max([1e-9, *ends]))
    return Drawing(
        "why",
        f"From {REFERENCE} to the method, in milliseconds per token",
        table(found, styles, order),
        panels=[_panel(found[label], styles[label], axis) for label in order],
        key=(("milliseconds per token", "var(--total)"), ("saved", "var(--less)"), ("added", "var(--more)")),
    )


def table(
    found: Mapping[str, Waterfall], styles: Mapping[str, Style], order: Sequence[str], name: str = "why"
) -> Table:
    """Return the numbers, a row for each method."""
    columns = [
        Column("method", False),
        Column(REFERENCE, help=f"Milliseconds per token of {REFERENCE} on the same prompts"),
        *(Column(part, help=help) for part, help in HELP.items()),
        Column("in all", help="Milliseconds per token of the method: the sum of all before"),
        Column("pass cost", help=f"The method's verifying pass over a pass of {REFERENCE}", fields=("pass ratio",)),
    ]
    rows = [_row(found[label], styles[label]) for label in order]
    return Table(name, columns, rows, f"Milliseconds per token, from {REFERENCE} to the method", name == "why")


def _row(one: Waterfall, style: Style) -> list[Cell]:
    ends = (one.reference_ms, *one.parts.values(), one.method_ms)
    return [
        style.cell(),
        *(figure(x, 2) for x in ends[:-1]),
        figure(ends[-1], 2, strong=True),
        figure(one.pass_ratio, values=(one.pass_ratio,)),
    ]


def _panel(one: Waterfall, style: Style, axis: Axis) -> Panel:
    lines = [Line(name, "", _bar(axis, start, end, kind), text) for name, start, end, kind, text in _drawn(one)]
    return Panel(style.label, style.swatch, lines, note=one.sentence())


def _drawn(one: Waterfall) -> list[tuple[str, float, float, str, str]]:
    """Return name, start, end, kind and text of each bar."""
    at, bars = one.reference_ms, [(REFERENCE, 0.0, one.reference_ms, "total", number(one.reference_ms))]
    for name, part in one.parts.items():
        signed = f"{part:+.2f}".replace("-", "−")
        bars.append((name, at, at + part, "more" if part > 0 else "less", signed))
        at += part
    bars.append(("in all", 0.0, one.method_ms, "total", number(one.method_ms)))
    return bars


def _bar(axis: Axis, start: float, end: float, kind: str) -> Markup:
    left, right = sorted((axis.at(start), axis.at(end)))
    area = {"x": svg.percent(left), "width": svg.percent(max(right - left, 0.003)), "y": "18%", "height": "64%"}
    bar = svg.element("rect", fill=f"var(--{kind})", **area)
    return svg.element("svg", bar, class_="strip", aria_hidden="true")
