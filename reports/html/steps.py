"""Causes of speed: waterfall, acceptance, tokens per step, and the parts of a step's time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from specbench_ss.options import REFERENCE
from specbench_ss.reports import charts
from specbench_ss.reports.html.page_parts import MEANINGS, Cell, Chart, Column, Table, View, figure
from specbench_ss.results import frames
from specbench_ss.results.cost_model import Waterfall
from specbench_ss.results.summary import QUANTILES, SummaryRow
from specbench_ss.results.text import percent

PARTS = {  # of a waterfall
    "fewer target passes": f"Saved passes of {REFERENCE}",
    "slower verification": f"Time of the passes beyond those of {REFERENCE}, including drafts made within them",
    "draft overhead": "Making drafts",
    "prefill": "Time to the first token, including work of the method on the prompt",
    "other": "Accepting, and other parts of a step",
}


def pareto(view: View) -> Chart | None:
    """Return τ against relative step time, a point per method; None if no step was timed."""
    rows = [view.overall[label] for label in view.contestants if label != view.run.baseline]
    rows = [row for row in rows if row.relative_step_time and row.mean_acceptance_length]
    if not rows:
        return None
    return Chart(
        "pareto",
        "Tokens per step against step time",
        charts.pareto(rows, view.look).to_plotly_json(),
        note="A method is faster when τ exceeds its relative step time. Lines: equal decode speedup.",
    )


def waterfall_choices(view: View, found: Sequence[Waterfall]) -> list[dict[str, Any]]:
    """Return the waterfall of each method with its sentence, as the page's script draws them."""
    return [
        {
            "method": short.method,
            "text": short.sentence(),
            **Chart("waterfall", "", charts.waterfall([short]).to_plotly_json()).spec(),
        }
        for short in (replace(one, method=view.look[one.method].name) for one in found)
    ]


def waterfall_table(view: View, found: Sequence[Waterfall]) -> Table:
    """Return the numbers, a row for each method."""
    columns = [
        view.method(),
        Column(REFERENCE, "reference_ms", f"Milliseconds per token of {REFERENCE} on the same prompts"),
        *(Column(part, partial(_part, part), meaning) for part, meaning in PARTS.items()),
        Column(
            "total",
            lambda one: figure(one.method_ms, strong=True),
            "Milliseconds per token of the method: the sum of all before",
        ),
        Column(
            "relative pass time",
            lambda one: figure(one.pass_ratio, values=(one.pass_ratio,)),
            f"Verification pass of the method over a pass of {REFERENCE}",
            fields=("pass ratio",),
        ),
    ]
    caption = f"Milliseconds per token, from {REFERENCE} to the method"
    return Table.of("waterfall", columns, found, caption)


def _part(name: str, one: Waterfall) -> float:
    return one.parts[name]


PLACES = 12  # of a chart, at most: what lies beyond is in the table


def histogram(view: View) -> Chart | None:
    """Return the share of steps by the number of tokens that they kept, as `frames.tokens_per_step` counts them."""
    counted = frames.tokens_per_step(view.run)
    counted = counted[counted["method"].isin(view.contestants)]
    order = [label for label in view.contestants if label in set(counted["method"])]
    if not set(order) - {view.run.baseline}:
        return None
    columns = [
        view.method(),
        Column("tokens", digits=0, of="tokens"),
        Column("steps", digits=0, of="steps"),
        Column("share of steps", lambda row: _share(row.share)),
    ]
    rows = [row for label in order for row in counted[counted["method"] == label].itertuples()]
    return Chart(
        "tokens-per-step",
        "Tokens per step",
        charts.tokens_per_step(counted, view.look, order, min(int(counted["tokens"].max()), PLACES)).to_plotly_json(),
        Table.of("tokens-per-step", columns, rows),
    )


REACHED = "Share of all steps whose draft is at least that long"


