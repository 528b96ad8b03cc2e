"""Where the time goes: the parts of a step, and what they cost for each token that is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from markupsafe import Markup

from specbench_ss.options import REFERENCE
from specbench_ss.reports.html import svg
from specbench_ss.reports.html.axis import Axis, from_zero
from specbench_ss.reports.html.forest import grid_of, scale, strip
from specbench_ss.reports.html.page_parts import Cell, Column, Drawing, Line, Table, figure
from specbench_ss.reports.html.palette import PARTS, Style
from specbench_ss.results.summary import QUANTILES, SummaryRow
from specbench_ss.results.text import number

STEP_PARTS = ("draft", "verify", "accept", "host")
WAITS = {  # as in `latencies`: words of a heading, and its definition
    "ttft": ("first token", "Time to the first token"),
    "tpot": ("per token", "Time per output token after the first"),
    "latency": ("request", "Time of a whole request"),
}
WORDS = {
    "prefill": "Reading the prompt",
    "draft": "Making the draft",
    "verify": "The model's pass over the draft",
    "accept": "Choosing the accepted path, compacting the cache",
    "host": "The rest of the step",
}


def per_token(overall: Mapping[str, SummaryRow], styles: Mapping[str, Style], ranked: Sequence[str]) -> Drawing:
    """Show milliseconds per kept token as stacked bars."""
    parts = {label: found for label in ranked if (found := _ms_per_token(overall[label]))}
    return _stacked("time-per-token", "Time per kept token", "Milliseconds per kept token", parts, styles)


def per_step(overall: Mapping[str, SummaryRow], styles: Mapping[str, Style], ranked: Sequence[str]) -> Drawing:
    """Show the milliseconds of a step as stacked bars."""
    parts = {label: found for label in ranked if (found := _ms_per_step(overall[label]))}
    return _stacked("time-per-step", "Time of a step", "Milliseconds of a step", parts, styles)


def _stacked(
    name: str, title: str, caption: str, parts: Mapping[str, Mapping[str, float]], styles: Mapping[str, Style]
) -> Drawing:
    """Draw a bar for each method, on one axis. parts: milliseconds by part, by method."""
    axis, shown = (
        from_zero([sum(of.values()) for of in parts.values()]),
        list(dict.fromkeys(p for of in parts.values() for p in of)),
    )
    lines = [
        Line(label, styles[label].swatch, _bar(of, axis, name), number(sum(of.values()))) for label, of in parts.items()
    ]
    rows = [
        [styles[label].cell(), *(figure(of[part], 2) for part in shown), figure(sum(of.values()), 2, strong=True)]
        for label, of in parts.items()
    ]
    columns = [Column("method", False), *(Column(part, help=WORDS[part]) for part in shown), Column("sum")]
    return Drawing(
        name,
        title,
        Table(name, columns, rows, caption),
        lines,
        axis=scale(axis, " ms") if parts else Markup(),
        key=[(part, PARTS[part]) for part in shown],
        note=f"{caption}, by part of the work. Parts too thin to be seen have their numbers in the table.",
        grid=grid_of(axis, name),
    )


def _bar(parts: Mapping[str, float], axis: Axis, grid: str) -> Markup:
    pieces, at = [], 0.0
    for part, ms in parts.items():
        area = {"x": svg.percent(axis.at(at)), "width": svg.percent(axis.at(at + ms) - axis.at(at))}
        pieces.append(svg.element("rect", **area, y="15%", height="70%", style=f"fill:{PARTS[part]}"))
        at += ms
    return strip(grid, *pieces)


def _ms_per_step(row: SummaryRow) -> dict[str, float]:
    """Return the mean milliseconds of each part of a step; nothing where nothing was measured."""
    seconds = (row.draft_s, row.verify_s, row.accept_s, row.host_s)
    return {part: 1000 * (s or 0.0) for part, s in zip(STEP_PARTS, seconds, strict=True)} if row.step_s else {}


def _ms_per_token(row: SummaryRow) -> dict[str, float]:
    """Return the mean milliseconds of each part for one kept token; nothing where nothing was measured."""
    if not row.tokens or row.target_calls is None or row.prefill_s is None:
        return {}
    of_step = {"draft": row.draft_s, "verify": row.verify_s, "accept": row.accept_s, "host": row.host_s}
    per_token = {part: (seconds or 0.0) * row.target_calls / row.tokens * 1000 for part, seconds in of_step.items()}
    return {"prefill": row.prefill_s / row.tokens * 1000, **per_token}


def latency(overall: Mapping[str, SummaryRow], styles: Mapping[str, Style]) -> Table:
    """Show how long a user waits: quantiles over samples, in milliseconds."""
    columns = [
        Column("method", False),
        *(
            Column(f"{words} {quantile}", help=f"{WAITS[name][1]}, milliseconds: {quantile} over samples")
            for name, (words, _) in WAITS.items()
            for quantile in QUANTILES
        ),
    ]
    rows = [
        [styles[label].cell(), *(_quantile(row, name, quantile) for name in WAITS for quantile in QUANTILES)]
        for label, row in overall.items()
        if row.latency_s_p50 is not None
    ]
    return Table(
        "latency", columns, rows, "How long a request takes, in milliseconds: median, 95th and 99th percentile"
    )


def _quantile(row: SummaryRow, name: str, quantile: str) -> Cell:
    seconds = getattr(row, f"{name}_s_{quantile}")
    return figure(None if seconds is None else seconds * 1000, 2 if name == "tpot" else 1)


def decomposition(
    overall: Mapping[str, SummaryRow], medians: Mapping[str, float], styles: Mapping[str, Style]
) -> Table:
    """Split the speedup: tokens per step over step cost, times a residual."""
    columns = [
        Column("method", False),
        *(Column(part, help=f"{WORDS[part]}, milliseconds a step") for part in STEP_PARTS),
        Column("step", help="Mean milliseconds of a step: the sum of its parts"),
        Column("median", help="Median milliseconds of a step"),
        Column("τ", help="Tokens per step, pooled over all steps"),
        Column("step cost", help=f"The method's step time over that of {REFERENCE}", fields=("step ratio",)),
        Column("residual", help="What the two leave unexplained: prefill, the first token, answers of other lengths"),
        Column("speedup", help="τ over step cost, times residual"),
    ]
    rows = [_decomposed(row, medians.get(label), styles[label]) for label, row in overall.items() if row.step_s]
    caption = "One step on average, in milliseconds, and why more accepted tokens may still be slower"
    return Table("step-times", columns, rows, caption)


def _decomposed(row: SummaryRow, median: float | None, style: Style) -> list[Cell]:
    parts = (row.draft_s, row.verify_s, row.accept_s, row.host_s, row.step_s)
    return [
        style.cell(),
        *(figure(None if seconds is None else seconds * 1000, 2) for seconds in parts),
        figure(median, 2),
        figure(row.tau, 2, "×" if row.tau else ""),
        figure(row.step_cost, 2, values=(row.step_ratio,)),
        figure(row.residual, 2, "×"),
        figure(row.speedup, 2, "×", strong=True),
    ]
