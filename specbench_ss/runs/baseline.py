"""Which method of a run the others are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specbench_ss.method_spec import REFERENCE


def baseline_of(manifest: Mapping[str, Any]) -> str:
    """Return the label of the run's reference: plain decoding, or, of a run of served engines, its first endpoint."""
    return str(manifest.get("baseline") or REFERENCE)
