"""The HTML report: one file that holds everything it shows, opens from a disk and asks no host for anything."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from specbench_ss import __version__, stats
from specbench_ss.report import Report
from specbench_ss.reports import acceptance, answers, assets, frames, health, record, speed, timing
from specbench_ss.reports.palette import styles
from specbench_ss.rows import Run


class HtmlReport(Report):
    """`html`."""

    name = "html"
    summary = "one self-contained page: speed, acceptance, time, answers, health"
    filename = "report.html"

    def write(self, run: Run, path: Path) -> None:
        """Write the page, whole or not at all."""
        text = assets.render("report.html.jinja", page=page(run))
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(text, encoding="utf-8", newline="\n")
        os.replace(temporary, path)


def page(run: Run) -> dict[str, Any]:
    """Everything that the template shows."""
    manifest, look = run.manifest, styles(run.labels)
    cells = speed.by_task(stats.summarise(run))
    samples, steps = frames.samples(run), frames.steps(run)
    impossible, unstable = stats.impossible(run), stats.unstable(run)
    return {
        "title": f"{manifest['model']['name']} on {manifest['suite']['name']}",
        "version": __version__,
        "styles": list(look.values()),
        "chips": record.chips(run),
        "alerts": health.alerts(run, impossible),
        "cards": speed.cards(cells, look),
        "matrix": speed.matrix(cells, look),
        "speedups": speed.bars(cells, look),
        "everything": speed.everything(cells, look),
        "acceptance": acceptance.charts(steps, look),
        "time": timing.per_token(samples, steps, look),
        "steps": timing.decomposition(steps, look),
        "examples": answers.examples(run, look),
        "notices": health.notices(run, impossible, unstable),
        "sameness_note": health.sameness_note(run),
        "sameness": health.sameness(run, look),
        "facts": record.facts(run),
    }
