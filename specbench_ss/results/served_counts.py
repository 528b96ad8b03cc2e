"""Acceptance of served engines, from what they count themselves. docs/metrics.md has the definitions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from specbench_ss.results.paired_times import over
from specbench_ss.runs.rows import Row


class Counted(Protocol):
    """Whatever has a server's counts: a sample, or a level."""

    drafts: int | None
    drafted: int | None
    accepted: int | None


def served_columns(rows: Sequence[Row]) -> dict[str, Any]:
    """Return what replaces the counts of steps in a summary of samples that a server made; nothing for others."""
    if not any(row.counted for row in rows):
        return {}
    later = sum((row.tokens or 0) - (row.prefill_tokens or 0) for row in rows)
    return {
        "tau": served_tau(rows, later),
        "acceptance_rate": over(counted(rows, "accepted"), counted(rows, "drafted")),
        "target_calls": None,
        "draft_calls": None,
        "overshoot": None,
    }


def counted(of: Sequence[Counted], name: str) -> int | None:
    """Return the sum of a count; None where one of them was not measured."""
    values = [getattr(one, name) for one in of]
    return None if not values or None in values else sum(values)


def served_tau(of: Sequence[Counted], later: int) -> float | None:
    """Return tokens per step: 1 + accepted / drafts, of the steps that had a draft.

    Where the server does not count drafts: all tokens after the first of each answer (later) over those of them that no
    draft brought, one a step.
    """
    drafts, accepted = counted(of, "drafts"), counted(of, "accepted")
    if accepted is None or drafts == 0:
        return None
    if drafts is not None:
        return 1 + accepted / drafts
    return over(later, later - accepted) if later > accepted else None
