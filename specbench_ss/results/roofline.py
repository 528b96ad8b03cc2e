"""What verifying and drafting do a second against what they do a byte, under the machine's measured limits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from specbench_ss.number_formats import arithmetic
from specbench_ss.results.work import Pair
from specbench_ss.runs.rows import Run


@dataclass(frozen=True, slots=True)
class Roof:
    """The machine's limits: bytes read a second, and floating-point operations a second in the model's dtype."""

    read: float
    products: float

    @property
    def ridge(self) -> float:
        """Return the operations a byte from where products are the limit."""
        return self.products / self.read

    def at(self, intensity: float) -> float:
        """Return the most operations a second with so many operations a byte."""
        return min(self.products, self.read * intensity)


@dataclass(frozen=True, slots=True)
class Point:
    """A part of a method's steps, `verifying` or `drafting`. intensity: operations a byte. rate: operations a second.

    Both are counted from shapes; the seconds are the measured ones of that part.
    """

    method: str
    part: str
    intensity: float
    rate: float


def roof_of(run: Run) -> Roof | None:
    """Return the limits of the machine that the run was made on; None where they were not measured."""
    limits = (run.manifest.get("machine") or {}).get("limits") or {}
    read, products = (
        limits.get("read_bytes_per_s"),
        (limits.get("flops_per_s") or {}).get(arithmetic(run.manifest["model"]["dtype"])),
    )
    return Roof(read, products) if read and products else None


def points(pairs: Iterable[Pair]) -> list[Point]:
    """Return the parts of every method that could be counted; drafting only where a drafter has weights."""
    found = []
    for work in (pair.own for pair in pairs):
        cost, took = work.cost, work.tally.sums
        if cost is None:
            continue
        drafted = cost.drafter_bytes or 0.0
        parts = {
            "verifying": (cost.flops - cost.drafter_flops, cost.bytes - drafted, took["verify_s"]),
            "drafting": (cost.drafter_flops, drafted, took["draft_s"]),
        }
        found += [
            Point(work.method, part, flops / moved, flops / seconds)
            for part, (flops, moved, seconds) in parts.items()
            if flops and moved and seconds
        ]
    return found
