"""`compare` of the public API: what changed between two run directories, as frames."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from specbench_ss.errors import UserError
from specbench_ss.results.columns import COMPARISON, DIFFERENCES
from specbench_ss.results.comparison import as_record, compared
from specbench_ss.results.frames import frame
from specbench_ss.results.run_health import checks
from specbench_ss.results.run_results import RunResults
from specbench_ss.results.summary import summarise
from specbench_ss.runs.environment import between_sessions
from specbench_ss.runs.rows import Run
from specbench_ss.runs.run_directory import read_run

OF_TIMES = ("unstable", "disturbed")  # warnings of a run that concern its times


class RunComparison:
    """Two runs and what changed from `a` to `b`; `compare` returns it.

    warnings: what there is to know before the numbers are believed, a sentence each.
    """

    def __init__(self, a: Run, b: Run, anyway: bool = False) -> None:
        self.a, self.b = a.path, b.path
        self.found, self.rows = compared(a, b, anyway)
        self.warnings = tuple(f"run {name}: {said}" for name, run in (("A", a), ("B", b)) for said in _doubts(run))

    def __repr__(self) -> str:
        return f"<comparison of {self.a} and {self.b}: {len(self.found)} differences in configuration>"

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row for each task and method, `overall` first, with every figure in both runs and its change."""
        return frame(COMPARISON, map(as_record, self.rows), lambda record, name: record[name])

    @cached_property
    def differences(self) -> pd.DataFrame:
        """One row for each thing in which the configurations differ: what, a, b, and whether it hinders comparing."""
        return frame(DIFFERENCES, self.found, getattr)


def _doubts(run: Run) -> list[str]:
    """Return what is wrong with a run's results, and whether its own times compare."""
    changed = ", ".join(between_sessions(run.manifest))
    made = checks(run, summarise(run))
    wrong = [c.sentence for c in made if c.state == "wrong" or (c.state == "warning" and c.name in OF_TIMES)]
    return wrong + ([f"Not all sessions had the same {changed}: their times do not compare."] if changed else [])


def compare(run_a: str | Path | RunResults, run_b: str | Path | RunResults, *, anyway: bool = False) -> RunComparison:
    """Compare two runs of the same questions by the same model: run directories, or what `load_run` returned.

    anyway: compare runs of another model, other questions or another way of decoding too. Raises UserError where the
    runs do not compare, and where they have no method or question in common.
    """
    return RunComparison(_run(run_a), _run(run_b), anyway)


def _run(given: Any) -> Run:
    if not isinstance(given, str | Path | RunResults):
        raise UserError(f"compare takes run directories, or what load_run returned, not {given!r}")
    return read_run(given.path if isinstance(given, RunResults) else Path(given).expanduser())
