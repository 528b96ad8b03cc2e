"""Columns of the tables of a run, which every output loops over.

A table is a list of columns and a list of rows: `SummaryRow` for the ranking, `ConcurrencyRow` for load levels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from specbench_ss.results import ranking, text
from specbench_ss.results.analysis import Results
from specbench_ss.results.concurrency import ConcurrencyRow, limits_text
from specbench_ss.results.summary import OVERALL, SummaryRow
from specbench_ss.results.text import format_number, format_speedup, interval, percent, title


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table of results.

    key: the name of its number in docs/columns.md. cell: returns the text of a row. when: whether a row has a value; a
    column without any is left out. short: title in a terminal, if it differs. meaning: entry of the legend.
    left: text, which is aligned to the left. value: returns the number of a row; by default the attribute `key`.
    strong: whether the text of a row is bold.
    """

    key: str
    title: str
    cell: Callable[[Any], str]
    when: Callable[[Any], bool] | None = None
    short: str = ""
    meaning: str = ""
    left: bool = False
    value: Callable[[Any], Any] | None = None
    strong: Callable[[Any], bool] | None = None

    @property
    def head(self) -> str:
        """Return the title in a terminal."""
        return self.short or self.title

    def has_value(self, rows: Iterable[Any]) -> bool:
        """Return whether the table of these rows has the column."""
        return self.when is None or any(map(self.when, rows))

    def sort_key(self, row: Any) -> Any:
        """Return the number of a row, of an interval its lower end; of a column of text the text."""
        if self.left:
            return self.cell(row)
        value = self.value(row) if self.value else getattr(row, self.key)
        return value[0] if isinstance(value, tuple) else value


def known(key: str, title: str, write: Callable[[float | None], str], short: str = "", meaning: str = "") -> Column:
    """Return a column of an attribute of the rows that may be missing."""
    return Column(key, title, lambda r: write(getattr(r, key)), lambda r: getattr(r, key) is not None, short, meaning)


def ranking_columns(config: Mapping[str, Any]) -> dict[str, Column]:
    """Return the columns of the ranking by their keys. config: `Results.config`."""
    columns = (
        Column("task", "task", lambda r: "all" if r.task == OVERALL else title(r.task), left=True),
        Column("method", "method", lambda r: r.method, left=True),
        Column("speedup", "speedup", ranking.speedup, strong=lambda r: r.comparison in ("faster", "slower")),
        Column("speedup_interval", "95% CI", lambda r: interval(r.speedup_interval)),
        Column("comparison", "verdict", lambda r: r.comparison, left=True),
        known("decode_speedup", "decode speedup", format_speedup, "decode", "without prefill"),
        known("mean_acceptance_length", "τ", format_number, meaning="tokens per step"),
        known("acceptance_rate", "acceptance rate", percent, "accept", "of the draft's depth"),
        known("relative_step_time", "relative step time", format_speedup, "step time"),
        Column("tokens_per_s", "tokens/s", lambda r: format_number(r.tokens_per_s, 1), short="tok/s"),
        Column(
            "quality",
            "quality",
            lambda r: format_number(ranking.quality(r, config)),
            lambda r: ranking.quality(r, config) is not None,
        ),
        known("judge_score", "judge", format_number),
        Column("output", "output", lambda r: ranking.output(r, config), left=True),
        Column("n_prompts", "n", ranking.short_n),
    )
    return {column.key: column for column in columns}


EXPORTED = (  # keys of the columns of the summary in Markdown and LaTeX
    "task", "method", "speedup", "speedup_interval", "comparison", "mean_acceptance_length", "output", "quality",
    "tokens_per_s", "n_prompts",
)  # fmt: skip
LATEX = {ord(sign): text for sign, text in (("τ", r"$\tau$"), ("×", r"$\times$"), ("≈", r"$\approx$"), ("–", "--"))}
LOADS = "By load: throughput, and medians over requests"
RATES = ", or arrivals per second (/s), which set the throughput; times then count from the planned arrival"


def _ms(key: str) -> Callable[[ConcurrencyRow], str]:
    return lambda row: format_number(row.waits[key], 2, scale=1000)


def _compared(row: ConcurrencyRow) -> bool:
    return not row.is_baseline


def _of_one(row: ConcurrencyRow) -> str:
    """Return the speedup by time per token of a request, as in '≈ 1.13×'."""
    return "baseline" if row.is_baseline else ranking.marked_speedup(row.speedup, row.comparison)


NOT_WITH_LIMITS = (
    "throughput_ratio",
    "relative_step_time",
    "same_output",
    "latency_s_p50",
)  # a terminal has no room for both


