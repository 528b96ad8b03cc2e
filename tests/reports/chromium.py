"""Headless Chromium for tests of pages: what is missing is the reason why they are skipped."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

EXTRA = "pip install -e '.[browser]'"
NAMES = ("chromium", "chromium-browser", "google-chrome")
GIVEN = os.environ.get("BROWSER_PATH")
CHROMIUM = next(filter(None, map(shutil.which, (GIVEN,) if GIVEN else NAMES)), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt-get install chromium")


@contextmanager
def browser() -> Iterator[Any]:
    """A browser without a sandbox, which a container does not let it have."""
    sync_api = pytest.importorskip("playwright.sync_api", reason=f"the package playwright is not installed: {EXTRA}")
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield running
        running.close()


class Watched:
    """A page that was opened from its file, with what went wrong in it and what it asked for."""

    def __init__(self, running: Any, path: Path, address: str = "", **options: Any) -> None:
        self.page = running.new_context(viewport={"width": 1280, "height": 900}, **options).new_page()
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.errors.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri() + address)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.page, name)
