"""What the core knows of a report: something that turns a finished run into a file. No report is known by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from specbench_ss.errors import UserError
from specbench_ss.results.experiment import Experiment, Result
from specbench_ss.runs.rows import Run


class Report(ABC):
    """A kind of report. Reports are found through the entry-point group `specbench_ss.reports`."""

    name: ClassVar[str]
    summary: ClassVar[str]
    filename: ClassVar[str]  # what the file is called inside the run directory
    filename_of_several: ClassVar[str] = ""  # the same of several runs; empty: it shows one run
    quality_margin: float = (
        0.02  # how much lower the quality of a method that changes the model may be: docs/metrics.md
    )

    @abstractmethod
    def write(self, run: Run, path: Path) -> None:
        """Write the report of `run` to the file `path`."""

    def write_runs(self, runs: Sequence[Run], path: Path) -> None:
        """Write several runs beside each other to the file `path`; the others are compared with the first."""
        raise UserError(f"report {self.name!r} shows one run at a time")

    def write_result(self, experiment: Experiment, result: Result, facts: Mapping[str, str], path: Path) -> None:
        """Write what an experiment of a paper found. facts: how it was made, to be shown beside it."""
        raise UserError(f"report {self.name!r} shows runs only, no experiments")
