"""What a run has beside its rows where several requests were made at a time.

requests.jsonl  one line for each request of such a level, in the form of a row
levels.jsonl    one line for each level of a method and repeat, written last: it commits the level's requests

A level is made whole or not at all, since its throughput is that of all its requests together.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specbench_ss.files import crash_safe, records
from specbench_ss.runs.level import Level as Level
from specbench_ss.runs.level import LevelKey
from specbench_ss.runs.rows import Row

REQUESTS, LEVELS = "requests.jsonl", "levels.jsonl"
_read_level = records.decoder(Level)


def level_of(row: Row) -> LevelKey:
    """Return the level that a request belongs to."""
    return (row.method, row.concurrency or 1, row.repeat)


def read_levels(path: Path) -> tuple[list[Level], list[Row]]:
    """Return the committed levels of a run directory with their requests. Raises UserError for a damaged line."""
    levels: dict[LevelKey, Level] = {one.key: one for one in crash_safe.scan(path / LEVELS, _read_level)[0]}
    rows = {(*row.key, row.concurrency): row for row in crash_safe.scan(path / REQUESTS, Row.read)[0]}
    return list(levels.values()), [row for row in rows.values() if level_of(row) in levels]


def recover(path: Path) -> None:
    """Cut off the half of a line that a killed process may have left; of requests made twice the later ones count."""
    crash_safe.cut(path / LEVELS, _read_level)
    crash_safe.cut(path / REQUESTS, Row.read)


def append_level(path: Path, level: Level, rows: Sequence[Row]) -> None:
    """Commit a level: write its requests, then the level itself, and flush each to the disk."""
    for name, made in ((REQUESTS, [row.as_dict() for row in rows]), (LEVELS, [level.as_dict()])):
        with (path / name).open("ab", buffering=0) as file:
            crash_safe.append(file, made)
