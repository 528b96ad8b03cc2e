"""Pictures of a run's report for the README, taken in real headless Chromium.

    pip install -e '.[browser]'; apt-get install chromium
    python benchmarks/pictures.py RUN [--out docs/images] [--replay "replay=ID.TURN&of=ss&against=ar&step=9"]

It writes report.png (the first screen) and replay.png (two answers side by side), from the page that `ssbench report`
makes of the run.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from specbench_ss.commands.report import write_report
from specbench_ss.runs.run_directory import read_run

WIDE, HIGH = 1180, 760  # pixels of the first screen


def chromium() -> str | None:
    """Return the path of an installed Chromium; None where playwright is to use its own."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def main() -> None:
    """Write the page, open it, take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--replay", default="", help="address of what is replayed; default: the first recorded answer")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = write_report(read_run(arguments.run), "html", Path(folder) / "report.html")
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDE, "height": HIGH}, color_scheme="light")
        page.goto(page_file.as_uri())
        page.screenshot(path=arguments.out / "report.png")
        take_replay(page, f"{page_file.as_uri()}#{arguments.replay}", arguments.out / "replay.png")
        browser.close()


def take_replay(page: Any, address: str, out: Path) -> None:
    """Take the picture of two answers, at the step that the address names or in the middle."""
    page.goto("about:blank")
    page.goto(address)
    stage = page.locator("#replay-stage")
    if "step=" not in address:
        stage.focus()
        for _ in range(8):
            page.keyboard.press("ArrowRight")
    stage.screenshot(path=out)


if __name__ == "__main__":
    main()
