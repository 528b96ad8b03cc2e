"""What the steps of one method added up to, beside those of the reference on the same prompts.

Everything that is told of steps and shapes over all tasks comes from here, so that it is of the same samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specbench_ss.results.counted_cost import Cost, counted
from specbench_ss.results.paired_times import paired
from specbench_ss.results.step_tally import Tally, tally
from specbench_ss.runs.keys import Key
from specbench_ss.runs.rows import Row, Run


@dataclass(frozen=True, slots=True)
class Work:
    """One method's samples. cost: from shapes, where these are known."""

    method: str
    rows: Sequence[Row]
    tally: Tally
    cost: Cost | None

    @property
    def nodes(self) -> float:
        """Return the drafted nodes that a step verified; 0 without a step."""
        return sum(row.verified or 0 for row in self.rows) / max(self.tally.steps, 1)


@dataclass(frozen=True, slots=True)
class Pair:
    """A method and the reference over the samples that both answered."""

    own: Work
    plain: Work


def pairs(run: Run) -> list[Pair]:
    """Return a pair for each method, in the order in which the methods were asked for; the reference's is of itself."""
    rows = {label: [row for row in run.rows if row.method == label] for label in run.labels}
    plains: dict[frozenset[Key], Work] = {}  # the reference's, by its samples: one, where no method failed
    found = []
    for label in run.labels:
        own, ref = paired(rows[label], rows.get(run.baseline, []))
        same = frozenset(row.key for row in ref)
        if same not in plains:
            plains[same] = _work(run, run.baseline, ref)
        found.append(Pair(plains[same] if label == run.baseline else _work(run, label, own), plains[same]))
    return found


def _work(run: Run, label: str, rows: Sequence[Row]) -> Work:
    shapes: Mapping[str, Any] = (run.manifest.get("machine") or {}).get("shapes") or {}
    cost = counted(rows, shapes[label]) if shapes.get(label) else None
    return Work(label, rows, tally(rows, run.steps), cost)
