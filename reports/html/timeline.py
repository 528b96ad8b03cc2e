"""The timeline of one request of each method, as the profiler saw it: when kernels ran, and when none did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from specbench_ss.reports.html import forest, svg
from specbench_ss.reports.html.axis import from_zero
from specbench_ss.reports.html.page_parts import Column, Drawing, Line, Table, figure, plain
from specbench_ss.reports.html.palette import Style
from specbench_ss.results.text import percent

COLUMNS = (
    ("busy", "Share of the time in which any of them ran, from the first to the last one"),
    ("ms", "From the first to the last one; the profiler takes time itself"),
    ("tokens", "Of the answer"),
    ("launches per token", "Kernels that the host started, on a CPU operators, for each token"),
    ("gaps", "How often none ran"),
    ("mean gap, µs", "Mean time in which none ran"),
    ("longest gap, ms", "Longest time in which none ran"),
)


def drawing(traces: Mapping[str, Any], styles: Mapping[str, Style], ranked: Sequence[str]) -> Drawing | None:
    """Return a row for each method that was traced; None where none was. traces: those of the manifest, by method."""
    found = {label: traces[label] for label in ranked if (traces.get(label) or {}).get("timeline")}
    if not found:
        return None
    axis = from_zero([1000 * trace["wall_s"] for trace in found.values()])
    lines = [
        Line(label, styles[label].swatch, _strip(trace, axis.high, styles[label]), percent(trace["busy_share"]))
        for label, trace in found.items()
    ]
    columns = [Column("method", False), Column("of", False), *(Column(name, help=help) for name, help in COLUMNS)]
    table = Table("timeline", columns, [_row(trace, styles[label]) for label, trace in found.items()])
    what = next(iter(found.values()))["what"]
    where = "" if what == "kernels" else " There is no GPU here: what is shown is operators on the processor."
    note = (
        f"To the right milliseconds of one profiled request, from its first {what[:-1]} on; up the share of each span "
        f"of time in which any ran. The profiler takes time itself: this says where time goes, not how much.{where} "
        "Perfetto opens the files in the run's folder `traces`."
    )
    return Drawing(
        "timeline", "One request, as the profiler saw it", table, lines, axis=forest.scale(axis, ""), note=note
    )


def _strip(trace: Mapping[str, Any], longest_ms: float, style: Style) -> Markup:
    """Return the busy share of each span of time, as long as the request took."""
    shares = trace["timeline"]
    path = "M0 100" + "".join(f"V{100 - 100 * share:.3g}H{i}" for i, share in enumerate(shares, 1)) + "V100Z"
    inner = svg.element(
        "svg",
        svg.element("path", d=path, fill=f"var(--{style.css})"),
        width=svg.percent(1000 * trace["wall_s"] / longest_ms),
        y="15%",
        height="85%",
        viewBox=f"0 0 {len(shares)} 100",
        preserveAspectRatio="none",
    )
    return svg.element("svg", inner, class_="strip", aria_hidden="true")


def _row(trace: Mapping[str, Any], style: Style) -> list[Any]:
    gaps = trace["gaps"]
    return [
        style.cell(),
        plain(trace["what"]),
        figure(100 * trace["busy_share"], 0, "%"),
        figure(1000 * trace["wall_s"], 1),
        figure(trace["tokens"], 0),
        figure(trace["launches_per_token"], 0),
        figure(gaps["number"], 0),
        figure(1e6 * gaps["mean_s"], 1),
        figure(1000 * gaps["longest_s"], 2),
    ]
