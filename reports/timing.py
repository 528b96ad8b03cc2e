"""Where the time goes: the parts of a step, and what they cost for each token that is kept."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from specbench_ss.config import REFERENCE
from specbench_ss.reports import frames
from specbench_ss.reports.palette import PARTS, Style
from specbench_ss.reports.view import Cell, Chart, Column, Table, figure, times

WORDS = {
    "prefill": "reading the prompt",
    "draft": "making the draft",
    "verify": "the model's pass over the draft",
    "accept": "choosing the accepted path, compacting the cache",
    "host": "time that no part accounts for",
}


def per_token(samples: pd.DataFrame, steps: pd.DataFrame, styles: Mapping[str, Style]) -> Chart:
    """Stacked bars: milliseconds per kept token."""
    frame = frames.time_per_token(samples, steps)
    labels = [label for label in styles if label in frame.index]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": part,
            "y": labels,
            "x": [float(frame.loc[label, part]) for label in labels],
            "marker": {
                "color": colour,
                "line": {"color": "var(--raised)", "width": 1},
                "pattern": {"shape": pattern, "fgcolor": "#fff", "fgopacity": 0.5, "size": 7},
            },
            "hovertemplate": f"{part} (%{{y}}): %{{x:.2f}} ms per token",
        }
        for part, (colour, pattern) in PARTS.items()
    ]
    rows = [
        [
            Cell(label, label, swatch=styles[label].css),
            *(figure(float(frame.loc[label, part]), 2) for part in PARTS),
            figure(float(frame.loc[label].sum()), 2, strong=True),
        ]
        for label in labels
    ]
    columns = [Column("method", False), *(Column(part, help=WORDS[part]) for part in PARTS), Column("sum")]
    return Chart(
        "time-per-token",
        "Time per kept token",
        "Stacked bars: milliseconds per kept token and method, by part of the work.",
        data,
        {
            "barmode": "stack",
            "xaxis": {"title": {"text": "milliseconds per kept token"}, "rangemode": "tozero"},
            "yaxis": {"autorange": "reversed", "ticksuffix": "  ", "showgrid": False},
            "legend": {"traceorder": "normal"},
        },
        Table("time-per-token", columns, rows, "Milliseconds per kept token"),
        height=130 + 46 * len(labels),
    )


def decomposition(steps: pd.DataFrame, styles: Mapping[str, Style]) -> Table:
    """Speed in decoding = tokens per step x how much longer a step takes than the reference's."""
    frame = frames.step_times(steps)
    reference = frame.loc[REFERENCE, "total"] if REFERENCE in frame.index else None
    rows = []
    for label in (label for label in styles if label in frame.index):
        row = frame.loc[label]
        cost = None if reference is None else row["total"] / reference
        rows.append(
            [
                Cell(label, label, swatch=styles[label].css),
                figure(row["steps"], 0),
                *(figure(row[part], 3) for part in frames.PARTS),
                figure(row["total"], 3),
                figure(row["median"], 3),
                Cell(times(cost), cost),
                figure(row["tau"], 2),
                Cell(times(None if cost is None else row["tau"] / cost), None if cost is None else row["tau"] / cost),
            ]
        )
    columns = [
        Column("method", False),
        Column("steps"),
        *(Column(f"{part}, ms", help=WORDS[part]) for part in frames.PARTS),
        Column("step, ms", help="Mean time of a step: the sum of its parts"),
        Column("median, ms"),
        Column("step cost", help="Mean time of a step over that of the reference"),
        Column("τ", help="Tokens per step, pooled over all steps"),
        Column("τ / cost", help="Speedup of the decoding steps: tokens per step over step cost (prefill left out)"),
    ]
    return Table("step-times", columns, rows, "One step, on average: why more accepted tokens may still be slower")
