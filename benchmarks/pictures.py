"""Pictures of a report for the README, made in headless Chromium.

    python benchmarks/pictures.py runs/MY-RUN docs/images

writes report-light.png and report-dark.png, the first screen of the run's report. It takes Chromium and the extra
`browser`.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from specbench_ss.reports.html.report import HtmlReport
from specbench_ss.runs.run_directory import read_run

SIZE = {"width": 1280, "height": 1000}  # pixels


def shoot(page: Path, folder: Path) -> None:
    """Write a picture of the page in each theme."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for theme in ("light", "dark"):
            tab = browser.new_page(viewport=SIZE, color_scheme=theme)
            tab.goto(page.as_uri())
            tab.screenshot(path=folder / f"report-{theme}.png")
        browser.close()


def main() -> None:
    """Make the report, take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        HtmlReport().write(read_run(arguments.run), page)
        shoot(page, arguments.folder)


if __name__ == "__main__":
    main()
