"""What a run recorded of the machine, in a few lines for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from specbench_ss.results.machine import MachineRow, machine_rows
from specbench_ss.runs.rows import Run

CLOSES = 0.02  # share of a step that its parts may leave unexplained


def machine_lines(run: Run) -> list[str]:
    """Return a line on each thing that is known: whether the parts of a step close, and limits reached."""
    rows = machine_rows(run)
    return [*_closing(rows), *_limits(rows)]


def _closing(rows: Sequence[MachineRow]) -> list[str]:
    known = [row for row in rows if row.parts_residual is not None]
    if not known:
        return []
    worst = max(known, key=lambda row: abs(row.parts_residual or 0.0))
    share = abs(worst.parts_residual or 0.0)
    said = "add up to the whole" if share <= CLOSES else "do NOT add up to the whole"
    return [
        f"steps: draft, verify, accept and host {said}; they leave at most {share:.1%} unexplained ({worst.method})"
    ]


def _limits(rows: Sequence[MachineRow]) -> list[str]:
    reached = [row for row in rows if row.bandwidth_share is not None and row.compute_share is not None]
    if not reached:
        return ["limits: not known here, so no share of them is told; `ssbench doctor --calibrate` measures them once"]
    parts = [f"{row.method} {row.bandwidth_share:.0%} and {row.compute_share:.1%}" for row in reached]
    return [f"limits: of memory bandwidth and of products, steps reached (counted from shapes): {'; '.join(parts)}"]