def level_columns(results: Results, wide: bool = False) -> list[Column]:
    """Return the columns of the table of load levels, as far as its rows have values.

    wide: all of them; else limits of a request replace some.
    """
    rows, limits = results.concurrency_rows, limits_text(results.manifest)
    rates = RATES if any(row.rate for row in rows) else ""
    lacking = any(row.comparison == "insufficient data" for row in rows)
    without = f" (?: none {ranking.WITHOUT_INTERVAL})" if lacking else ""
    with_limits = [
        Column("goodput", "goodput", lambda r: format_number(r.goodput), meaning=f"requests/s with {limits}"),
        Column(
            "slo_attainment", "SLO", lambda r: percent(r.slo_attainment), meaning="share of requests within the limits"
        ),
    ]
    columns = [
        Column("load", "load", lambda r: str(r.load), meaning=f"requests in flight{rates}"),
        Column("method", "method", lambda r: r.method, left=True),
        Column("tokens_per_s", "tokens/s", lambda r: format_number(r.tokens_per_s, 1)),
        Column(
            "throughput_ratio", "× baseline", lambda r: format_speedup(r.throughput_ratio), _compared,
            meaning="throughput over the baseline's with as many requests in flight",
        ),
        Column(
            "speedup", "speedup", _of_one, _compared,
            meaning=f"time per token of a request, baseline / method, with its 95% CI{without}",
        ),
        Column("speedup_interval", "95% CI", lambda r: interval(r.speedup_interval), _compared),
        known("mean_acceptance_length", "τ", format_number),
        Column(
            "relative_step_time", "step", lambda r: format_speedup(r.relative_step_time),
            lambda r: _compared(r) and r.relative_step_time is not None, meaning="time of a step over the baseline's",
        ),
        Column(
            "same_output", "same", lambda r: percent(r.same_output),
            lambda r: _compared(r) and r.same_output is not None,
            meaning="outputs equal to the baseline's of one request at a time",
        ),
        Column("ttft_s_p50", "first ms", _ms("ttft_s_p50"), meaning="time to first token"),
        Column("tpot_s_p50", "ms/token", _ms("tpot_s_p50"), meaning="time per output token"),
        Column(
            "latency_s_p50", "s", lambda r: format_number(r.waits["latency_s_p50"], 2), meaning="latency of a request"
        ),
        *(with_limits if limits else []),
        Column("failed", "failed", lambda r: str(r.failed), lambda r: r.failed > 0),
    ]  # fmt: skip
    left_out = NOT_WITH_LIMITS if limits and not wide else ()
    return [column for column in columns if column.key not in left_out and column.has_value(rows)]


def legend(columns: Sequence[Column], short: bool = False) -> list[str]:
    """Return the meanings of these columns. short: with their titles in a terminal."""
    return [f"{c.head if short else c.title}: {c.meaning}" for c in columns if c.meaning]


def markdown_table(columns: Sequence[Column], rows: Iterable[Any]) -> str:
    """Return the rows as a Markdown table."""
    cells = [[column.cell(row) for column in columns] for row in rows]
    return text.table([c.title for c in columns], cells, [c.title for c in columns if c.left])


def summary_markdown(results: Results) -> str:
    """Return the summary of a run as a Markdown table: all tasks together first, then every task."""
    return markdown_table(*_summary(results))


def summary_latex(results: Results) -> str:
    """Return the summary of a run as a LaTeX table, which needs the package booktabs."""
    columns, rows = _summary(results)
    cells = pd.DataFrame([[c.cell(row) for c in columns] for row in rows], columns=[c.title for c in columns])
    sides = "".join("l" if c.left else "r" for c in columns)
    made: str = cells.to_latex(index=False, escape=True, column_format=sides)
    return made.translate(LATEX)


def _summary(results: Results) -> tuple[list[Column], list[SummaryRow]]:
    """Return columns and rows of the summary. The speedup has no mark, since the verdict has a column."""
    columns, tasks = ranking_columns(results.config), list(dict.fromkeys(row.task for row in results.rows))
    tasks = tasks if len(tasks) > 2 else tasks[:1]  # a single task is all of them
    rows: list[SummaryRow] = []
    for task in tasks:
        rows += ranking.by_speed([row for row in results.rows if row.task == task])
    columns["speedup"] = replace(columns["speedup"], cell=lambda row: format_speedup(row.speedup))
    return [columns[key] for key in EXPORTED], rows


def levels_markdown(results: Results) -> str:
    """Return the table of load levels as Markdown with its heading, and the draft schedule; '' if there is neither."""
    parts = []
    if rows := results.concurrency_rows:
        columns = level_columns(results)
        meanings = "; ".join(legend(columns))
        parts.append(f"## {LOADS}\n\n{markdown_table(columns, rows)}\n{meanings[0].upper()}{meanings[1:]}.\n")
    if schedule := results.draft_schedule:
        parts.append(f"Draft schedule: {text.safe(schedule.text())}.\n")
    return "\n".join(parts)
