"""How much of what is drafted is accepted."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from specbench_ss.reports import frames
from specbench_ss.reports.palette import Style
from specbench_ss.reports.view import Cell, Chart, Column, Table, figure, number, percent

GIVEN = "Share of the steps that accepted this draft position, among those that had accepted the one before it"
AT = "Share of the steps that accepted this draft position, among those that drafted it"


def charts(steps: pd.DataFrame, styles: Mapping[str, Style]) -> list[Chart]:
    """Histogram of tokens per step; acceptance by draft position."""
    drafting = {label: style for label, style in styles.items() if (steps["method"] == label).any()}
    return [_histogram(steps, drafting), _by_position(steps, drafting)]


def _histogram(steps: pd.DataFrame, styles: Mapping[str, Style]) -> Chart:
    counted = frames.tokens_per_step(steps)
    of = {label: counted[counted["method"] == label] for label in styles}
    data = [
        {
            "type": "bar",
            "name": label,
            "x": of[label]["tokens"].tolist(),
            "y": of[label]["share"].tolist(),
            "customdata": of[label]["steps"].tolist(),
            "marker": style.marker(),
            "hovertemplate": "%{x} tokens: %{y:.1%} of steps (%{customdata:,})",
        }
        for label, style in styles.items()
    ]
    rows = [
        [Cell(label, label, swatch=styles[label].css), figure(row.tokens, 0), figure(row.steps, 0), _share(row.share)]
        for label in styles
        for row in of[label].itertuples()
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


def _by_position(steps: pd.DataFrame, styles: Mapping[str, Style]) -> Chart:
    found = frames.acceptance(steps)
    data, rows = [], []
    for label, style in styles.items():
        own = found[found["method"] == label]
        if own.empty:
            continue
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": label,
                "x": own["position"].tolist(),
                "y": own["given"].tolist(),
                "customdata": own["n"].tolist(),
                "line": {"color": style.colour, "dash": style.dash, "width": 2},
                "marker": {"color": style.colour, "symbol": style.symbol, "size": 9},
                "hovertemplate": "position %{x}: %{y:.1%} (n = %{customdata:,})",
            }
        )
        rows += [
            [
                Cell(label, label, swatch=style.css),
                figure(row.position, 0),
                Cell(percent(row.given, 1), row.given),
                Cell(number(row.n, 0), row.n),
                Cell(percent(row.at, 1), row.at),
                Cell(number(row.drafted, 0), row.drafted),
            ]
            for row in own.itertuples()
        ]
    columns = [
        Column("method", False),
        Column("draft position"),
        Column("accepted, given the one before", help=GIVEN),
        Column("n"),
        Column("accepted at", help=AT),
        Column("drafted"),
    ]
    return Chart(
        "acceptance",
        "Acceptance by draft position",
        "Line chart: for each method, the share of steps that accept a draft position once the one before is accepted.",
        data,
        {
            "xaxis": {"title": {"text": "draft position"}, "dtick": 1},
            "yaxis": {"title": {"text": "accepted, given the one before"}, "tickformat": ".0%", "range": [0, 1.02]},
        },
        Table("acceptance", columns, rows),
        "Given that every earlier position of the draft was accepted; n falls from left to right and is in the table.",
    )


def _share(value: float) -> Cell:
    return Cell(percent(value, 1), value)
