"""How fast plain decoding may seem: methods that keep one token a step cannot be faster than the reference.

They are plain decodings of changed models, the reference a second time, and whatever drafted nothing. What their
intervals have above 1 is noise, and a method's lead that begins within it may be noise as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from specbench_ss.results.summary import SummaryRow


@dataclass(frozen=True, slots=True)
class Floor:
    """The highest speedup that the interval of such a method holds, and its name. It lies above 1."""

    method: str
    speedup: float

    def holds(self, row: SummaryRow) -> bool:
        """Say whether a method is called faster though its interval begins within the noise."""
        low = row.speedup_interval[0] if row.speedup_interval else 0.0
        return row.comparison == "faster" and not plain(row) and low <= self.speedup


def plain(row: SummaryRow) -> bool:
    """Say whether a method decodes as the reference does: it drafted nothing at all."""
    drafted = row.acceptance_rate is not None or any(row.acceptance_at_n)
    return row.comparison != "reference" and row.tau is not None and not drafted


def floor(overall: Iterable[SummaryRow]) -> Floor | None:
    """Return the noise that such methods show; None where there are none, or none reaches above 1.

    overall: the summaries over all tasks.
    """
    high = {row.method: row.speedup_interval[1] for row in overall if plain(row) and row.speedup_interval}
    most = max(high, key=lambda method: high[method], default=None)
    return Floor(most, high[most]) if most is not None and high[most] > 1 else None
