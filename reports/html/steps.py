"""Causes of speed: waterfall, acceptance, tokens per step, and the parts of a step's time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from specbench_ss.options import REFERENCE
from specbench_ss.reports import charts
from specbench_ss.reports.html.page_parts import MEANINGS, Cell, Chart, Column, Table, View, figure
from specbench_ss.results import frames
from specbench_ss.results.cost_model import Waterfall
from specbench_ss.results.summary import QUANTILES, SummaryRow
from specbench_ss.results.text import percent

PARTS = {  # of a waterfall
    "passes saved": f"The pass of {REFERENCE}, made less often",
    "verifying widened": f"Passes beyond those of {REFERENCE}, drafts made within them included",
    "drafting added": "Making drafts",
    "reading prompts": "Prefill, and what the method does besides with the prompt",
    "other": "Accepting, and what else a step takes",
}


def why(view: View, found: Sequence[Waterfall]) -> Chart | None:
    """Return the waterfalls on one scale with their sentences; None where there is none."""
    if not found:
        return None
    return Chart(
        "why",
        f"From {REFERENCE} to the method, in milliseconds per token",
        charts.waterfall(found).to_plotly_json(),
        waterfall_table(view, found),
        note=f"Stairs from the top: {', '.join((REFERENCE, *PARTS, 'total'))}. Point at a bar for its name and number.",
        lines=[one.sentence() for one in found],
    )


def waterfall_table(view: View, found: Sequence[Waterfall], name: str = "why") -> Table:
    """Return the numbers, a row for each method."""
    columns = [
        view.method(),
        Column(REFERENCE, "reference_ms", f"Milliseconds per token of {REFERENCE} on the same prompts"),
        *(Column(part, partial(_part, part), said) for part, said in PARTS.items()),
        Column(
            "in all",
            lambda one: figure(one.method_ms, strong=True),
            "Milliseconds per token of the method: the sum of all before",
        ),
        Column(
            "pass cost",
            lambda one: figure(one.pass_ratio, values=(one.pass_ratio,)),
            f"The method's verifying pass over a pass of {REFERENCE}",
            fields=("pass ratio",),
        ),
    ]
    caption = f"Milliseconds per token, from {REFERENCE} to the method"
    return Table.of(name, columns, found, caption, sortable=name == "why")


def _part(name: str, one: Waterfall) -> float:
    return one.parts[name]


PLACES = 12  # of a chart, at most: what lies beyond is in the table


def histogram(view: View) -> Chart | None:
    """Return the share of steps by the number of tokens that they kept, as `frames.tokens_per_step` counts them."""
    counted = frames.tokens_per_step(view.run)
    counted = counted[counted["method"].isin(view.contestants)]
    if counted.empty:
        return None
    order = [label for label in view.contestants if label in set(counted["method"])]
    columns = [
        view.method(),
        Column("tokens", digits=0, of="tokens"),
        Column("steps", digits=0, of="steps"),
        Column("share of steps", lambda row: _share(row.share)),
    ]
    rows = [row for label in order for row in counted[counted["method"] == label].itertuples()]
    return Chart(
        "tokens-per-step",
        "Tokens kept by a step",
        charts.tokens_per_step(counted, order, min(int(counted["tokens"].max()), PLACES)).to_plotly_json(),
        Table.of("tokens-per-step", columns, rows),
        note="A step is one verifying pass of the model; autoregressive decoding keeps exactly one token a step.",
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
        note="Share of steps that accept a draft position once the one before is accepted; left out where fewer than "
        f"{charts.FEW} steps are behind it. Tokens behind an answer's end are accepted here and count in no τ.",
    )


def _share(value: float) -> Cell:
    return Cell(percent(value, 1), value)


WAITS = {"ttft": "first token", "tpot": "per token", "latency": "request"}  # as in `latencies`: words of a heading
STEP_PARTS = ("draft", "verify", "accept", "host")
WORDS = {"prefill": MEANINGS["prefill_s"], **{part: MEANINGS[f"{part}_s"] for part in STEP_PARTS}}


def times(view: View) -> list[Chart | None]:
    """Return milliseconds per kept token, and those of a step, as stacked bars."""
    rows = [view.overall[label] for label in view.contestants]
    return [
        _stacked(
            view, "time-per-token", "Time per kept token", "Milliseconds per kept token", map(_ms_per_token, rows)
        ),
        _stacked(view, "time-per-step", "Time of a step", "Milliseconds of a step", map(ms_per_step, rows)),
    ]


def _stacked(view: View, name: str, title: str, caption: str, found: Iterable[Mapping[str, float]]) -> Chart | None:
    parts = {label: of for label, of in zip(view.contestants, found, strict=True) if of}
    if not parts:
        return None
    shown = next(iter(parts.values()))
    columns = [
        view.method(),
        *(Column(part, part, WORDS[part]) for part in shown),
        Column("sum", lambda row: figure(sum(row[part] for part in shown), strong=True)),
    ]
    rows = [{"method": label, **of} for label, of in parts.items()]
    drawn = charts.parts(parts, caption.lower()).to_plotly_json()
    table = Table.of(name, columns, rows, caption)
    return Chart(name, title, drawn, table, f"{caption}, by part of the work.")


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
    caption = "How long a request takes, in milliseconds: median, 95th and 99th percentile"
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
        Column("step cost", _step_cost, f"The method's step time over that of {REFERENCE}", fields=("step ratio",)),
        Column("other", "other_factor", unit="×"),
        Column("speedup", lambda row: figure(row.speedup, unit="×", strong=True), "τ over step cost, times residual"),
    ]
    rows = [row for row in view.overall.values() if row.step_s]
    caption = "One step on average, in milliseconds, and why more accepted tokens may still be slower"
    return Table.of("step-times", columns, rows, caption)


def _step_cost(row: SummaryRow) -> Cell:
    return figure(row.step_cost, values=(row.step_ratio,))
