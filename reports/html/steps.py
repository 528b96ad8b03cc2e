"""Causes of speed: waterfall, acceptance, tokens per step, and the parts of a step's time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from specbench_ss.options import REFERENCE
from specbench_ss.reports import charts
from specbench_ss.reports.html.page_parts import MEANINGS, Chart, Column, Table, View, figure, percent_cell, plain
from specbench_ss.results import frames
from specbench_ss.results.cost_model import Waterfall
from specbench_ss.results.places import place_rows
from specbench_ss.results.summary import QUANTILES, SummaryRow
from specbench_ss.results.text import interval
from specbench_ss.stats.intervals import FEWEST

PARTS = {  # of a waterfall
    "fewer steps": f"Verification time of {REFERENCE} for the steps that the method saves",
    "slower verification": f"Verification time beyond that of {REFERENCE}, drafting in the same forward pass included",
    "draft overhead": "Drafting",
    "prefill": "Time to the first token, work of the method on the prompt included",
    "other": "Acceptance and the other parts of a step",
}


def pareto(view: View) -> Chart | None:
    """Return τ against relative step time, a point per method; None if no step was timed."""
    rows = [view.overall[label] for label in view.contestants if label != view.run.baseline]
    rows = [row for row in rows if row.relative_step_time and row.mean_acceptance_length]
    if not rows:
        return None
    return Chart(
        "pareto",
        "τ against relative step time",
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
        Column(REFERENCE, "baseline_ms", f"Milliseconds per token of {REFERENCE} on the same prompts"),
        *(Column(part, partial(_part, part), meaning) for part, meaning in PARTS.items()),
        Column(
            "total",
            lambda one: figure(one.method_ms, strong=True),
            "Milliseconds per token of the method: sum of the columns before",
        ),
        Column(
            "relative verification time",
            "relative_verify_time",
            f"Verification time of a step: method / {REFERENCE}",
            unit="×",
        ),
    ]
    caption = f"Milliseconds per token, from {REFERENCE} to the method"
    return Table.of("waterfall", columns, found, caption)


def _part(name: str, one: Waterfall) -> float:
    return one.parts[name]


PLACES = 12  # tokens per step in the chart, at most; the table has all


def histogram(view: View) -> Chart | None:
    """Return the share of steps by their output tokens, from `frames.tokens_per_step`."""
    counted = frames.tokens_per_step(view.run)
    counted = counted[counted["method"].isin(view.contestants)]
    order = [label for label in view.contestants if label in set(counted["method"])]
    if not set(order) - {view.run.baseline}:
        return None
    columns = [
        view.method(),
        Column("tokens", digits=0, of="tokens"),
        Column("steps", digits=0, of="steps"),
        Column("share of steps", lambda row: percent_cell(row.share)),
    ]
    rows = [row for label in order for row in counted[counted["method"] == label].itertuples()]
    return Chart(
        "tokens-per-step",
        "Tokens per step",
        charts.tokens_per_step(counted, view.look, order, min(int(counted["tokens"].max()), PLACES)).to_plotly_json(),
        Table.of("tokens-per-step", columns, rows),
    )


AFTER = "Accepted, among steps that drafted this position and accepted the one before"
REACHED = "Share of all steps whose draft reaches this position"


def by_position(view: View) -> Chart | None:
    """Return conditional acceptance by draft position; None if no method has enough steps at any position."""
    overall = [view.overall[label] for label in view.contestants]
    drafting = [row for row in overall if row.conditional_acceptance_rate]
    if not any(n >= charts.FEW for row in drafting for n in row.conditional_acceptance_rate_n):
        return None
    steps = {pair.method.label: pair.method.tally.steps for pair in view.results.pairs}  # on the same samples
    columns = [
        view.method(),
        Column("position", "position", digits=0),
        Column(
            "accepted, if the position before was",
            lambda at: percent_cell(at["conditional"]),
            AFTER,
        ),
        Column("of steps", "conditional_n", "Steps that drafted this position and accepted the one before", digits=0),
        Column("accepted", lambda at: percent_cell(at["rate"]), "Share of the steps that drafted the position"),
        Column("of drafted", "rate_n", "Steps that drafted the position", digits=0),
        Column("drafted, of all steps", lambda at: percent_cell(at["rate_n"] / steps[at["method"]]), REACHED),
    ]
    rows = [
        {
            "method": row.method,
            "position": i,
            "conditional": conditional,
            "conditional_n": conditional_n,
            "rate": rate,
            "rate_n": rate_n,
        }
        for row in drafting
        for i, (conditional, conditional_n, rate, rate_n) in enumerate(
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
        note=f"{AFTER}; positions with at least {charts.FEW} such steps.",
    )


def along_the_answer(view: View) -> Chart | None:
    """Return decode speedup and τ by place of the answer; None unless answers reach a second place."""
    drafting = [label for label in view.contestants if label != view.run.baseline]
    invalid = {label for label, row in view.overall.items() if row.comparison == "invalid"}
    rows = [row for row in place_rows(view.run, invalid) if row.method in drafting]
    if len({row.place for row in rows}) < 2:
        return None
    columns = [
        view.method(),
        Column("tokens of the answer", "place", numeric=False),
        Column("decode speedup", "decode_speedup", unit="×"),
        Column("95% CI", lambda row: plain(interval(row.decode_speedup_interval)), numeric=False),
        Column("τ", "mean_acceptance_length"),
        Column("acceptance", lambda row: percent_cell(row.acceptance_rate or 0.0)),
        Column("relative step time", "relative_step_time", unit="×"),
        Column("questions", "n_questions", "Questions whose answers reach this place", digits=0),
    ]
    return Chart(
        "places",
        "Along the answer",
        charts.places(rows, {label: view.look[label] for label in drafting}).to_plotly_json(),
        Table.of("places", columns, rows),
        note="Steps that begin at these tokens of the answer, compared with the baseline's. Later places have fewer "
        f"questions: those with long answers. Points without a bar have fewer than {FEWEST}.",
    )


WAITS = {"ttft": "TTFT", "tpot": "TPOT", "latency": "latency"}
STEP_PARTS = ("draft", "verify", "accept", "host")
WORDS = {"prefill": MEANINGS["prefill_s"], **{part: MEANINGS[f"{part}_s"] for part in STEP_PARTS}}


def time_per_token(view: View) -> Chart | None:
    """Return milliseconds per output token by part, one stacked bar per method; None if no step was timed."""
    if view.served:
        return None
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
    """Return the mean milliseconds of each part of a step; empty if nothing was measured."""
    return {part: 1000 * (getattr(row, f"{part}_s") or 0.0) for part in STEP_PARTS} if row.step_s else {}


def _ms_per_token(row: SummaryRow) -> dict[str, float]:
    """Return the mean milliseconds of each part per output token; empty if nothing was measured."""
    if not row.tokens or row.num_target_forwards is None or row.prefill_s is None:
        return {}
    of_steps = {part: 1000 * (getattr(row, f"{part}_s") or 0.0) * row.num_target_forwards for part in STEP_PARTS}
    return {part: ms / row.tokens for part, ms in {"prefill": 1000 * row.prefill_s, **of_steps}.items()}


def latency(view: View) -> Table:
    """Return quantiles of latencies over samples, in milliseconds."""
    waits = [
        Column(f"{words} {quantile}", f"{name}_s_{quantile}", digits=2 if name == "tpot" else 1, per=1e-3)
        for name, words in WAITS.items()
        for quantile in QUANTILES
    ]
    rows = [row for row in view.overall.values() if row.latency_s_p50 is not None]
    caption = "Latency in milliseconds: median, 95th and 99th percentile"
    return Table.of("latency", [view.method(), *waits], rows, caption)


def decomposition(view: View) -> Table:
    """Return the factors of the speedup: τ, relative step time and the rest, with the parts of a step."""
    medians = frames.median_step_ms(view.run)
    columns = [
        view.method(),
        *(Column(part, f"{part}_s", per=1e-3) for part in STEP_PARTS),
        Column("step", "step_s", "Mean milliseconds of a step: the sum of its parts", per=1e-3),
        Column("median", lambda row: medians.get(row.method), "Median milliseconds of a step"),
        Column("τ", "mean_acceptance_length"),
        Column("relative step time", "relative_step_time", unit="×"),
        Column("other factor", "other_factor", unit="×"),
        Column(
            "speedup", lambda row: figure(row.speedup, unit="×", strong=True), "τ / relative step time × other factor"
        ),
    ]
    rows = [row for row in view.overall.values() if row.step_s]
    caption = "Mean step, in milliseconds"
    return Table.of("step-times", columns, rows, caption)
