"""What a worker makes for a run directory that another process holds open: kept in memory until it is handed over."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specbench_ss.decoding.generation import Step
from specbench_ss.runs.ledger import Ledger
from specbench_ss.runs.rows import Key, Row, Sameness


@dataclass(slots=True)
class Parcel:
    """What was made since the last one: samples with their steps, verdicts, lines of optional files, warnings to keep.

    told: warnings, and what else whoever watches the run should hear.
    """

    samples: list[tuple[Row, list[Step]]] = field(default_factory=list)
    verdicts: list[Sameness] = field(default_factory=list)
    beside: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def commit(self, ledger: Ledger) -> list[str]:
        """Hand everything over, a sample behind its side lines and before what is said of it, as one process does.

        So a kill in between leaves no sample without them. Returns why lines could not be written.
        """
        problems = [ledger.append_beside(name, line) for name, line in self.beside]
        for row, steps in self.samples:
            ledger.append(row, steps)
        for verdict in self.verdicts:
            ledger.append_sameness(verdict)
        for text in self.warnings:
            ledger.keep_warning(text)
        return list(dict.fromkeys(problem for problem in problems if problem))


class Collected:
    """A `Ledger` in memory. path, manifest: of the run directory that it is for, which it does not touch."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path, self.manifest = path, manifest
        self.rows: dict[Key, Row] = {}
        self.judged: set[Key] = set()
        self.parcel = Parcel()

    def know(self, rows: Iterable[Row], judged: Iterable[Key]) -> None:
        """Forget all samples but these, which the run directory has already."""
        self.rows, self.judged = {row.key: row for row in rows}, set(judged)

    def append(self, row: Row, steps: Sequence[Step]) -> None:
        """Keep a sample."""
        self.parcel.samples.append((row, list(steps)))
        self.rows[row.key] = row

    def append_sameness(self, verdict: Sameness) -> None:
        """Keep a verdict."""
        self.parcel.verdicts.append(verdict)
        self.judged.add(verdict.key)

    def append_beside(self, name: str, line: dict[str, Any]) -> str:
        """Keep a line of an optional file, which cannot fail."""
        self.parcel.beside.append((name, line))
        return ""

    def update(self, **changes: Any) -> None:
        """Change this copy of the manifest alone."""
        self.manifest |= changes

    def keep_warning(self, text: str) -> None:
        """Keep a warning."""
        self.parcel.warnings.append(text)

    def handed_over(self) -> Parcel:
        """Return what was kept since this was last asked for."""
        parcel, self.parcel = self.parcel, Parcel()
        return parcel
