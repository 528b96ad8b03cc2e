"""A run in the forms of other tools: Spec-Bench's answer files, CSV, Parquet, a Markdown table."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from specbench_ss.results import frames
from specbench_ss.results.markdown_table import table
from specbench_ss.results.number_text import interval, number, times, title
from specbench_ss.results.parquet_files import write_frames
from specbench_ss.results.specbench_files import write_answers
from specbench_ss.results.summary import OVERALL, SummaryRow
from specbench_ss.results.terminal_table import ranked
from specbench_ss.results.verdict_text import output, quality, short_n
from specbench_ss.runs.rows import Run

HEAD = ("task", "method", "speedup", "95% interval", "verdict", "τ", "output", "quality", "tokens/s", "n")
LEFT = ("task", "method", "verdict", "output")


def write_csv(run: Run, folder: Path) -> list[str]:
    """Write the frames of a run as CSV files; lists are JSON texts."""
    for name in ("samples", "steps", "sameness", "summary"):
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
    write_frames(run, folder)
    return []


FOLDERS: dict[str, Callable[[Run, Path], list[str]]] = {  # formats of several files
    "specbench": write_answers,
    "csv": write_csv,
    "parquet": write_parquet,
}


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
