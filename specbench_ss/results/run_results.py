"""A run directory's frames and manifest, for further computation."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from specbench_ss.errors import UserError
from specbench_ss.results import frames, machine_frames
from specbench_ss.results.columns import LEVELS
from specbench_ss.results.concurrency import level_rows, value
from specbench_ss.results.health import unfinished
from specbench_ss.results.quality import MARGIN, checked_margin
from specbench_ss.runs.rows import Run
from specbench_ss.runs.run_directory import read_run
from specbench_ss.runs.side_files import Drafts, read_drafts, read_telemetry


class RunResults:
    """What a run directory holds, as `load_run` and `run` return it. Frames are made when they are first asked for.

    path: the directory. manifest: which methods were measured, on what, with which settings, in which environment.
    unfinished: '' for a complete run, else a text that says what is missing. docs/api.md lists the columns of the
    frames.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.path: Path = run.path
        self.manifest: dict[str, Any] = run.manifest
        self.unfinished: str = unfinished(run)

    def __repr__(self) -> str:
        made = f"{len(self._run.rows):,} samples of {', '.join(self._run.labels)}"
        return f"<run {self.path}: {made}{f'; {self.unfinished}' if self.unfinished else ''}>"

    @cached_property
    def samples(self) -> pd.DataFrame:
        """One row for each sample: a method's answer to one prompt, with its counts and times."""
        return frames.samples(self._run)

    @cached_property
    def steps(self) -> pd.DataFrame:
        """One row for each decoding step, with its counts and the parts of its time."""
        return frames.steps(self._run)

    @cached_property
    def sameness(self) -> pd.DataFrame:
        """One row for each answer that was compared with its reference's, with the verdict."""
        return frames.sameness(self._run)

    @cached_property
    def telemetry(self) -> pd.DataFrame:
        """One row for each reading of the machine; empty where telemetry was switched off."""
        return machine_frames.telemetry(read_telemetry(self.path))

    @cached_property
    def drafts(self) -> list[Drafts]:
        """The recorded drafts, one entry for each recorded answer; docs/api.md lists the fields."""
        return read_drafts(self.path)

    def machine(self) -> pd.DataFrame:
        """One row for each method: what its steps cost by their shapes, and what of the limits they reached."""
        return machine_frames.machine(self._run)

    def concurrency(self) -> pd.DataFrame:
        """One row for each number of requests in flight and served engine; empty where only one was in flight."""
        return frames.frame(LEVELS, level_rows(self._run), value)

    def summary(self, quality_margin: float = MARGIN) -> pd.DataFrame:
        """One row for each task and method, `overall` first: the numbers of the terminal's table and of the report.

        quality_margin: how much lower than that of `ar` the quality of a method that changes the model may be, on
        scores from 0 to 1, for `quality_verdict` to call it non-inferior. Raises UserError for what is no such margin.
        """
        return frames.summary(self._run, checked_margin(quality_margin))


def load_run(path: str | Path) -> RunResults:
    """Read what is committed in a run directory, whether the run is finished or not. Nothing in it is changed.

    Raises UserError where `path` is no run directory, or a damaged one.
    """
    if not isinstance(path, str | Path):
        raise UserError(f"load_run takes the path of a run directory, not {path!r}")
    return RunResults(read_run(Path(path).expanduser()))
