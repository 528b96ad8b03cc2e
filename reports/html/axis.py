"""Where a value lies on an axis, and which values are written at it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NICE = (1, 1.1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 7.5, 8, 9)  # times a power of ten: ticks of a logarithmic axis
APART = 0.12  # of the axis, between two ticks
APART_IN_PANELS = 0.3  # the same, where the axis is as narrow as a panel


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis from `low` to `high`, which differ; a logarithmic one has positive ends."""

    low: float
    high: float
    log: bool = False

    def at(self, value: float) -> float:
        """Return where the value lies, from 0 to 1; values beyond an end lie on it."""
        low, high, x = (math.log(v) if self.log else v for v in (self.low, self.high, self._inside(value)))
        return (x - low) / (high - low)

    def ticks(self, apart: float = APART) -> list[float]:
        """Return round values on the axis; of a logarithmic one 1 is among them, and they are not too close.

        apart: how far from each other they are at least, as a share of a logarithmic axis.
        """
        if not self.log:
            return self._round()
        chosen = [1.0] if self.low <= 1 <= self.high else []
        for value in sorted(self._round(), key=_roundness):
            if all(abs(self.at(value) - self.at(other)) >= apart for other in chosen):
                chosen.append(value)
        return sorted(chosen)

    def _inside(self, value: float) -> float:
        return min(max(value, self.low), self.high)

    def _round(self) -> list[float]:
        if not self.log:
            step = nice_step(self.high - self.low)
            return [n * step for n in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        return [x for p in powers for n in NICE if self.low <= (x := float(f"{n * 10.0**p:.6g}")) <= self.high]


def of_ratios(values: Iterable[float]) -> Axis:
    """Return a logarithmic axis that holds all the values and 1, with a little room."""
    held = [v for v in values if math.isfinite(v) and v > 0]
    return Axis(min([0.8, *held]) / 1.04, max([1.25, *held]) * 1.04, log=True)


def from_zero(values: Sequence[float]) -> Axis:
    """Return an axis from 0 to the largest value."""
    return Axis(0.0, max([*values, 0.0]) or 1.0)


def nice_step(length: float) -> float:
    """Return a round step that divides the length into four to ten."""
    power = 10.0 ** math.floor(math.log10(length))
    return next(n * power for n in (0.1, 0.2, 0.25, 0.5, 1) if length / (n * power) <= 10)


def _roundness(value: float) -> tuple[int, float]:
    """Sort rounder values first: those with fewer digits."""
    return len(f"{value:g}".replace("0", "").replace(".", "")), abs(math.log(value))
