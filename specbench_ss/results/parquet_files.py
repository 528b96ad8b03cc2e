"""The Parquet files of a complete run: its frames, for other tools. docs/design/store.md has the rules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from specbench_ss.errors import first_line
from specbench_ss.files.crash_safe import replacing
from specbench_ss.results import frames
from specbench_ss.results.columns import SAMENESS, SAMPLES, STEPS, SUMMARY, Column
from specbench_ss.results.health import unfinished
from specbench_ss.runs.rows import Run
from specbench_ss.runs.run_directory import ROWS, read_run
from specbench_ss.runs.run_directory import STEPS as STEP_LINES
from specbench_ss.runs.stored_steps import (
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


def write_parquet(path: Path) -> str:
    """Write the Parquet files of the complete run in a directory; return why they could not be written, or ''."""
    return _whole_or_none(path, PARQUET, write_frames)


def rewrite_scores(path: Path) -> str:
    """Write the files that hold a judge's ratings again, where they are; return as `write_parquet` does."""
    there = [name for name in (SAMPLES_PARQUET, SUMMARY_PARQUET) if (path / name).exists()]
    return _whole_or_none(path, there, _write_scores) if there else ""


def _whole_or_none(path: Path, names: Sequence[str], write: Callable[[Run], None]) -> str:
    """Write some of a complete run's files, or remove them where that fails, and say why."""
    try:
        run = read_run(path)
        if not unfinished(run):
            write(run)
        return ""
    except Exception as error:  # a full disk, or whatever Arrow raises: the run itself is there, and whole
        for name in names:
            with contextlib.suppress(OSError):
                (path / name).unlink(missing_ok=True)
        return f"the Parquet files of {path} could not be written: {first_line(error)}"


def _write_scores(run: Run, folder: Path | None = None) -> None:
    folder = folder or run.path
    _put(folder / SAMPLES_PARQUET, SAMPLES, [frames.samples(run)])
    _put(folder / SUMMARY_PARQUET, SUMMARY, [frames.summary(run)])


def write_frames(run: Run, folder: Path | None = None) -> None:
    """Write the four frames of a run into a folder, by default its own."""
    folder = folder or run.path
    files = (run.path / ROWS, run.path / STEP_LINES)
    _write_scores(run, folder)
    _put(folder / SAMENESS_PARQUET, SAMENESS, [frames.sameness(run)])
    _put(folder / STEPS_PARQUET, STEPS, _step_frames(run), {MADE_FROM: made_from(files), CHECKSUM: checksum(run.steps)})


def _step_frames(run: Run) -> Iterator[pd.DataFrame]:
    """Yield the frame of all steps in parts. At least one, which may be empty."""
    category = {row.key: row.category for row in run.rows}
    for start in range(0, max(1, len(run.steps.keys)), SAMPLES_AT_ONCE):
        some = np.arange(start, min(start + SAMPLES_AT_ONCE, len(run.steps.keys)))
        yield frames.step_frame(run.steps.only(some), category)


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
