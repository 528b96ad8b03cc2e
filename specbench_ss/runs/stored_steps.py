"""The steps of a complete run as Parquet: read in place of steps.jsonl, where they were made from the same bytes.

docs/design/store.md has the rules. What is written: `specbench_ss/results/parquet_files.py`.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from specbench_ss.runs.keys import KEY
from specbench_ss.runs.steps import DTYPES, Array, StepColumns, Steps, starts_of

STEPS_PARQUET, SAMPLES_PARQUET = "steps.parquet", "samples.parquet"
SAMENESS_PARQUET, SUMMARY_PARQUET = "sameness.parquet", "summary.parquet"
PARQUET = (STEPS_PARQUET, SAMPLES_PARQUET, SAMENESS_PARQUET, SUMMARY_PARQUET)
MADE_FROM, CHECKSUM = b"specbench_ss.made_from", b"specbench_ss.checksum"  # entries of the metadata of steps.parquet


def made_from(files: tuple[Path, ...]) -> bytes:
    """Return sizes and hashes of files, to be kept beside what is made of them. Raises OSError."""
    return json.dumps({file.name: [file.stat().st_size, _sha256(file)] for file in files}).encode()


def _sha256(file: Path) -> str:
    with open(file, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def checksum(steps: Steps) -> bytes:
    """Return a checksum of keys and columns. Arrow's own of every page take four times as long as reading them."""
    found = zlib.crc32(json.dumps(steps.keys).encode())
    for column in (steps.starts, *(getattr(steps.columns, name) for name in DTYPES)):
        found = zlib.crc32(np.ascontiguousarray(column).data, found)
    return str(found).encode()


def stored_steps(path: Path, files: tuple[Path, ...]) -> Steps | None:
    """Return the steps in the Parquet file of a run directory.

    None where it is missing, damaged, or was not made from these files as they are now.
    """
    file = path / STEPS_PARQUET
    try:
        return _read(file, files) if file.is_file() else None
    except Exception:  # Arrow has many kinds of errors, and the lines are there to be read
        return None


def _read(file: Path, files: tuple[Path, ...]) -> Steps | None:
    stored = pq.ParquetFile(file, read_dictionary=["question_id", "method"])
    facts = stored.metadata.metadata or {}
    sizes = json.loads(facts[MADE_FROM])
    if [sizes[f.name][0] for f in files] != [f.stat().st_size for f in files]:
        return None  # at once, without reading the files
    if sizes != json.loads(made_from(files)):
        return None
    steps = _steps(stored.read(columns=[*KEY, "index", *DTYPES]))
    return steps if checksum(steps) == facts[CHECKSUM] else None


def _steps(table: Any) -> Steps:
    """Return the steps of an Arrow table. Every sample in it is whole, so each begins where `index` is 0."""
    begins = np.flatnonzero(_array(table.column("index")) == 0)
    columns = StepColumns(*(_array(table.column(name)).astype(kind, copy=False) for name, kind in DTYPES.items()))
    firsts = table.select(KEY).take(begins).to_pydict()
    keys = tuple(zip(*(firsts[name] for name in KEY), strict=True))
    return Steps(keys, starts_of(np.diff(np.append(begins, len(table)))), columns)


def _array(column: Any) -> Array:
    """Return a column of numbers. Arrow's own way to numpy imports pandas first. Raises ValueError where one lacks."""
    whole = column.combine_chunks()
    if whole.null_count:
        raise ValueError("a number is missing")
    kind = {"int64": np.int64, "double": np.float64}[str(whole.type)]
    return np.frombuffer(whole.buffers()[1], kind, len(whole), 8 * whole.offset)
