"""Files of a run's steps: JSON lines read into columns, and Parquet.

Rules: docs/design/store.md. Writer: `specbench_ss/results/frames.py`.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import pyarrow.parquet as pq

from specbench_ss import storage, user_files
from specbench_ss.runs.records import DTYPES, KEY, Array, Key, StepColumns, Steps, starts_of
from specbench_ss.storage import file_sha256

Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]  # range of its column


class _Line(msgspec.Struct, gc=False):
    """A line of steps.jsonl. Unknown fields are ignored."""

    question_id: str
    turn: Count
    method: str
    repeat: Count
    index: Count
    draft_nodes: Count
    verified_nodes: Count
    draft_depth: Count
    accepted_tokens: Count
    tokens: Count
    draft_s: float
    verify_s: float
    accept_s: float
    host_s: float
    total_s: float


read_step_line = user_files.decoder(_Line)
_decode_lines = msgspec.json.Decoder(_Line).decode_lines
EMPTY = np.zeros(0, np.int64)


@dataclass(slots=True)
class Block:
    """Consecutively numbered lines of one sample.

    first: index of the first line; if it is not 0, earlier lines are lost. start, stop: line numbers from 0.
    """

    key: Key
    first: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Return the number of lines."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class StepLines:
    """Content of steps.jsonl: every complete line, in blocks. end: size of the complete lines in bytes."""

    columns: StepColumns
    blocks: list[Block]
    end: int

    def steps(self, wanted: Mapping[Key, int]) -> Steps:
        """Return the steps of these samples in the order of the file, without samples of which some steps are missing.

        wanted: number of steps of each sample. Of several blocks of a sample, the last one counts.
        """
        last = {block.key: block for block in self.blocks}
        blocks = [block for block in last.values() if not block.first and block.size == (wanted.get(block.key) or -1)]
        blocks.sort(key=lambda block: block.start)
        ranges = [np.arange(block.start, block.stop) for block in blocks]
        sizes = [len(indices) for indices in ranges]
        columns = (
            self.columns if sum(sizes) == len(self.columns) else self.columns.take(np.concatenate([EMPTY, *ranges]))
        )
        return Steps(tuple(block.key for block in blocks), starts_of(sizes), columns)


def read_step_lines(file: Path) -> StepLines:
    """Return the content of the file, if it exists. Raises UserError with the number of a damaged line."""
    parts, blocks, end, number = list[StepColumns](), list[Block](), 0, 0
    for piece in storage.pieces(file):
        lines = _read_lines(file, piece, number)
        parts.append(StepColumns.of(lines))
        _extend(blocks, lines, number)
        number, end = number + len(lines), end + len(piece)
    return StepLines(StepColumns.joined(parts), blocks, end)


def _read_lines(file: Path, chunk: bytes, n_before: int) -> list[_Line]:
    """Return the lines of a chunk of the file. n_before: number of lines before it."""
    try:
        lines = _decode_lines(chunk)
        if len(lines) == chunk.count(b"\n"):  # msgspec skips an empty line, which is damage
            return lines
    except (msgspec.MsgspecError, ValueError, RecursionError):
        pass  # one by one, to find the damaged line or to read what msgspec rejects
    lines_ = chunk[:-1].split(b"\n")
    return [storage.record(file, number, line, read_step_line) for number, line in enumerate(lines_, n_before + 1)]


def _extend(blocks: list[Block], lines: list[_Line], number: int) -> None:
    """Add lines, the first with this number, to the blocks; they may extend the last one."""
    last = blocks[-1] if blocks else None
    for row, line in enumerate(lines, number):
        key = (line.question_id, line.turn, line.method, line.repeat)
        if last is not None and line.index == last.first + last.size and last.key == key:
            last.stop += 1
        else:
            blocks.append(last := Block(key, line.index, row, row + 1))


STEPS_PARQUET, SAMPLES_PARQUET = "steps.parquet", "samples.parquet"
OUTPUT_MATCH_PARQUET, SUMMARY_PARQUET = "output_match.parquet", "summary.parquet"
PARQUET = (STEPS_PARQUET, SAMPLES_PARQUET, OUTPUT_MATCH_PARQUET, SUMMARY_PARQUET)
MADE_FROM, CHECKSUM = b"specbench_ss.made_from", b"specbench_ss.checksum"  # metadata keys of steps.parquet


def made_from(files: tuple[Path, ...]) -> bytes:
    """Return sizes and hashes of source files, for the metadata of a derived file. Raises OSError."""
    return json.dumps({file.name: [file.stat().st_size, file_sha256(file)] for file in files}).encode()


def checksum(steps: Steps) -> bytes:
    """Return a checksum of keys and columns; Arrow's page checksums take four times as long as reading."""
    crc = zlib.crc32(json.dumps(steps.keys).encode())
    for column in (steps.starts, *(getattr(steps.columns, name) for name in DTYPES)):
        crc = zlib.crc32(np.ascontiguousarray(column).data, crc)
    return str(crc).encode()


def stored_steps(path: Path, files: tuple[Path, ...]) -> Steps | None:
    """Return the steps in the Parquet file of a run directory.

    None if it is missing, damaged, or outdated against these files.
    """
    file = path / STEPS_PARQUET
    try:
        return _read(file, files) if file.is_file() else None
    except Exception:  # Arrow has many error classes, and the JSON lines can be read instead
        return None


def _read(file: Path, files: tuple[Path, ...]) -> Steps | None:
    stored = pq.ParquetFile(file, read_dictionary=["question_id", "method"])
    metadata = stored.metadata.metadata or {}
    sizes = json.loads(metadata[MADE_FROM])
    if [sizes[f.name][0] for f in files] != [f.stat().st_size for f in files]:
        return None  # without hashing the files
    if sizes != json.loads(made_from(files)):
        return None
    steps = _steps(stored.read(columns=[*KEY, "index", *DTYPES]))
    return steps if checksum(steps) == metadata[CHECKSUM] else None


def _steps(table: Any) -> Steps:
    """Return the steps of an Arrow table; each sample begins at `index` 0."""
    begins = np.flatnonzero(_array(table.column("index")) == 0)
    columns = StepColumns(*(_array(table.column(name)).astype(kind, copy=False) for name, kind in DTYPES.items()))
    firsts = table.select(KEY).take(begins).to_pydict()
    keys = tuple(zip(*(firsts[name] for name in KEY), strict=True))
    return Steps(keys, starts_of(np.diff(np.append(begins, len(table)))), columns)


def _array(column: Any) -> Array:
    """Return a numeric column without importing pandas, as Arrow would. Raises ValueError for a missing number."""
    whole = column.combine_chunks()
    if whole.null_count:
        raise ValueError("a number is missing")
    kind = {"int64": np.int64, "double": np.float64}[str(whole.type)]
    return np.frombuffer(whole.buffers()[1], kind, len(whole), 8 * whole.offset)
