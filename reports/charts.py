"""Plotly figures of a run: ranking, causes, acceptance, roofline, time and tasks; lines, bars and heat maps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from specbench_ss.options import REFERENCE
from specbench_ss.reports.palette import (
    COLOURS,
    GREY,
    GRID,
    INK,
    LESS,
    MORE,
    MUTED,
    PAPER,
    PARTS,
    SYMBOLS,
    Style,
)
from specbench_ss.results.cost_model import Point, Roof, Waterfall
from specbench_ss.results.places import PlaceRow
from specbench_ss.results.summary import SummaryRow
from specbench_ss.results.text import format_number, format_speedup, interval, percent, title, visible

ROW, FRAME = 26, 64  # pixels of a row of a chart, and of what is around the rows
HEIGHT = 360  # pixels of other charts
FEW = 20  # steps below which an acceptance rate is not drawn
RATIOS = (0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 15, 20, 30, 50)
NAMED = 8  # points with their names next to them; more have a legend
SLOPES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # lines of equal speedup
AXIS: Mapping[str, Any] = {
    "gridcolor": GRID, "linecolor": MUTED, "zerolinecolor": GRID, "zeroline": False,
    "ticklabelstandoff": 6, "automargin": True,
    "tickfont": {"color": MUTED, "size": 12}, "title": {"font": {"color": MUTED, "size": 12.5}, "standoff": 8},
}  # fmt: skip
STYLE: Mapping[str, Any] = {
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "font": {"family": "system-ui, Liberation Sans, Arial, sans-serif", "size": 12.5, "color": INK},
    "margin": {"l": 8, "r": 16, "t": 10, "b": 40},
    "xaxis": AXIS,
    "yaxis": AXIS,
    "legend": {"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom"},
    "hoverlabel": {"bgcolor": PAPER, "bordercolor": MUTED, "font": {"color": INK}},
    "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": MUTED, "activecolor": INK},
    "hovermode": "closest",
    "dragmode": False,
    "colorway": COLOURS,
    "bargap": 0.28,
}
MARKERS = tuple(SYMBOLS)
DASHES = ("solid", "dash", "dot", "dashdot")


def text_of(label: str) -> str:
    """Return a label as plain text to Plotly, which reads HTML in labels."""
    return visible(label).replace("&", "&amp;").replace("<", "&lt;")


def ratio_axis(values: Sequence[float]) -> tuple[float, float, list[float]]:
    """Return low, high and ticks of a logarithmic axis that holds all ratios and 1; the ticks are not too close."""
    finite = [value for value in values if math.isfinite(value) and value > 0]
    low, high = min([0.8, *finite]) / 1.04, max([1.25, *finite]) * 1.04
    apart = 0.12 * math.log(high / low)
    ticks = [1.0]
    for tick in sorted((t for t in RATIOS if low <= t <= high), key=lambda t: (len(f"{t:g}"), abs(math.log(t)))):
        if all(abs(math.log(tick / other)) >= apart for other in ticks):
            ticks.append(float(tick))
    return low, high, sorted(ticks)


def figure(traces: Sequence[Any], x: str = "", y: str = "", height: float = HEIGHT, **layout: Any) -> go.Figure:
    """Return a figure in the one style. x, y: titles of the axes. layout: more of Plotly's layout."""
    made = go.Figure(list(traces), {"template": {"layout": STYLE}, "height": height})
    made.update_layout(xaxis_title_text=x, yaxis_title_text=y, **layout)
    return made


def lines(
    series: Mapping[str, Sequence[tuple[float, float | None]]],
    x: str = "",
    y: str = "",
    bands: Mapping[str, Sequence[tuple[float, float]]] | None = None,
) -> go.Figure:
    """Return a line with markers for each series of (x, y). bands: (low, high) of each point of a series."""
    traces: list[Any] = []
    for i, (name, points) in enumerate(series.items()):
        colour, places = COLOURS[i % len(COLOURS)], [place for place, _ in points]
        if bands and name in bands:
            ends = bands[name]
            around = [low for low, _ in ends] + [high for _, high in reversed(ends)]
            traces.append(go.Scatter(
                x=places + places[::-1], y=around, fill="toself", fillcolor=colour, opacity=0.2, mode="none",
                hoverinfo="skip", showlegend=False,
            ))  # fmt: skip
        traces.append(go.Scatter(
            x=places, y=[value for _, value in points], name=text_of(name), mode="lines+markers",
            line={"color": colour, "dash": DASHES[i % len(DASHES)], "width": 2},
            marker={"symbol": MARKERS[i % len(MARKERS)], "size": 8},
        ))  # fmt: skip
    return figure(traces, x, y)


