"""A run as pandas frames. Each has the columns of `specbench_ss.results.columns`, whatever the run holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from specbench_ss.results import verdict_text
from specbench_ss.results.columns import SAMENESS, SAMPLES, STEPS, SUMMARY, Column
from specbench_ss.results.quality import MARGIN
from specbench_ss.results.summary import SummaryRow, summarise
from specbench_ss.runs.keys import KEY
from specbench_ss.runs.rows import Key, Row, Run, Sameness
from specbench_ss.runs.steps import StepColumns, Steps

TALLIED = ("tokens", "steps", "share")  # of `tokens_per_step`, by method
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
    "n_other_text": "other text",
    "n_sampled": "sampled",
    "n_not_compared": "not compared",
}

OF_SAMPLED = {  # column -> field of `SampledTokens`
    "sampled_tokens": "tokens",
    "sampled_pit": "pit_counts",
    "sampled_ratios": "log_ratios",
    "sampled_surplus": "surplus",
    "sampled_variance": "variance",
    "sampled_offered": "offered",
    "sampled_accepted": "accepted",
    "sampled_expected": "expected",
    "sampled_accept_variance": "accept_variance",
    "sampled_accept_ratios": "accept_ratios",
    "sampled_rounding": "rounding",
}


def frame(columns: Sequence[Column], records: Iterable[Any], value: Callable[[Any, str], Any]) -> pd.DataFrame:
    """Return a frame with a row for each record. value(record, column name): the cell, None for a missing one."""
    rows = list(records)
    return pd.DataFrame({c.name: _series(c, [value(row, c.name) for row in rows]) for c in columns})


def _series(column: Column, values: list[Any]) -> pd.Series:
    return pd.Series(array(column, [pd.NA if value is None else value for value in values]))


def array(column: Column, values: Any) -> Any:
    """Return values as an array of the column's dtype."""
    if column.dtype == "object":
        return pd.Series(values, dtype="object").array
    try:
        return pd.array(values, dtype=column.dtype)
    except UnicodeEncodeError:  # half of a surrogate pair: Python's strings hold it, Arrow's do not
        return pd.array(values, dtype=pd.StringDtype("python"))


def samples(run: Run) -> pd.DataFrame:
    """Return one row for each sample, failed ones included."""

    def value(row: Row, name: str) -> Any:
        return run.judged_scores.get(row.key) if name == "judged" else getattr(row, name)

    return frame(SAMPLES, run.rows, value)


def steps(run: Run) -> pd.DataFrame:
    """Return one row for each step, in the order in which the steps were made."""
    return step_frame(run.steps, _categories(run))


def step_frame(steps: Steps, category: Mapping[Any, str]) -> pd.DataFrame:
    """Return the steps with the columns of `STEPS`. category: of each sample."""
    counts = steps.counts
    of_sample = {name: [key[i] for key in steps.keys] for i, name in enumerate(KEY)}
    of_sample["category"] = [category[key] for key in steps.keys]

    def values(column: Column) -> Any:
        if column.name in of_sample:
            own = array(column, of_sample[column.name])
            return own.take(np.repeat(np.arange(len(counts)), counts))
        whole = steps.index if column.name == "index" else getattr(steps.columns, column.name)
        return array(column, whole)

    return pd.DataFrame({column.name: values(column) for column in STEPS}, copy=False)


def sameness(run: Run) -> pd.DataFrame:
    """Return one row for each comparison of an answer with that of its reference."""
    category = _categories(run)

    def value(row: Sameness, name: str) -> Any:
        if name in OF_SAMPLED:
            return None if row.sampled is None else getattr(row.sampled, OF_SAMPLED[name])
        return category.get(row.key) if name == "category" else getattr(row, name)

    return frame(SAMENESS, run.sameness, value)


def _categories(run: Run) -> dict[Any, str]:
    return {row.key: row.category for row in run.rows}


def summary(run: Run, quality_margin: float = MARGIN) -> pd.DataFrame:
    """Return one row for each task and method, `overall` first: the rows of the terminal's table and of the report."""
    return summary_of(summarise(run, quality_margin), run.manifest["config"])


def summary_of(rows: Iterable[SummaryRow], config: Mapping[str, Any]) -> pd.DataFrame:
    """Return the same of rows that are known. config: that of the manifest."""

    def value(row: SummaryRow, name: str) -> Any:
        return verdict_text.output(row, config) if name == "output" else summary_value(row, name)

    return frame(SUMMARY, rows, value)


def summary_value(row: SummaryRow, name: str) -> Any:
    """Return a cell of the summary: a field of the row, an end of one of its intervals, or the count of a verdict."""
    if name in VERDICTS:
        return row.sameness.get(VERDICTS[name], 0)
    stem, _, end = name.rpartition("_")
    if f"_{end}" in ENDS:
        bounds = getattr(row, INTERVALS[stem])
        return bounds[ENDS[f"_{end}"]] if bounds else None
    return getattr(row, name)


def tokens_per_step(run: Run) -> pd.DataFrame:
    """Return method, tokens, steps and share: how often a step of the method kept this many tokens."""
    found = []
    for label, own in _by_method(run).items():
        counted = np.bincount(own.tokens)
        kept = np.flatnonzero(counted)
        found.append({"method": label, "tokens": kept, "steps": counted[kept], "share": counted[kept] / len(own)})
    frames = [pd.DataFrame(of_one) for of_one in found]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=["method", *TALLIED])


def median_step_ms(run: Run) -> dict[str, float]:
    """Return the median milliseconds of a step, by method."""
    return {label: float(np.median(own.total_s)) * 1000 for label, own in _by_method(run).items()}


def _by_method(run: Run) -> dict[str, StepColumns]:
    """Return the steps of each method that has some."""
    keys: dict[str, list[Key]] = {}
    for key in run.steps.keys:
        keys.setdefault(key[2], []).append(key)
    return {label: run.steps.together(own) for label, own in sorted(keys.items())}
