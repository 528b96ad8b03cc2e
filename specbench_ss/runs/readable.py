"""Round-trip check of a sample before it is written."""

from __future__ import annotations

from collections.abc import Sequence

from specbench_ss.decoding.generation import Step
from specbench_ss.files.records import encoded
from specbench_ss.runs.rows import Row, StepRow
from specbench_ss.runs.step_lines import read_step_line


def check_readable(row: Row, steps: Sequence[Step]) -> None:
    """Raise ValueError or TypeError where the lines of a sample could not be read again.

    That is where a count is negative or not a whole number, or a time is not finite.
    """
    Row.read(encoded(row.as_dict()))
    for index, step in enumerate(steps):
        read_step_line(encoded(StepRow(*row.key, index=index, step=step).as_dict()))