def bars(series: Mapping[str, Sequence[tuple[str, float | None]]], x: str = "", y: str = "") -> go.Figure:
    """Return a group of bars for each series of (name, height)."""
    traces = [
        go.Bar(x=[text_of(at) for at, _ in points], y=[value for _, value in points], name=text_of(name),
               marker_color=COLOURS[i % len(COLOURS)])
        for i, (name, points) in enumerate(series.items())
    ]  # fmt: skip
    return figure(traces, x, y, barmode="group")


def heat_map(
    values: Sequence[Sequence[float | None]], columns: Sequence[str], rows: Sequence[str], x: str = "", y: str = "",
    **trace: Any,
) -> go.Figure:  # fmt: skip
    """Return a heat map, the first row on top. trace: more of Plotly's heat map, such as its colour scale."""
    cells = go.Heatmap(z=values, x=list(map(text_of, columns)), y=list(map(text_of, rows)), **trace)
    return figure([cells], x, y, FRAME + 60 + ROW * len(rows), yaxis_autorange="reversed")


def ranking(rows: Sequence[SummaryRow], styles: Mapping[str, Style], names: Sequence[str] = ()) -> go.Figure:
    """Return speedups with 95% CIs, a row a method; hollow: not significantly different from the baseline.

    names: what to call the rows where it is not their methods.
    """
    names = names or [styles[row.method].name for row in rows]
    shown = [(row, name) for row, name in zip(rows, names, strict=True) if row.speedup]
    ends = [end for row, _ in shown for end in (row.speedup or 1.0, *(row.speedup_interval or ()))]
    traces = [_speedup(row, styles[row.method], at) for at, (row, _) in enumerate(shown)]
    notes = [
        {"x": 1.01, "xref": "paper", "xanchor": "left", "y": at, "showarrow": False,
         "text": f"{format_speedup(row.speedup)}  τ {format_number(row.mean_acceptance_length)}"}
        for at, (row, _) in enumerate(shown)
    ]  # fmt: skip
    made = _in_rows(traces, [name for _, name in shown], "speedup, 95% CI", margin_r=124, annotations=notes)
    return _with_ratios(made, ends)


def _speedup(row: SummaryRow, style: Style, at: float) -> go.Scatter:
    low, high = row.speedup_interval or (row.speedup, row.speedup)
    value = row.speedup or math.nan
    sure = row.comparison in ("faster", "slower")
    error = {
        "symmetric": False, "array": [(high or value) - value], "arrayminus": [value - (low or value)],
        "color": style.colour, "thickness": 2, "width": 0,
    }  # fmt: skip
    name = text_of(style.name)
    return go.Scatter(
        x=[row.speedup], y=[at], error_x=error, name=name, showlegend=False, mode="markers",
        marker={"symbol": style.symbol, "size": 10, "color": style.colour if sure else PAPER,
                "line": {"color": style.colour, "width": 2}},
        hovertemplate=f"{name} {format_speedup(row.speedup)} ({interval(row.speedup_interval) or 'no interval'})"
        "<extra></extra>",
    )  # fmt: skip


def trend(found: Mapping[str, Mapping[str, SummaryRow]], styles: Mapping[str, Style], runs: Sequence[str]) -> go.Figure:
    """Return speedups against the run, one line per method. found: rows by method and run."""
    traces = []
    for label, by_run in found.items():
        style = styles[label]
        traces.append(go.Scatter(
            x=list(by_run), y=[row.speedup for row in by_run.values()], mode="lines+markers",
            name=text_of(style.name), line={"color": style.colour, "width": 1.5},
            marker={"symbol": style.symbol, "size": 9, "color": style.colour},
            hovertemplate=f"{text_of(style.name)}, run %{{x}}: %{{y:.2f}}×<extra></extra>",
        ))  # fmt: skip
    made = figure(traces, "run", "speedup", showlegend=True)
    made.add_hline(1, line={"color": INK, "width": 1}, layer="below")
    return made.update_xaxes(type="category", categoryorder="array", categoryarray=list(runs))


