"""Frames of what a run recorded of the machine."""

from __future__ import annotations

from typing import Any

import pandas as pd

from specbench_ss.results.columns import MACHINE, TELEMETRY
from specbench_ss.results.frames import frame
from specbench_ss.results.machine import machine_rows
from specbench_ss.runs.rows import Run
from specbench_ss.runs.side_files import Readings

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
