"""What takes the samples of a run as they are made: an open run directory, or what stands in for it in a worker."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from specbench_ss.decoding.generation import Step
from specbench_ss.runs.rows import Key, Row, Sameness


class Ledger(Protocol):
    """rows: every sample that is there, by key. judged: keys of samples with a verdict. path: of the run directory."""

    path: Path
    manifest: dict[str, Any]
    rows: dict[Key, Row]
    judged: set[Key]

    def append(self, row: Row, steps: Sequence[Step]) -> None:
        """Take a sample."""

    def append_sameness(self, verdict: Sameness) -> None:
        """Take one comparison with the reference."""

    def append_beside(self, name: str, line: dict[str, Any]) -> str:
        """Take a line of one of the optional files that `side_files` names. Returns why it could not, or ''."""

    def update(self, **changes: Any) -> None:
        """Change entries of the manifest."""

    def keep_warning(self, text: str) -> None:
        """Take what whoever reads the results should know."""
