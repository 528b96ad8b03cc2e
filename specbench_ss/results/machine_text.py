"""What a run recorded of the machine, in a few lines for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specbench_ss.results.machine import MachineRow

CLOSES = 0.02  # share of a step by which its parts, of another clock, may differ from it without a word


def machine_lines(rows: Sequence[MachineRow], manifest: Mapping[str, Any]) -> list[str]:
    """Return a line on each thing that is known: what the parts of a step leave, and limits reached.

    rows, manifest: of the run.
    """
    if manifest["config"].get("endpoints"):
        return []
    busy = ((manifest.get("machine") or {}).get("limits") or {}).get("busy", "")
    noted = [f"limits: too low, perhaps: when they were measured, {busy}"] if busy else []
    return [*_left(rows), *_limits(rows), *noted]


def _left(rows: Sequence[MachineRow]) -> list[str]:
    known = [row for row in rows if row.host_share is not None]
    if not known:
        return []
    most = max(known, key=lambda row: row.host_share or 0.0)
    share = f"{most.host_share or 0.0:.1%}"
    told = f"steps: what is neither drafting, verifying nor accepting takes at most {share} of a step "
    open_ = [row for row in known if abs(row.parts_residual or 0.0) > CLOSES]
    off = "; ".join(f"{row.method} {row.parts_residual or 0.0:+.1%}" for row in open_)
    rest = f"; beyond that, the parts and the step, two clocks, differ: {off}" if off else ""
    return [f"{told}({most.method}); tables call it host{rest}"]


def _limits(rows: Sequence[MachineRow]) -> list[str]:
    reached = [row for row in rows if row.bandwidth_share is not None and row.compute_share is not None]
    if not reached:
        return ["limits: not known here, so no share of them is told; `ssbench doctor --calibrate` measures them once"]
    parts = [f"{row.method} {row.bandwidth_share:.0%} and {row.compute_share:.1%}" for row in reached]
    return [f"limits: of memory bandwidth and of products, steps reached (counted from shapes): {'; '.join(parts)}"]
