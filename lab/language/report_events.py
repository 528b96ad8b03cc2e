"""Events that short reports tell of, with the sentences that tell and sum them up.

Slots every event may use: town, day, who, other, n (20-890), m (2-19), k (3-40), month, year.
"""

from __future__ import annotations

from dataclasses import dataclass

from lab.example import load


@dataclass(frozen=True, slots=True)
class Event:
    """A kind of event: the lead, the sentences that follow, summaries, what a second sentence of a
    summary may add, and the event's own lists of details."""

    name: str
    lead: str
    body: tuple[str, ...]
    summaries: tuple[str, ...]
    more: tuple[str, ...]
    lists: dict[str, tuple[str, ...]]


# Remarks that may stand anywhere in a report and never belong in its summary.
FILLERS = load("report_events.fillers", tuple[str, ...])

EVENTS = load("report_events.events", tuple[Event, ...])
