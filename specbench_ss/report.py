"""What a report is to the core: something that turns a finished run into a file. Knows no report by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from specbench_ss.rows import Run


class Report(ABC):
    """Entry-point group `specbench_ss.reports`."""

    name: ClassVar[str]
    summary: ClassVar[str]
    filename: ClassVar[str]  # what the file is called inside the run directory

    @abstractmethod
    def write(self, run: Run, path: Path) -> None:
        """Write the report of `run` to the file `path`."""
