"""A server that is measured: where it is, and what it is called in the results. Nothing secret is part of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An OpenAI-compatible server.

    label: its name in the results. url: of its API, as `http://localhost:8000/v1`, without user and password. model:
    its name there; None is the only one that the server has.
    """

    label: str
    url: str
    model: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the endpoint as JSON-ready data."""
        return asdict(self)
