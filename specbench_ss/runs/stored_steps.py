"""The steps of a complete run as Parquet: read in place of steps.jsonl, where they were made from the same bytes.

docs/design/store.md has the rules. What is written: `specbench_ss/results/parquet_files.py`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from specbench_ss.runs.keys import KEY
from specbench_ss.runs.steps import DTYPES, StepColumns, Steps, starts_of

STEPS_PARQUET, SAMPLES_PARQUET = "steps.parquet", "samples.parquet"
SAMENESS_PARQUET, SUMMARY_PARQUET = "sameness.parquet", "summary.parquet"
PARQUET = (STEPS_PARQUET, SAMPLES_PARQUET, SAMENESS_PARQUET, SUMMARY_PARQUET)
MADE_FROM = b"specbench_ss.made_from"  # the entry of the metadata of steps.parquet


def made_from(files: tuple[Path, ...]) -> bytes:
    """Return sizes and hashes of files, to be kept beside what is made of them. Raises OSError."""
    return json.dumps({file.name: [file.stat().st_size, _sha256(file)] for file in files}).encode()


def _sha256(file: Path) -> str:
    with open(file, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


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
    import pyarrow.parquet as pq

    sizes = json.loads((pq.read_metadata(file).metadata or {})[MADE_FROM])
    if [sizes[f.name][0] for f in files] != [f.stat().st_size for f in files]:
        return None  # at once, without reading the files
    if sizes != json.loads(made_from(files)):
        return None
    names = [*KEY, "index", *DTYPES]
    table = pq.read_table(
        file, columns=names, read_dictionary=["question_id", "method"], page_checksum_verification=True
    )
    return _steps(table)


def _steps(table: Any) -> Steps:
    """Return the steps of an Arrow table. Every sample in it is whole, so each begins where `index` is 0."""
    import numpy as np

    begins = np.flatnonzero(table.column("index").to_numpy() == 0)
    columns = StepColumns(*(table.column(name).to_numpy().astype(kind) for name, kind in DTYPES.items()))
    firsts = table.select(KEY).take(begins).to_pydict()
    keys = tuple(zip(*(firsts[name] for name in KEY), strict=True))
    return Steps(keys, starts_of(np.diff(np.append(begins, len(table)))), columns)