def by_position(view: View) -> Chart | None:
    """Return conditional acceptance by draft position."""
    drafting = [view.overall[label] for label in view.contestants if view.overall[label].conditional_acceptance_rate]
    if not drafting:
        return None
    steps = {pair.own.method: pair.own.tally.steps for pair in view.results.pairs}  # on the same samples
    columns = [
        view.method(),
        Column("position", "position", digits=0),
        Column(
            "accepted, given the one before", lambda at: _share(at["given"]), MEANINGS["conditional_acceptance_rate"]
        ),
        Column("n", "given_n", digits=0),
        Column("accepted at", lambda at: _share(at["at"]), MEANINGS["acceptance_rate_per_pos"]),
        Column("n", "at_n", digits=0),
        Column("reached", lambda at: _share(at["at_n"] / steps[at["method"]]), REACHED),
    ]
    rows = [
        {"method": row.method, "position": i, "given": given, "given_n": given_n, "at": at, "at_n": at_n}
        for row in drafting
        for i, (given, given_n, at, at_n) in enumerate(
            zip(
                row.conditional_acceptance_rate,
                row.conditional_acceptance_rate_n,
                row.acceptance_rate_per_pos,
                row.acceptance_rate_per_pos_n,
                strict=False,
            ),
            1,
        )
    ]
    return Chart(
        "acceptance",
        "Acceptance by draft position",
        charts.acceptance(drafting, view.look).to_plotly_json(),
        Table.of("acceptance", columns, rows),
        note=f"Conditional on the position before; at least {charts.FEW} steps.",
    )


def _share(value: float) -> Cell:
    return Cell(percent(value, 1), value)


WAITS = {"ttft": "TTFT", "tpot": "TPOT", "latency": "latency"}
STEP_PARTS = ("draft", "verify", "accept", "host")
WORDS = {"prefill": MEANINGS["prefill_s"], **{part: MEANINGS[f"{part}_s"] for part in STEP_PARTS}}


def time_per_token(view: View) -> Chart | None:
    """Return milliseconds per output token by part, a stacked bar per method; None if nothing was timed."""
    found = {label: parts for label in view.contestants if (parts := _ms_per_token(view.overall[label]))}
    if not found:
        return None
    shown = next(iter(found.values()))
    columns = [
        view.method(),
        *(Column(part, part, WORDS[part]) for part in shown),
        Column("total", lambda row: figure(sum(row[part] for part in shown), strong=True)),
    ]
    rows = [{"method": label, **of} for label, of in found.items()]
    drawn = charts.parts({view.look[label].name: of for label, of in found.items()}, "milliseconds per output token")
    table = Table.of("time-per-token", columns, rows, "Milliseconds per output token, by part of a step")
    return Chart("time-per-token", "Time per output token", drawn.to_plotly_json(), table)


def ms_per_step(row: SummaryRow) -> dict[str, float]:
    """Return the mean milliseconds of each part of a step; nothing where nothing was measured."""
    return {part: 1000 * (getattr(row, f"{part}_s") or 0.0) for part in STEP_PARTS} if row.step_s else {}


def _ms_per_token(row: SummaryRow) -> dict[str, float]:
    """Return the mean milliseconds of each part for one kept token; nothing where nothing was measured."""
    if not row.tokens or row.num_target_forwards is None or row.prefill_s is None:
        return {}
    of_steps = {part: 1000 * (getattr(row, f"{part}_s") or 0.0) * row.num_target_forwards for part in STEP_PARTS}
    return {part: ms / row.tokens for part, ms in {"prefill": 1000 * row.prefill_s, **of_steps}.items()}


def latency(view: View) -> Table:
    """Show how long a user waits: quantiles over samples, in milliseconds."""
    waits = [
        Column(f"{words} {quantile}", f"{name}_s_{quantile}", digits=2 if name == "tpot" else 1, per=1e-3)
        for name, words in WAITS.items()
        for quantile in QUANTILES
    ]
    rows = [row for row in view.overall.values() if row.latency_s_p50 is not None]
    caption = "Latency in milliseconds: median, 95th and 99th percentile"
    return Table.of("latency", [view.method(), *waits], rows, caption)


def decomposition(view: View) -> Table:
    """Split the speedup: tokens per step over step cost, times a residual."""
    medians = frames.median_step_ms(view.run)
    columns = [
        view.method(),
        *(Column(part, f"{part}_s", per=1e-3) for part in STEP_PARTS),
        Column("step", "step_s", "Mean milliseconds of a step: the sum of its parts", per=1e-3),
        Column("median", lambda row: medians.get(row.method), "Median milliseconds of a step"),
        Column("τ", "mean_acceptance_length", unit="×"),
        Column("relative step time", "relative_step_time"),
        Column("other", "other_factor", unit="×"),
        Column("speedup", lambda row: figure(row.speedup, unit="×", strong=True), "τ ÷ relative step time × other"),
    ]
    rows = [row for row in view.overall.values() if row.step_s]
    caption = "Mean step, in milliseconds"
    return Table.of("step-times", columns, rows, caption)
