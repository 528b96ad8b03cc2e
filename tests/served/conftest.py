"""Shorter waits for the tests of servers."""

from __future__ import annotations

import functools
import ssl
from collections.abc import Iterator

import pytest

from specbench_ss.bench import server_launch


@pytest.fixture(autouse=True, scope="session")
def certificates() -> Iterator[None]:
    """Read the trusted certificates once: every client reads them, which takes longer than its requests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        yield


@pytest.fixture(autouse=True)
def quick_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at starting and ending servers more often than at real ones, which take seconds to start."""
    monkeypatch.setattr(server_launch, "POLL_S", 0.01)