def _with_ratios(made: go.Figure, values: Sequence[float]) -> go.Figure:
    low, high, ticks = ratio_axis(values)
    made.update_xaxes(
        type="log", range=[math.log10(low), math.log10(high)], tickvals=ticks, ticktext=[f"{t:g}×" for t in ticks]
    )
    made.add_vline(1, line={"color": INK, "width": 1}, layer="below")
    return made


def _in_rows(
    traces: Sequence[Any], names: Sequence[str], x: str, row: float = ROW, top: float = 0, **layout: Any
) -> go.Figure:
    """Return traces over rows numbered from 0 downwards, named at the left. row: pixels. top: pixels for a legend."""
    made = figure(traces, x, height=FRAME + top + row * len(names), **layout)
    made.update_yaxes(
        tickvals=list(range(len(names))), ticktext=[text_of(visible(name)) for name in names],
        range=[len(names) - 0.5, -0.5], showgrid=False,
    )  # fmt: skip
    return made


def pareto(rows: Sequence[SummaryRow], styles: Mapping[str, Style]) -> go.Figure:
    """Return τ against relative step time, a point a method, with lines of equal speedup."""
    points = [
        (row.relative_step_time, row.mean_acceptance_length, row.method)
        for row in rows
        if row.relative_step_time and row.mean_acceptance_length
    ]
    left, right = min([0.9, *(0.9 * x for x, _, _ in points)]), 1.12 * max(x for x, _, _ in points)
    top = 1.12 * max(y for _, y, _ in points)
    dots = [_point(styles[method], x, y) for x, y, method in points]
    if few := len(dots) <= NAMED:
        for dot in dots:
            side = "middle left" if dot.x[0] > (left + 2 * right) / 3 else "middle right"
            dot.update(mode="markers+text", text=[f" {dot.name} "], textposition=side)
    made = figure(dots, "relative step time (baseline = 1)", "τ, tokens per step", showlegend=not few)
    made.update_xaxes(range=[left, right]).update_yaxes(range=[0.9, top])
    for slope in SLOPES:
        x = min(right, top / slope)
        if x <= left or slope * x <= 0.9:
            continue
        made.add_shape(type="line", x0=0.9 / slope, y0=0.9, x1=x, y1=slope * x, layer="below",
                       line={"color": INK if slope == 1 else GRID, "width": 1})  # fmt: skip
        made.add_annotation(x=x, y=slope * x, text=f"{slope:g}×", showarrow=False, xanchor="right", font_color=MUTED)
    return made


def _point(style: Style, x: float, y: float, hollow: bool = False, legend: bool = True, what: str = "") -> go.Scatter:
    name = text_of(style.name)
    return go.Scatter(
        x=[x], y=[y], name=name, legendgroup=name, showlegend=legend, mode="markers",
        marker={"symbol": style.symbol, "size": 11, "color": PAPER if hollow else style.colour,
                "line": {"color": style.colour, "width": 2}},
        hovertemplate=f"{name}{what}: %{{x:.3g}}, %{{y:.3g}}<extra></extra>",
    )  # fmt: skip


def acceptance(rows: Sequence[SummaryRow], styles: Mapping[str, Style]) -> go.Figure:
    """Return conditional acceptance by draft position, a line a method; positions with few steps are left out."""
    traces = []
    for row in rows:
        rates = zip(row.conditional_acceptance_rate, row.conditional_acceptance_rate_n, strict=True)
        points = [(i, share) for i, (share, n) in enumerate(rates, start=1) if n >= FEW]
        style, name = styles[row.method], text_of(styles[row.method].name)
        if points:
            traces.append(go.Scatter(
                x=[i for i, _ in points], y=[share for _, share in points], name=name, mode="lines+markers",
                line={"color": style.colour, "width": 1.5}, marker={"symbol": style.symbol, "size": 8},
                hovertemplate=f"{name}, position %{{x}}: %{{y:.1%}}<extra></extra>",
            ))  # fmt: skip
    made = figure(traces, "draft position", "accepted, if the position before was", showlegend=True)
    made.update_yaxes(range=[0, 1.03], tickformat=".0%")
    longest = max((max(trace.x) for trace in traces), default=0)
    return made.update_xaxes(dtick=1 if longest <= 12 else None)


