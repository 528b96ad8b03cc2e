"""Table of the numbers published in 2026 and those of a run."""

from __future__ import annotations

from dataclasses import replace

from specbench_ss.reports.html.page_parts import Cell, Column, Table, View, figure
from specbench_ss.results.published_2026 import Metric, Series, ValueComparison, compare_values
from specbench_ss.results.text import MISSING

METRICS: dict[Metric, str] = {
    "tau": "τ", "speedup": "speedup", "decode_speedup": "decode speedup", "throughput_ratio": "throughput ratio",
    "tokens_per_s": "tokens/s", "ms_per_token": "ms per token", "speedup_over_eagle3": "speedup over EAGLE-3",
    "tau_gain": "gain of τ", "time_gain_percent": "time gained, %",
}  # fmt: skip
COUNTING = (
    "τ: pooled over all steps, or per request. With bonus: tokens per step; without: accepted tokens; per forward: "
    "tokens per forward pass, where a step has two"
)
NOTE = (
    "Comparable: model, questions, sampling and, for τ, counting and draft are stated and the same; drafters and their "
    "options are not compared, and a benchmark without a stated subset is taken as whole. Here: our number in the "
    "counting of the published one, – if there is none; of several configurations, that of the most similar one."
)


def table(view: View) -> Table | None:
    """Return a row for each number published in 2026 of a method of the run; None without any."""
    rows = compare_values(view.run, [view.overall[label] for label in view.contestants])
    if not rows:
        return None
    columns = [
        view.method(),
        Column("published as", _name, numeric=False, fields=("published as", "draft", "hardware", "concurrency")),
        Column("benchmark", _benchmark, numeric=False, fields=("benchmark", "model")),
        Column("T", lambda one: figure(one.value.of.temperature, digits=0), help="sampling temperature"),
        Column("metric", lambda one: _metric(one.value.of), COUNTING, numeric=False, fields=("metric", "counting")),
        Column("published", _published),
        Column("here", "ours"),
        Column("comparable", _mark, numeric=False),
        Column("source", _source, numeric=False, fields=("source", "note")),
    ]
    comparable = sum(one.compares.comparable for one in rows)
    notes = (f"{comparable} of {len(rows)} are comparable with this run. {NOTE}",)
    return Table.of("published-2026", columns, rows, "Numbers published in 2026 and those of this run", notes=notes)


def _lines(first: str, *others: str) -> Cell:
    """Return a cell of one line and quieter ones below it, each a value of the CSV file."""
    return Cell(first or MISSING, first, small=[text for text in others if text], values=(first, *others))


def _name(one: ValueComparison) -> Cell:
    value, of = one.value, one.value.of
    draft = " ".join(filter(None, (str(of.draft_length or ""), of.draft_shape)))
    load = f"{value.concurrency} at a time" if value.concurrency and value.concurrency > 1 else ""
    small = ", ".join(filter(None, (f"draft {draft}" if draft else "", of.hardware, load)))
    shown = _lines(of.published_as, small)
    return replace(shown, values=(of.published_as, draft, of.hardware, value.concurrency))


def _benchmark(one: ValueComparison) -> Cell:
    return _lines(one.value.benchmark, one.value.model)


def _metric(of: Series) -> Cell:
    """Return the metric; of τ, also the counting."""
    if of.metric != "tau":
        return _lines(METRICS[of.metric], "")
    return _lines("τ", ", ".join(filter(None, (of.pooling, of.counts))) or "counting not stated")


def _published(one: ValueComparison) -> Cell:
    """Return the number with its decimals, two at least."""
    value = one.value.value
    return figure(value, digits=max(2, len(f"{value:g}".partition(".")[2])))


def _mark(one: ValueComparison) -> Cell:
    lines = str(one.compares).split("; ")
    return Cell(lines[0], "; ".join(lines), small=lines[1:], tag="good" if one.compares.comparable else "")


def _source(one: ValueComparison) -> Cell:
    return _lines(one.value.of.source, one.value.of.note)
