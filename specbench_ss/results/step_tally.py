"""Counts and times over the steps of some samples. docs/metrics.md has the definitions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specbench_ss.decoding.generation import Step
from specbench_ss.runs.rows import Key, Row

PARTS = ("draft_s", "verify_s", "accept_s", "host_s")


@dataclass(frozen=True, slots=True)
class Tally:
    """What the steps of some samples add up to. tau_of: tokens per step of each sample that has steps."""

    samples: int
    steps: tuple[Step, ...]
    tau_of: tuple[float, ...]
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
        depth = sum(s.depth for s in self.steps)
        return {
            "tau_request_mean": sum(self.tau_of) / len(self.tau_of) if self.tau_of else None,
            "acceptance_rate": sum(s.accepted for s in self.steps) / depth if depth else None,
            "acceptance_at": at,
            "acceptance_at_n": at_n,
            "acceptance_given": given,
            "acceptance_given_n": given_n,
            "target_calls": len(self.steps) / self.samples if self.samples else None,
            "draft_calls": self.draft_calls / self.samples if self.samples else None,
            "overshoot": self.overshoot,
            "step_s": step_s,
            **parts,
            "parts_residual_s": None if step_s is None else step_s - sum(v or 0.0 for v in parts.values()),
        }

    def acceptance(self) -> tuple[tuple[float, ...], tuple[int, ...], tuple[float, ...], tuple[int, ...]]:
        """Return (at, n of at, given, n of given) by draft position, as far as any draft reached."""
        at, at_n, given, given_n = [], [], [], []
        for position in range(1, max((s.depth for s in self.steps), default=0) + 1):
            drafted = [s.accepted for s in self.steps if s.depth >= position]
            taken = sum(a >= position for a in drafted)
            at.append(taken / len(drafted))
            at_n.append(len(drafted))
            reached = sum(a >= position - 1 for a in drafted)
            if reached:
                given.append(taken / reached)
                given_n.append(reached)
        return tuple(at), tuple(at_n), tuple(given), tuple(given_n)

    def _per_step(self, name: str) -> float | None:
        return sum(getattr(s, name) for s in self.steps) / len(self.steps) if self.steps else None


def tally(rows: Sequence[Row], steps_by_sample: Mapping[Key, Sequence[Step]]) -> Tally:
    """Return the tally of these samples."""
    of_each = [steps_by_sample.get(row.key, ()) for row in rows]
    return Tally(
        samples=len(rows),
        steps=tuple(step for steps in of_each for step in steps),
        tau_of=tuple(sum(s.tokens for s in steps) / len(steps) for steps in of_each if steps),
        draft_calls=sum(row.draft_calls or 0 for row in rows),
        overshoot=sum(row.overshoot or 0 for row in rows),
    )
