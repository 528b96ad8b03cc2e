"""pandas frames of a run, and their Parquet files."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from specbench_ss.errors import first_line
from specbench_ss.results import ranking
from specbench_ss.results.columns import MACHINE, SAMENESS, SAMPLES, STEPS, SUMMARY, TELEMETRY, Column
from specbench_ss.results.cost_model import machine_rows
from specbench_ss.results.sample_checks import unfinished
from specbench_ss.results.summary import SummaryRow, summarise
from specbench_ss.runs.records import KEY, Key, Row, Run, Sameness, StepColumns, Steps
from specbench_ss.runs.run_dir import ROWS, Readings, read_run
from specbench_ss.runs.run_dir import STEPS as STEP_LINES
from specbench_ss.runs.step_files import (
    CHECKSUM,
    MADE_FROM,
    PARQUET,
    SAMENESS_PARQUET,
    SAMPLES_PARQUET,
    STEPS_PARQUET,
    SUMMARY_PARQUET,
    checksum,
    made_from,
)
from specbench_ss.storage import replacing

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


def summary_of(rows: Iterable[SummaryRow], config: Mapping[str, Any]) -> pd.DataFrame:
    """Return the same of rows that are known. config: that of the manifest."""

    def value(row: SummaryRow, name: str) -> Any:
        return ranking.output(row, config) if name == "output" else summary_value(row, name)

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


Place = tuple[Readings, int]  # a try at a sample, and the number of one of its readings


def telemetry(tries: list[Readings]) -> pd.DataFrame:
    """Return one row for each reading of the machine, in the order in which they were made."""
    places = [(one, i) for one in tries for i in range(len(one.columns.get("t_s", ())))]
    return frame(TELEMETRY, places, _value)


def machine(run: Run) -> pd.DataFrame:
    """Return one row for each method: its cost by shapes, and what of the machine's limits it reached."""
    return frame(MACHINE, machine_rows(run), getattr)


def _value(place: Place, name: str) -> Any:
    one, i = place
    if hasattr(one, name):
        return getattr(one, name)
    column = one.columns.get(name, [])
    return column[i] if i < len(column) else None


ARROW = {"Int64": pa.int64(), "Float64": pa.float64(), "string": pa.string(), "boolean": pa.bool_()}
LISTS = {  # of `object` columns, what their lists hold; texts where nothing is said here
    "token_ids": pa.int64(),
    "sampled_pit": pa.int64(),
    "sampled_ratios": pa.float64(),
    "sampled_accept_ratios": pa.float64(),
    "acceptance_at": pa.float64(),
    "acceptance_at_n": pa.int64(),
    "acceptance_given": pa.float64(),
    "acceptance_given_n": pa.int64(),
}
SAMPLES_AT_ONCE = 1000  # whose steps are put into a frame and written together


def write_parquet(run: Run, rows: Sequence[SummaryRow]) -> str:
    """Write the Parquet files of a complete run into its directory; return why they could not be written, or ''.

    rows: the run's summary.
    """
    return "" if unfinished(run) else _whole_or_none(run, PARQUET, lambda: write_frames(run, rows, run.path))


def rewrite_scores(path: Path) -> str:
    """Write the files that hold a judge's ratings again, where they are; return as `write_parquet` does."""
    run, there = read_run(path), [name for name in (SAMPLES_PARQUET, SUMMARY_PARQUET) if (path / name).exists()]
    if not there or unfinished(run):
        return ""
    return _whole_or_none(run, there, lambda: _write_scores(run, summarise(run), path))


def _whole_or_none(run: Run, names: Sequence[str], write: Callable[[], None]) -> str:
    """Write some of a run's files, or remove them where that fails, and say why."""
    try:
        write()
        return ""
    except Exception as error:  # a full disk, or whatever Arrow raises: the run itself is there, and whole
        for name in names:
            with contextlib.suppress(OSError):
                (run.path / name).unlink(missing_ok=True)
        return f"the Parquet files of {run.path} could not be written: {first_line(error)}"


def _write_scores(run: Run, rows: Sequence[SummaryRow], folder: Path) -> None:
    _put(folder / SAMPLES_PARQUET, SAMPLES, [samples(run)])
    _put(folder / SUMMARY_PARQUET, SUMMARY, [summary_of(rows, run.manifest["config"])])


def write_frames(run: Run, rows: Sequence[SummaryRow], folder: Path) -> None:
    """Write the four frames of a run into a folder. rows: its summary."""
    files = (run.path / ROWS, run.path / STEP_LINES)
    _write_scores(run, rows, folder)
    _put(folder / SAMENESS_PARQUET, SAMENESS, [sameness(run)])
    _put(folder / STEPS_PARQUET, STEPS, _step_frames(run), {MADE_FROM: made_from(files), CHECKSUM: checksum(run.steps)})


def _step_frames(run: Run) -> Iterator[pd.DataFrame]:
    """Yield the frame of all steps in parts. At least one, which may be empty."""
    category = {row.key: row.category for row in run.rows}
    for start in range(0, max(1, len(run.steps.keys)), SAMPLES_AT_ONCE):
        some = np.arange(start, min(start + SAMPLES_AT_ONCE, len(run.steps.keys)))
        yield step_frame(run.steps.only(some), category)


def _put(file: Path, columns: Sequence[Column], parts: Any, facts: dict[bytes, bytes] | None = None) -> None:
    """Write frames with these columns, one after the other, as one file."""
    schema = pa.schema([(c.name, _kind(c)) for c in columns])
    first = True
    with replacing(file) as raw, contextlib.ExitStack() as stack:
        for part in parts:
            table = _table(part, schema)
            texts = [c.name for c in columns if c.dtype not in ("Int64", "Float64")]  # times hardly ever come twice
            if first:  # pandas puts into the metadata which dtypes the columns are read back as
                schema = schema.with_metadata({**(table.schema.metadata or {}), **(facts or {})})
                made = pq.ParquetWriter(raw, schema, use_dictionary=texts, write_page_checksum=True)
                writer, first = stack.enter_context(made), False
            writer.write_table(table.cast(schema))


def _table(frame: pd.DataFrame, schema: pa.Schema) -> pa.Table:
    plain = frame.assign(**{name: frame[name].map(_plain) for name in frame if str(frame[name].dtype) == "object"})
    try:
        return pa.Table.from_pandas(plain, schema=schema, preserve_index=False)
    except UnicodeEncodeError:  # half of a surrogate pair, which Arrow does not hold
        texts = [name for name in frame if str(frame[name].dtype) == "string"]
        whole = plain.assign(**{name: plain[name].map(_without_halves, na_action="ignore") for name in texts})
        return pa.Table.from_pandas(whole, schema=schema, preserve_index=False)


def _kind(column: Column) -> pa.DataType:
    return ARROW[column.dtype] if column.dtype in ARROW else pa.list_(LISTS.get(column.name, pa.string()))


def _plain(value: Any) -> list[Any] | None:
    return None if value is pd.NA else list(value)


def _without_halves(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
