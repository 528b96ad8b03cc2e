"""A run as pandas frames. Each has the columns of `specbench_ss.results.columns`, whatever the run holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pandas as pd

from specbench_ss.results import verdict_text
from specbench_ss.results.columns import SAMENESS, SAMPLES, STEPS, SUMMARY, Column
from specbench_ss.results.quality import MARGIN
from specbench_ss.results.summary import SummaryRow, summarise
from specbench_ss.runs.rows import Row, Run, Sameness, StepRow

ENDS = {"_low": 0, "_high": 1}  # of an interval, by the end of a column's name
INTERVALS = {
    "speedup": "speedup_interval",
    "reference_speedup": "reference_interval",
    "quality_difference": "quality_interval",
    "judged_difference": "judged_interval",
}
VERDICTS = {  # column -> what it counts
    "n_identical": "identical",
    "n_near_tie": "near-tie",
    "n_length": "length",
    "n_mismatch": "mismatch",
    "n_not_compared": "not compared",
}


def frame(columns: Sequence[Column], records: Iterable[Any], value: Callable[[Any, str], Any]) -> pd.DataFrame:
    """Return a frame with a row for each record. value(record, column name): the cell, None for a missing one."""
    rows = list(records)
    return pd.DataFrame({c.name: _series(c, [value(row, c.name) for row in rows]) for c in columns})


def _series(column: Column, values: list[Any]) -> pd.Series:
    return pd.Series([pd.NA if value is None else value for value in values], dtype=column.dtype)


def samples(run: Run) -> pd.DataFrame:
    """Return one row for each sample, failed ones included."""

    def value(row: Row, name: str) -> Any:
        return run.judged_scores.get(row.key) if name == "judged" else getattr(row, name)

    return frame(SAMPLES, run.rows, value)


def steps(run: Run) -> pd.DataFrame:
    """Return one row for each step, in the order in which the steps were made."""
    category = _categories(run)

    def value(row: StepRow, name: str) -> Any:
        if name == "category":
            return category[row.key]
        return getattr(row if hasattr(row, name) else row.step, name)

    return frame(STEPS, run.steps, value)


def sameness(run: Run) -> pd.DataFrame:
    """Return one row for each comparison of an answer with that of its reference."""
    category = _categories(run)

    def value(row: Sameness, name: str) -> Any:
        return category.get(row.key) if name == "category" else getattr(row, name)

    return frame(SAMENESS, run.sameness, value)


def _categories(run: Run) -> dict[Any, str]:
    return {row.key: row.category for row in run.rows}


def summary(run: Run, quality_margin: float = MARGIN) -> pd.DataFrame:
    """Return one row for each task and method, `overall` first: the rows of the terminal's table and of the report."""
    config = run.manifest["config"]

    def value(row: SummaryRow, name: str) -> Any:
        return verdict_text.output(row, config) if name == "output" else summary_value(row, name)

    return frame(SUMMARY, summarise(run, quality_margin), value)


def summary_value(row: SummaryRow, name: str) -> Any:
    """Return a cell of the summary: a field of the row, an end of one of its intervals, or the count of a verdict."""
    if name in VERDICTS:
        return row.sameness.get(VERDICTS[name], 0)
    stem, _, end = name.rpartition("_")
    if f"_{end}" in ENDS:
        bounds = getattr(row, INTERVALS[stem])
        return bounds[ENDS[f"_{end}"]] if bounds else None
    return getattr(row, name)


def tokens_per_step(steps: pd.DataFrame) -> pd.DataFrame:
    """Return method, tokens, steps and share: how often a step of the method kept this many tokens."""
    counted = steps.groupby(["method", "tokens"]).size().rename("steps").reset_index()
    counted["share"] = counted["steps"] / counted.groupby("method")["steps"].transform("sum")
    return counted


def median_step_ms(steps: pd.DataFrame) -> dict[str, float]:
    """Return the median milliseconds of a step, by method."""
    return {str(method): float(ms) for method, ms in (steps.groupby("method")["total_s"].median() * 1000).items()}
