"""Read steps.jsonl straight into columns, some megabytes at a time, and say which of its lines count.

docs/design/store.md has the rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from specbench_ss.files import crash_safe, records
from specbench_ss.runs.rows import Key
from specbench_ss.runs.steps import Array, StepColumns, Steps, starts_of

Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]  # what fits its column


class _Line(msgspec.Struct, gc=False):
    """A line of steps.jsonl. Unknown fields are ignored."""

    question_id: str
    turn: Count
    method: str
    repeat: Count
    index: Count
    nodes: Count
    verified: Count
    depth: Count
    accepted: Count
    tokens: Count
    draft_s: float
    verify_s: float
    accept_s: float
    host_s: float
    total_s: float


read_step_line = records.decoder(_Line)
_many = msgspec.json.Decoder(_Line).decode_lines


@dataclass(slots=True)
class Block:
    """Lines of one sample that are numbered 0, 1, 2, ...

    first: index of the first of them; another one than 0 says that lines before it are lost. start, stop: line numbers
    from 0.
    """

    key: Key
    first: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class StepLines:
    """What steps.jsonl holds: every whole line, in blocks. end: number of bytes that the whole lines take."""

    columns: StepColumns
    blocks: list[Block]
    end: int

    def steps(self, wanted: Mapping[Key, int]) -> Steps:
        """Return the steps of these samples in the order of the file; of a sample with several blocks, the last one.

        wanted: how many steps each sample has. Raises ValueError where some of them are missing.
        """
        last = {block.key: block for block in self.blocks if block.key in wanted}
        counts = {key: block.stop - block.start for key, block in last.items() if not block.first}
        for key, count in wanted.items():
            if count and counts.get(key) != count:
                raise ValueError(f"it lacks steps of {key[0]} turn {key[1] + 1} of {key[2]}")
        blocks = sorted((last[key] for key, count in wanted.items() if count), key=lambda block: block.start)
        sizes = [counts[block.key] for block in blocks]
        columns = self.columns if sum(sizes) == len(self.columns) else self.columns.take(_lines_of(blocks))
        return Steps(tuple(block.key for block in blocks), starts_of(sizes), columns)


def _lines_of(blocks: list[Block]) -> Array:
    """Return the numbers of all lines of these blocks, from 0."""
    ranges = [np.arange(block.start, block.stop) for block in blocks]
    return np.concatenate(ranges) if ranges else np.zeros(0, np.int64)


def read_step_lines(file: Path) -> StepLines:
    """Return what the file holds; nothing where it is missing. Raises UserError with the number of a damaged line."""
    parts, blocks, end, number = list[StepColumns](), list[Block](), 0, 0
    for piece in crash_safe.pieces(file):
        lines = _decoded(file, piece, number)
        parts.append(StepColumns.of(lines))
        _extend(blocks, lines, number)
        number, end = number + len(lines), end + len(piece)
    return StepLines(StepColumns.joined(parts), blocks, end)


def _decoded(file: Path, piece: bytes, before: int) -> list[_Line]:
    """Return the lines of a piece of the file. before: how many lines there were before it."""
    try:
        lines = _many(piece)
        if len(lines) == piece.count(b"\n"):  # an empty line is passed over, and is damage
            return lines
    except (msgspec.MsgspecError, ValueError, RecursionError):
        pass  # one by one, to find the line, or to read what msgspec alone does not
    whole = piece[:-1].split(b"\n")
    return [crash_safe.record(file, number, line, read_step_line) for number, line in enumerate(whole, before + 1)]


def _extend(blocks: list[Block], lines: list[_Line], number: int) -> None:
    """Add lines, the first of which has this number, to the blocks; a line may belong to the last one."""
    last = blocks[-1] if blocks else None
    for at, line in enumerate(lines, number):
        index = -1 if last is None else last.first + at - last.start
        if last is None or index != line.index or last.key != (line.question_id, line.turn, line.method, line.repeat):
            if last is not None:
                last.stop = at
            key = (line.question_id, line.turn, line.method, line.repeat)
            last = Block(key, line.index, at, at)
            blocks.append(last)
    if last is not None:
        last.stop = number + len(lines)
