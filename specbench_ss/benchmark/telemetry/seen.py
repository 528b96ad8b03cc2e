"""What was read during one sample, and its sums: means over time, differences of counters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

PLACES = 4  # digits kept after the point of a reading
MEANS = (  # columns whose mean over the sample becomes a field of its row
    "host_cpu_share", "host_foreign_share", "nvml_kernel_busy", "nvml_memory_busy", "nvml_sm_mhz", "nvml_power_w",
    "gpm_sm_active", "gpm_tensor_active", "gpm_dram_active",
)  # fmt: skip


class Seen:
    """The readings of one sample, column by column; None where a reading lacks a column.

    The first reading was made before the sample and the last one after it. Its shares are of the time before, so they
    are no part of a mean. problem: why a reading failed, or ''; a failed one has no column.
    """

    def __init__(self) -> None:
        self.times: list[float] = []
        self.columns: dict[str, list[float | None]] = {}
        self.core_shares: list[list[float | None]] = []
        self.problem = ""

    def add(self, when: float, reading: Mapping[str, float], core_share: Sequence[float] = ()) -> None:
        """Add a reading. when: Unix time. What is not finite counts as not read."""
        for name in reading:
            self.columns.setdefault(name, [None] * len(self.times))
        self.times.append(when)
        for name, column in self.columns.items():
            column.append(_finite(reading.get(name)))
        self.core_shares.append([_finite(share) for share in core_share])

    @property
    def span(self) -> float:
        """Return the seconds from the first reading to the last."""
        return self.times[-1] - self.times[0] if self.times else 0.0

    def within(self, name: str) -> list[float]:
        """Return what was read of a column after the sample had begun."""
        return [value for value in self.columns.get(name, [])[1:] if value is not None]

    def mean(self, name: str) -> float | None:
        """Return the mean over time: each reading stands for the time since the one before."""
        spans = [b - a for a, b in zip(self.times, self.times[1:], strict=False)]
        found = [
            (span, value)
            for span, value in zip(spans, self.columns.get(name, [])[1:], strict=False)
            if value is not None
        ]
        whole = sum(span for span, _ in found)
        return sum(span * value for span, value in found) / whole if whole > 0 else None

    def growth(self, name: str) -> float | None:
        """Return by how much a counter grew from the first reading to the last; None where one of the two lacks it."""
        first, *_, last = self.columns.get(name) or [None, None] if len(self.times) > 1 else [None, None]
        return last - first if first is not None and last is not None else None

    def summary(self, tokens: int) -> dict[str, Any]:
        """Return the fields of the sample's row. tokens: of its answer."""
        found: dict[str, Any] = {name: _rounded(self.mean(name)) for name in MEANS}
        faults, energy = self.growth("host_page_faults"), self.growth("nvml_energy_j")
        rss = self.within("host_rss_bytes")
        found["host_rss_bytes"] = int(max(rss)) if rss else None
        found["host_page_faults"] = None if faults is None else int(faults)
        found["energy_j"] = _rounded(energy)
        found["joules_per_token"] = _rounded(energy / tokens) if energy is not None and tokens else None
        return found

    def as_columns(self) -> dict[str, Any]:
        """Return the readings as JSON-ready data: `t_s` since the first one, then every column."""
        start = self.times[0] if self.times else 0.0
        shares = {name: [_rounded(value) for value in column] for name, column in self.columns.items()}
        cores = {"host_core_share": [[None if x is None else round(x, 2) for x in row] for row in self.core_shares]}
        return {"t_s": [round(t - start, PLACES) for t in self.times], **shares, **cores}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, PLACES)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
