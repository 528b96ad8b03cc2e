"""Causes of speed: waterfall, acceptance, tokens per step, and the parts of a step's time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from specbench_ss.options import REFERENCE
from specbench_ss.reports import charts
from specbench_ss.reports.html.page_parts import Cell, Chart, Column, Table, figure
from specbench_ss.reports.palette import Style
from specbench_ss.results.cost_model import Waterfall
from specbench_ss.results.summary import QUANTILES, SummaryRow
from specbench_ss.results.text import percent

HELP = {
    "passes saved": f"The pass of {REFERENCE}, made less often",
    "verifying widened": f"What the method's passes take beyond those of {REFERENCE}, drafts made within them included",
    "drafting added": "Making drafts",
    "reading prompts": "Prefill, and what the method does besides with the prompt",
    "other": "Accepting, and what else a step takes",
}


def why(found: Mapping[str, Waterfall], styles: Mapping[str, Style], order: Sequence[str]) -> Chart | None:
    """Return the waterfalls on one scale with their sentences; None where there is none."""
    if not order:
        return None
    return Chart(
        "why",
        f"From {REFERENCE} to the method, in milliseconds per token",
        charts.waterfall([found[label] for label in order]).to_plotly_json(),
        waterfall_table(found, styles, order),
        note="Stairs from the top: "
        + ", ".join((REFERENCE, *HELP, "total"))
        + ". Point at a bar for its name and number.",
        lines=[found[label].sentence() for label in order],
    )


def waterfall_table(
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
    rows = [_waterfall_row(found[label], styles[label]) for label in order]
    return Table(name, columns, rows, f"Milliseconds per token, from {REFERENCE} to the method", name == "why")


def _waterfall_row(one: Waterfall, style: Style) -> list[Cell]:
    ends = (one.reference_ms, *one.parts.values(), one.method_ms)
    return [
        style.cell(),
        *(figure(x, 2) for x in ends[:-1]),
        figure(ends[-1], 2, strong=True),
        figure(one.pass_ratio, values=(one.pass_ratio,)),
    ]


GIVEN = "Share of the steps that accepted this draft position, among those that had accepted the one before it"
AT = "Share of the steps that accepted this draft position, among those that drafted it"
REACHED = "Share of all steps whose draft is at least that long"
PLACES = 12  # of a chart, at most: what lies beyond is in the table


def histogram(counted: pd.DataFrame, styles: Mapping[str, Style], ranked: Sequence[str]) -> Chart | None:
    """Return the share of steps by the number of tokens that they kept, as `frames.tokens_per_step` counts them."""
    of = {label: own for label in ranked if len(own := counted[counted["method"] == label])}
    if not of:
        return None
    rows = [
        [styles[label].cell(), figure(tokens, 0), figure(n, 0), _share(share)]
        for label, own in of.items()
        for tokens, n, share in zip(own["tokens"], own["steps"], own["share"], strict=True)
    ]
    columns = [Column("method", False), Column("tokens"), Column("steps"), Column("share of steps")]
    most = min(max(int(own["tokens"].max()) for own in of.values()), PLACES)
    return Chart(
        "tokens-per-step",
        "Tokens kept by a step",
        charts.tokens_per_step(counted, list(of), most).to_plotly_json(),
        Table("tokens-per-step", columns, rows),
        note="A step is one verifying pass of the model; plain decoding keeps exactly one token a step.",
    )


def by_position(
    overall: Mapping[str, SummaryRow], steps: Mapping[str, int], styles: Mapping[str, Style], ranked: Sequence[str]
) -> Chart | None:
    """Return conditional acceptance by draft position. steps: how many each method made on the same samples."""
    drafting = {label: overall[label] for label in ranked if overall[label].acceptance_given}
    if not drafting:
        return None
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
    return Chart(
        "acceptance",
        "Acceptance by draft position",
        charts.acceptance(list(drafting.values()), styles).to_plotly_json(),
        Table("acceptance", columns, rows),
        note="Share of steps that accept a draft position once the one before is accepted; left out where fewer than "
        f"{charts.FEW} steps are behind it. Tokens behind an answer's end are accepted here and count in no τ.",
    )


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


def per_token(overall: Mapping[str, SummaryRow], styles: Mapping[str, Style], ranked: Sequence[str]) -> Chart | None:
    """Return milliseconds per kept token as stacked bars."""
    parts = {label: found for label in ranked if (found := _ms_per_token(overall[label]))}
    return _stacked("time-per-token", "Time per kept token", "Milliseconds per kept token", parts, styles)


def per_step(overall: Mapping[str, SummaryRow], styles: Mapping[str, Style], ranked: Sequence[str]) -> Chart | None:
    """Return the milliseconds of a step as stacked bars."""
    parts = {label: found for label in ranked if (found := ms_per_step(overall[label]))}
    return _stacked("time-per-step", "Time of a step", "Milliseconds of a step", parts, styles)


def _stacked(
    name: str, title: str, caption: str, parts: Mapping[str, Mapping[str, float]], styles: Mapping[str, Style]
) -> Chart | None:
    if not parts:
        return None
    shown = list(dict.fromkeys(part for of in parts.values() for part in of))
    rows = [
        [styles[label].cell(), *(figure(of[part], 2) for part in shown), figure(sum(of.values()), 2, strong=True)]
        for label, of in parts.items()
    ]
    columns = [Column("method", False), *(Column(part, help=WORDS[part]) for part in shown), Column("sum")]
    drawn = charts.parts(parts, caption.lower()).to_plotly_json()
    return Chart(name, title, drawn, Table(name, columns, rows, caption), f"{caption}, by part of the work.")


def ms_per_step(row: SummaryRow) -> dict[str, float]:
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
