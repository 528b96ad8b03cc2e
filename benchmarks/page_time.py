"""How long pages keep Chromium's main thread busy until they can be used.

    python benchmarks/page_time.py FILE.html...

Of each file: its size, the seconds of the main thread's tasks until a second after the page has loaded, and of these
the seconds of its scripts, layout and styles; the median of 5 fresh pages.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

from pictures import chromium
from playwright.sync_api import sync_playwright

FIGURES = ("TaskDuration", "ScriptDuration", "LayoutDuration", "RecalcStyleDuration")
PAGES = 5


def measured(browser: Any, path: Path) -> list[float]:
    """Open the page, and return Chromium's `FIGURES` in seconds."""
    page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.goto(path.resolve().as_uri())
    page.wait_for_timeout(1000)
    told = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
    page.context.close()
    return [told[name] for name in FIGURES]


def main() -> None:
    """Print a line for each file."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox", "--disable-gpu"])
        print(f"{'file':30} {'MB':>6} {'all, s':>8} {'scripts':>8} {'layout':>8} {'styles':>8}")
        for path in map(Path, sys.argv[1:]):
            middle = [
                statistics.median(one) for one in zip(*(measured(browser, path) for _ in range(PAGES)), strict=True)
            ]
            print(f"{path.name:30} {path.stat().st_size / 1e6:6.1f} {' '.join(f'{x:8.2f}' for x in middle)}")
        browser.close()


if __name__ == "__main__":
    main()
