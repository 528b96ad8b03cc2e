"""A level: the suite with several requests at a time, sent to a server or decoded side by side."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

from msgspec import Meta

Count = Annotated[int, Meta(ge=0, le=2**53)]
LevelKey = tuple[str, int, int]  # method, requests in flight, repeat


@dataclass(slots=True)
class Level:
    """The whole suite asked of one server or method, so many requests at a time.

    wall_s: from the first request to the end of the last answer. requests: how many were made. drafts, drafted,
    accepted: what the server's counters grew by meanwhile, None where that was not measured; of a method in this
    process its steps, and what these drafted and accepted. started, ended: Unix times.
    """

    method: str
    concurrency: Annotated[int, Meta(ge=1)]
    repeat: Count
    started: float
    ended: float
    wall_s: Annotated[float, Meta(ge=0)]
    requests: Count
    drafts: Count | None = None
    drafted: Count | None = None
    accepted: Count | None = None

    @property
    def key(self) -> LevelKey:
        """Return what makes the level unique in a run."""
        return (self.method, self.concurrency, self.repeat)

    def as_dict(self) -> dict[str, Any]:
        """Return the level as JSON-ready data."""
        return asdict(self)
