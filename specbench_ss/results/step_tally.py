"""Counts and times over the steps of some samples. docs/metrics.md has the definitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specbench_ss.runs.rows import Row
from specbench_ss.runs.steps import DTYPES, Array, Steps

PARTS = ("draft_s", "verify_s", "accept_s", "host_s")


@dataclass(frozen=True, slots=True)
class Tally:
    """What the steps of some samples add up to.

    samples, steps: how many there are. sums: of each column, by name. reached: [depths, accepted + 1], how many steps
    drafted so deep and accepted so many. tau_of: tokens per step of each sample that has steps.
    """

    samples: int
    steps: int
    sums: dict[str, Any]
    reached: Array
    tau_of: Array
    draft_calls: int
    overshoot: int

    @property
    def tau(self) -> float | None:
        """Return all tokens that steps produced over all steps."""
        return self._per_step("tokens")

    @property
    def step_s(self) -> float | None:
        """Return the mean seconds of a step."""
        return self._per_step("total_s")

    def columns(self) -> dict[str, Any]:
        """Return the part of a SummaryRow that is computed from the steps alone."""
        step_s, parts = self.step_s, {name: self._per_step(name) for name in PARTS}
        at, at_n, given, given_n = self.acceptance()
        depth = self.sums["depth"]
        return {
            "tau_request_mean": float(self.tau_of.mean()) if len(self.tau_of) else None,
            "acceptance_rate": self.sums["accepted"] / depth if depth else None,
            "acceptance_at": at,
            "acceptance_at_n": at_n,
            "acceptance_given": given,
            "acceptance_given_n": given_n,
            "target_calls": self.steps / self.samples if self.samples else None,
            "draft_calls": self.draft_calls / self.samples if self.samples else None,
            "overshoot": self.overshoot,
            "step_s": step_s,
            **parts,
            "parts_residual_s": None if step_s is None else step_s - sum(v or 0.0 for v in parts.values()),
        }

    def acceptance(self) -> tuple[tuple[float, ...], tuple[int, ...], tuple[float, ...], tuple[int, ...]]:
        """Return (at, n of at, given, n of given) by draft position, as far as any draft reached."""
        at, at_n, given, given_n = [], [], [], []
        for position in range(1, len(self.reached)):
            of_accepted = self.reached[position:].sum(0)  # [accepted + 1], of the steps that drafted this position
            drafted, taken = int(of_accepted.sum()), int(of_accepted[position:].sum())
            at.append(taken / drafted)
            at_n.append(drafted)
            reached = int(of_accepted[position - 1 :].sum())
            if reached:
                given.append(taken / reached)
                given_n.append(reached)
        return tuple(at), tuple(at_n), tuple(given), tuple(given_n)

    def _per_step(self, name: str) -> float | None:
        return self.sums[name] / self.steps if self.steps else None


def tally(rows: Sequence[Row], steps: Steps) -> Tally:
    """Return the tally of these samples."""
    places = steps.places(row.key for row in rows)
    counts, totals = steps.counts[places], steps.totals.take(places)
    return Tally(
        samples=len(rows),
        steps=int(counts.sum()),
        sums={name: getattr(totals, name).sum().item() for name in DTYPES},
        reached=_reached(steps, places),
        tau_of=totals.tokens / counts,
        draft_calls=sum(row.draft_calls or 0 for row in rows),
        overshoot=sum(row.overshoot or 0 for row in rows),
    )


def _reached(steps: Steps, places: Array) -> Array:
    """Return how many steps drafted each depth and accepted each number: [depths + 1, accepted + 1]."""
    which = steps.steps_of(places)
    depth, accepted = steps.columns.depth[which], steps.columns.accepted[which]
    if not len(which):
        return np.zeros((1, 1), np.int64)
    wide = int(accepted.max()) + 1
    counted = np.bincount(depth.astype(np.int64) * wide + accepted, minlength=(int(depth.max()) + 1) * wide)
    return counted.reshape(-1, wide)