def places(rows: Sequence[PlaceRow], styles: Mapping[str, Style]) -> go.Figure:
    """Return the decode speedup by place of the answer with its 95% CI, a line a method."""
    traces = []
    for label, style in styles.items():
        if points := [row for row in rows if row.method == label]:
            name, around = text_of(style.name), [(row, row.decode_speedup_interval) for row in points]
            above, below = (
                [abs(end[side] - (row.decode_speedup or 0.0)) if end else None for row, end in around]
                for side in (1, 0)
            )
            traces.append(go.Scatter(
                x=[row.place for row in points], y=[row.decode_speedup for row in points], name=name,
                error_y={"array": above, "arrayminus": below, "thickness": 1, "width": 3}, mode="lines+markers",
                line={"color": style.colour, "width": 1.5}, marker={"symbol": style.symbol, "size": 8},
                customdata=[row.mean_acceptance_length for row in points],
                hovertemplate=f"{name}, tokens %{{x}}: %{{y:.2f}}×, τ %{{customdata:.2f}}<extra></extra>",
            ))  # fmt: skip
    made = figure(traces, "tokens of the answer", "decode speedup", showlegend=True)
    names = list(dict.fromkeys(row.place for row in rows))
    return made.update_xaxes(type="category", categoryorder="array", categoryarray=names)


def tokens_per_step(counted: pd.DataFrame, styles: Mapping[str, Style], order: Sequence[str], most: int) -> go.Figure:
    """Return the share of steps by output tokens, one stacked bar per method. counted: `frames.tokens_per_step`.

    most: tokens of the last part, which includes steps with more.
    """
    longest = counted["tokens"].max()
    clipped = counted.assign(tokens=counted["tokens"].clip(upper=most))
    shares = clipped.groupby(["method", "tokens"])["share"].sum()
    traces = []
    for tokens in range(1, most + 1):
        of_methods = [float(shares.get((label, tokens), 0.0)) for label in order]
        name = f"{tokens}+" if tokens == most < longest else str(tokens)
        colour = f"hsl(203,{70 if tokens > 1 else 8}%,{max(28, 88 - 60 * tokens // most)}%)"
        traces.append(_bar(name, of_methods, colour, "%{x:.1%} of steps: " + name + " tokens"))
    names = [styles[label].name for label in order]
    made = _in_rows(
        traces, names, "share of steps, by tokens per step", top=30, barmode="stack", legend_traceorder="normal"
    )
    return made.update_xaxes(range=[0, 1], tickformat=".0%")


def _bar(name: str, values: Sequence[float], colour: str, hover: str) -> go.Bar:
    rows = list(range(len(values)))
    return go.Bar(
        x=list(values), y=rows, orientation="h", name=name, marker_color=colour,
        hovertemplate=f"{hover}<extra></extra>",
    )  # fmt: skip


def parts(found: Mapping[str, Mapping[str, float]], x: str) -> go.Figure:
    """Return stacked bars of milliseconds, a row a method. found: milliseconds by part, by method."""
    shown = list(dict.fromkeys(part for of in found.values() for part in of))
    traces = [
        _bar(part, [of.get(part, 0.0) for of in found.values()], PARTS[part][0], f"{part} %{{x:.3g}} ms")
        for part in shown
    ]
    return _in_rows(traces, list(found), x, top=30, barmode="stack", legend_traceorder="normal")


def memory(found: Mapping[str, float], styles: Mapping[str, Style]) -> go.Figure:
    """Return a bar of MiB for each method."""
    bar = go.Bar(x=list(found.values()), y=list(range(len(found))), orientation="h",
                 marker_color=[styles[label].colour for label in found])  # fmt: skip
    return _in_rows([bar], [styles[label].name for label in found], "peak memory of a sample, MiB", showlegend=False)


def waterfall(found: Sequence[Waterfall]) -> go.Figure:
    """Return stairs from the baseline's milliseconds per token down to each method's, a row a method.

    The parts of a single method have a row each, with their names.
    """
    single = len(found) == 1
    traces: dict[str, tuple[list[float], list[float], list[float], list[str]]] = {}
    for at, one in enumerate(found):
        for i, (name, start, size) in enumerate(steps_of(one)):
            kind = name if name in (REFERENCE, "total") else "saved" if size < 0 else "added"
            base, length, y, hover = traces.setdefault(kind, ([], [], [], []))
            base.append(start)
            length.append(size)
            y.append(i if single else at - 0.36 + 0.12 * i)
            hover.append(f"{text_of(one.method)}, {name}: {size:+.2f} ms" if kind in ("saved", "added")
                        else f"{name}: {size:.2f} ms")  # fmt: skip
    colours = {REFERENCE: GREY, "saved": LESS, "added": MORE, "total": INK}
    drawn = [
        go.Bar(x=traces[kind][1], base=traces[kind][0], y=traces[kind][2], orientation="h",
               width=0.7 if single else 0.11, name=kind,
               marker_color=colour, hovertext=traces[kind][3], hoverinfo="text")
        for kind, colour in colours.items()
        if kind in traces
    ]  # fmt: skip
    names = [f"{one.method} {one.baseline_ms / one.method_ms:.2f}×" for one in found]
    title = f"milliseconds per token{f', {text_of(names[0])}' if single else ''}"
    names = [name for name, _, _ in steps_of(found[0])] if single else names
    return _in_rows(drawn, names, title, row=24 if single else 66, top=30, barmode="overlay",
                    legend_traceorder="normal")  # fmt: skip


