"""The time of day as manifests have it."""

from __future__ import annotations

from datetime import UTC, datetime


def now() -> str:
    """Return the current time in UTC, to the second, in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")
