"""Charts of how much of what is drafted is accepted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from specbench_ss.reports.html.page_parts import Cell, Chart, Column, Table, figure
from specbench_ss.reports.html.palette import Style
from specbench_ss.results.number_text import percent
from specbench_ss.results.summary import SummaryRow

GIVEN = "Share of the steps that accepted this draft position, among those that had accepted the one before it"
AT = "Share of the steps that accepted this draft position, among those that drafted it"


def histogram(counted: pd.DataFrame, styles: Mapping[str, Style]) -> Chart:
    """Show the share of steps by the number of tokens that they kept, as `frames.tokens_per_step` counts them."""
    of = {label: own for label in styles if len(own := counted[counted["method"] == label])}
    data = [
        {
            "type": "bar",
            "name": label,
            "x": own["tokens"].tolist(),
            "y": own["share"].tolist(),
            "customdata": own["steps"].tolist(),
            "marker": styles[label].marker(),
            "hovertemplate": "%{x} tokens: %{y:.1%} of steps (%{customdata:,})",
        }
        for label, own in of.items()
    ]
    rows = [
        [styles[label].cell(), figure(tokens, 0), figure(n, 0), _share(share)]
        for label, own in of.items()
        for tokens, n, share in zip(own["tokens"], own["steps"], own["share"], strict=True)
    ]
    columns = [Column("method", False), Column("tokens"), Column("steps"), Column("share of steps")]
    return Chart(
        "tokens-per-step",
        "Tokens per step",
        "Bar chart: share of the steps of each method by the number of tokens they kept.",
        data,
        {
            "barmode": "group",
            "xaxis": {"title": {"text": "tokens kept by a step"}, "dtick": 1},
            "yaxis": {"title": {"text": "share of steps"}, "tickformat": ".0%"},
        },
        Table("tokens-per-step", columns, rows),
        "A step is one verifying pass of the model; plain decoding keeps exactly one token a step.",
    )


def by_position(overall: Mapping[str, SummaryRow], styles: Mapping[str, Style]) -> Chart:
    """Show conditional acceptance by draft position."""
    drafting = {label: row for label, row in overall.items() if row.acceptance_given}
    rows = [cells for label, row in drafting.items() for cells in _positions(row, styles[label])]
    columns = [
        Column("method", False),
        Column("position"),
        Column("accepted, given the one before", help=GIVEN),
        Column("n"),
        Column("accepted at", help=AT),
        Column("n"),
    ]
    return Chart(
        "acceptance",
        "Acceptance by draft position",
        "Line chart: for each method, the share of steps that accept a draft position once the one before is accepted.",
        [_line(row, styles[label]) for label, row in drafting.items()],
        {
            "xaxis": {"title": {"text": "draft position"}, "dtick": 1},
            "yaxis": {"title": {"text": "accepted, given the one before"}, "tickformat": ".0%", "range": [0, 1.04]},
        },
        Table("acceptance", columns, rows),
        "Given that every earlier position was accepted. The table has the number of steps behind each point.",
    )


def _line(row: SummaryRow, style: Style) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": row.method,
        "x": list(range(1, len(row.acceptance_given) + 1)),
        "y": list(row.acceptance_given),
        "customdata": list(row.acceptance_given_n),
        "line": {"color": style.colour, "dash": style.dash, "width": 2},
        "marker": {"color": style.colour, "symbol": style.symbol, "size": 9},
        "hovertemplate": "position %{x}: %{y:.1%} (n = %{customdata:,})",
    }


def _positions(row: SummaryRow, style: Style) -> list[list[Cell]]:
    columns = (row.acceptance_given, row.acceptance_given_n, row.acceptance_at, row.acceptance_at_n)
    return [
        [style.cell(), figure(i, 0), _share(given), figure(given_n, 0), _share(at), figure(at_n, 0)]
        for i, (given, given_n, at, at_n) in enumerate(zip(*columns, strict=False), start=1)
    ]


def _share(value: float) -> Cell:
    return Cell(percent(value, 1), value)