def steps_of(one: Waterfall) -> list[tuple[str, float, float]]:
    """Return name, start and signed length of each bar of a waterfall."""
    at, steps = one.baseline_ms, [(REFERENCE, 0.0, one.baseline_ms)]
    for name, part in one.parts.items():
        steps.append((name, at, part))
        at += part
    return [*steps, ("total", 0.0, one.method_ms)]


def roofline(roof: Roof, found: Sequence[Point], styles: Mapping[str, Style]) -> go.Figure:
    """Return parts of steps under the machine's limits. Filled: verification; hollow: drafting."""
    places = [point.intensity for point in found]
    x = [min(0.1, *places), roof.ridge, 4 * max(roof.ridge, *places)]
    limit = go.Scatter(x=x, y=[roof.at(one) / 1e9 for one in x], mode="lines", line={"color": INK, "width": 1.5},
                       showlegend=False, hoverinfo="skip")  # fmt: skip
    seen: set[str] = set()
    traces = [limit]
    for point in found:
        drafting = point.part != "verification"
        share = f" {point.part}, {percent(point.rate / roof.at(point.intensity))} of the limit"
        style = styles[point.method]
        traces.append(_point(style, point.intensity, point.rate / 1e9, drafting, point.method not in seen, share))
        seen.add(point.method)
    made = figure(traces, "FLOP per byte", "GFLOP/s", height=420)
    made.update_xaxes(type="log", dtick=1).update_yaxes(type="log", dtick=1)
    limits = f"{format_number(roof.peak_bandwidth / 1e9, 1)} GB/s, {format_number(roof.peak_flops / 1e9, 0)} GFLOP/s"
    made.add_annotation(x=math.log10(roof.ridge), y=math.log10(roof.peak_flops / 1e9), text=limits, showarrow=False,
                        yanchor="bottom", font_color=MUTED)  # fmt: skip
    return made


def task_map(
    cells: Mapping[tuple[str, str], SummaryRow], styles: Mapping[str, Style], order: Sequence[str]
) -> go.Figure:
    """Return a heat map of speedups, methods by tasks. cells: by (method, task)."""
    tasks = list(dict.fromkeys(task for _, task in cells))
    speedups = [[cells[label, task].speedup for task in tasks] for label in order]
    heights = [[None if not value else math.log2(value) for value in row] for row in speedups]
    text = [[format_speedup(value) for value in row] for row in speedups]
    names = [styles[label].name for label in order]
    return heat_map(heights, list(map(title, tasks)), names, text=text, texttemplate="%{text}", showscale=False,
                    zmid=0, colorscale=[[0, COLOURS[1]], [0.5, PAPER], [1, COLOURS[0]]], hoverinfo="text")  # fmt: skip


def timeline(traces: Mapping[str, Any], styles: Mapping[str, Style]) -> go.Figure:
    """Return the busy share of each span of one request, a row a method. traces: of the manifest, by method."""
    drawn = []
    for at, (label, trace) in enumerate(traces.items()):
        shares = trace["timeline"]
        span = 1000 * trace["wall_s"] / len(shares)
        x = [span * i for i in range(len(shares) + 1) for _ in (0, 1)]
        y = [at + 0.4, *(at + 0.4 - 0.8 * share for share in shares for _ in (0, 1)), at + 0.4]
        drawn.append(go.Scatter(x=x, y=y, fill="toself", mode="none", fillcolor=styles[label].colour, hoverinfo="skip",
                                showlegend=False))  # fmt: skip
    return _in_rows(drawn, [styles[label].name for label in traces], "milliseconds of one request", row=40)
