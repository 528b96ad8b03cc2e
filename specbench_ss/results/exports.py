"""A run in the forms of other tools: Spec-Bench's answer files, CSV, Parquet, a Markdown table."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from specbench_ss.errors import UserError
from specbench_ss.results import frames
from specbench_ss.results.columns import SAMENESS, SAMPLES, STEPS, SUMMARY
from specbench_ss.results.markdown_table import table
from specbench_ss.results.number_text import interval, number, times, title
from specbench_ss.results.specbench_files import answer_files, write_answers
from specbench_ss.results.summary import OVERALL, SummaryRow
from specbench_ss.results.terminal_table import ranked
from specbench_ss.results.verdict_text import output, quality, short_n
from specbench_ss.runs.rows import Run

HEAD = ("task", "method", "speedup", "95% interval", "verdict", "τ", "output", "quality", "tokens/s", "n")
LEFT = ("task", "method", "verdict", "output")
FRAMES = {"samples": SAMPLES, "steps": STEPS, "sameness": SAMENESS, "summary": SUMMARY}  # csv and parquet: a file each
Known = Callable[[Path], bool]


def write_csv(run: Run, folder: Path) -> list[str]:
    """Write the frames of a run as CSV files; lists are JSON texts."""
    for name in FRAMES:
        plain(getattr(frames, name)(run)).to_csv(folder / f"{name}.csv", index=False, errors="replace")
    return []


def plain(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a frame for CSV: lists as JSON texts."""
    lists = [name for name in frame if str(frame[name].dtype) == "object"]
    return frame.assign(**{name: frame[name].map(_json) for name in lists})


def _json(value: Any) -> Any:
    return value if value is pd.NA else json.dumps(list(value))


def write_parquet(run: Run, folder: Path) -> list[str]:
    """Write the frames of a run as Parquet files."""
    from specbench_ss.results.parquet_files import write_frames

    write_frames(run, folder)
    return []


def _csv_files(run: Run) -> dict[str, Known]:
    heads = {name: ",".join(column.name for column in columns) for name, columns in FRAMES.items()}
    return {f"{name}.csv": partial(_begins, head) for name, head in heads.items()}


def _parquet_files(run: Run) -> dict[str, Known]:
    names = {name: [column.name for column in columns] for name, columns in FRAMES.items()}
    return {f"{name}.parquet": partial(_has_columns, own) for name, own in names.items()}


def _has_columns(names: Sequence[str], file: Path) -> bool:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return list(pq.read_schema(file).names) == list(names)
    except pa.ArrowException:
        return False


@dataclass(frozen=True, slots=True)
class ExportFormat:
    """Export format of several files.

    write: writes them into a folder and returns what was left out, a sentence each. files: of each file that a run is
    written to, by name, the test that an existing file of that name is one of an earlier export.
    """

    write: Callable[[Run, Path], list[str]]
    files: Callable[[Run], Mapping[str, Known]]


FOLDERS: dict[str, ExportFormat] = {
    "specbench": ExportFormat(write_answers, answer_files),
    "csv": ExportFormat(write_csv, _csv_files),
    "parquet": ExportFormat(write_parquet, _parquet_files),
}


def check_replaced(files: Mapping[Path, Known]) -> None:
    """Raise UserError where a file that would be replaced is none of an earlier export."""
    for file, known in files.items():
        if file.exists() and not (file.is_file() and (file.stat().st_size == 0 or known(file))):
            raise UserError(f"{file} was not written by an export: move it, or give another --out")


def _begins(head: str, file: Path) -> bool:
    with file.open(encoding="utf-8", errors="replace") as lines:
        return lines.readline().rstrip("\n") == head


def is_markdown(file: Path) -> bool:
    """Return True for a table that `markdown` made."""
    return _begins(table(HEAD, [], LEFT).partition("\n")[0], file)


def markdown(rows: Sequence[SummaryRow], config: Mapping[str, Any]) -> str:
    """Return the summary of a run as a Markdown table: all tasks together first, then every task.

    config: that of the manifest.
    """
    tasks = list(dict.fromkeys(row.category for row in rows))
    tasks = tasks if len(tasks) > 2 else tasks[:1]  # a single task is all of them
    ordered = [row for task in tasks for row in ranked([row for row in rows if row.category == task])]
    return table(HEAD, [_cells(row, config) for row in ordered], LEFT)


def _cells(row: SummaryRow, config: Any) -> tuple[str, ...]:
    return (
        "all" if row.category == OVERALL else title(row.category),
        row.method,
        times(row.speedup),
        interval(row.speedup_interval),
        row.comparison,
        number(row.tau),
        output(row, config),
        number(quality(row, config)),
        number(row.tokens_per_s, 1),
        short_n(row),
    )
