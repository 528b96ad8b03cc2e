"""The package `speculators`, with which drafters of its layout are compared, where it is installed."""

from __future__ import annotations

from typing import Any

import pytest

MISSING = "the package speculators is not installed: pip install --no-deps -r tests/oracles.txt"


def speculators(module: str) -> Any:
    """One of its modules, as `models.eagle3`; where it or what it imports is not there, the test is skipped."""
    pytest.importorskip("loguru", reason=MISSING)  # which it imports late, in the middle of a test
    return pytest.importorskip(f"speculators.{module}", reason=MISSING)
