"""The HTML report: one file that holds everything it shows. It opens from a disk and makes no network requests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specbench_ss import __version__
from specbench_ss.files.crash_safe import replacing
from specbench_ss.reports.html import acceptance, answers, assets, bars, health, machine, run_record, speed, timing
from specbench_ss.reports.html import experiment_page as of_experiment
from specbench_ss.reports.html.palette import styles
from specbench_ss.results import frames, verdict_text
from specbench_ss.results.experiment import Experiment, Result
from specbench_ss.results.finding import finding
from specbench_ss.results.machine import machine_rows
from specbench_ss.results.machine_text import machine_lines
from specbench_ss.results.quality import MARGIN
from specbench_ss.results.report import Report
from specbench_ss.results.run_health import checks
from specbench_ss.results.summary import OVERALL, summarise
from specbench_ss.runs.rows import Run


class HtmlReport(Report):
    """The report `html`."""

    name = "html"
    summary = "one self-contained page: speed, acceptance, time, answers, health"
    filename = "report.html"

    def write(self, run: Run, path: Path) -> None:
        """Write the page, whole or not at all."""
        _write(assets.render("report.html.jinja", page=page(run, self.quality_margin)), path)

    def write_result(self, experiment: Experiment, result: Result, facts: Mapping[str, str], path: Path) -> None:
        """Write the page of an experiment, whole or not at all."""
        _write(assets.render("experiment.html.jinja", page=of_experiment.page(experiment, result, facts)), path)


def _write(text: str, path: Path) -> None:
    with replacing(path) as file:
        file.write(text.encode())


def page(run: Run, quality_margin: float = MARGIN) -> dict[str, Any]:
    """Return everything that the template shows."""
    manifest, look = run.manifest, styles(run.labels)
    config = {**manifest["config"], "repeats": run.repeats}
    summaries = summarise(run, quality_margin)
    cells = speed.by_task(summaries)
    overall = {s.method: s for s in summaries if s.category == OVERALL}
    made, of_machine = checks(run, summaries), machine_rows(run)
    return {
        "title": f"{manifest['model']['name']} on {manifest['suite']['name']}",
        "version": __version__,
        "styles": list(look.values()),
        "chips": run_record.chips(run),
        "finding": finding(summaries, made),
        "alerts": health.alerts(made),
        "promised": verdict_text.PROMISED if manifest["config"]["temperature"] else "",
        "cards": speed.cards(cells, look, config),
        "matrix": speed.matrix(cells, look, config),
        "speedups": bars.speedups(cells, look),
        "everything": speed.everything(cells, look, config),
        "others": speed.others(cells, look),
        "acceptance": [acceptance.histogram(frames.tokens_per_step(run), look), acceptance.by_position(overall, look)],
        "time": timing.per_token(overall, look),
        "latency": timing.latency(overall, look),
        "steps": timing.decomposition(overall, frames.median_step_ms(run), look),
        "machine": [machine.counted(of_machine, look), machine.read(of_machine, look)],
        "machine_lines": machine_lines(of_machine, manifest),
        "examples": answers.examples(run, overall, look),
        "notices": health.notices(made),
        "differences": health.differences(run, overall),
        "sameness_note": health.sameness_note(run),
        "sameness": health.sameness(overall, look),
        "facts": run_record.facts(run),
    }
