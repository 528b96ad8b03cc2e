"""The HTML report: one file that holds everything it shows. It opens from a disk and makes no network requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specbench_ss import __version__
from specbench_ss.reports import palette
from specbench_ss.reports.html import assets, health, machine, ranking, samples, speed, steps
from specbench_ss.reports.html import comparison_page as of_several
from specbench_ss.reports.html.page_parts import Cell, Chart, Column, Fact, Notice, Table, View
from specbench_ss.results import ranking as verdict_text
from specbench_ss.results.analysis import Results, scope_note, trained
from specbench_ss.results.analysis import budgets as what_each_had
from specbench_ss.results.checks import worst_first
from specbench_ss.results.cost_model import parts, roof_of, waterfalls
from specbench_ss.results.report import Experiment, Grid, Plot, Report, Result
from specbench_ss.results.summary import OVERALL, SummaryRow
from specbench_ss.results.terminal import cell, machine_lines
from specbench_ss.results.text import format_speedup, percent, visible
from specbench_ss.runs.records import Run
from specbench_ss.storage import replacing

SCRIPTS = ("page.js", "charts.js", "tables.js", "explorer.js", "scatter.js", "replay.js", "what-if.js")
NOT_SHOWN = ("n counts", verdict_text.NO_MEAN)  # the ranking has neither n nor quality
PRINTED = 7  # sentences of the printed page
HEALTH = (("error", "wrong"), ("warning", "to beware of"), ("unknown", "not checked"), ("ok", "fine"))


class HtmlReport(Report):
    """The report `html`."""

    name = "html"
    summary = "one self-contained page: ranking, causes, tasks, time, every sample, health"
    filename = "report.html"
    filename_of_several = "comparison.html"

    def write(self, results: Results, path: Path) -> None:
        """Write the page, whole or not at all."""
        _write(assets.render("report.html.jinja", scripts(SCRIPTS), page=page(results)), path)

    def write_runs(self, runs: Sequence[Results], path: Path) -> None:
        """Write the page of several runs, whole or not at all."""
        made = of_several.page(runs)
        _write(assets.render("comparison.html.jinja", scripts(SCRIPTS[:3]), page=made), path)

    def write_result(self, experiment: Experiment, result: Result, facts: Mapping[str, str], path: Path) -> None:
        """Write the page of an experiment, whole or not at all."""
        made = _experiment_page(experiment, result, facts)
        _write(assets.render("experiment.html.jinja", scripts(SCRIPTS[1:3], bool(made["charts"])), page=made), path)


def scripts(names: Sequence[str], charts: bool = True) -> list[str]:
    """Return the scripts of a page, Plotly first where it has charts."""
    return [*([assets.plotly_js()] if charts else []), assets.joined(names)]


def _write(text: str, path: Path) -> None:
    with replacing(path) as file:
        file.write(text.encode())


def view_of(results: Results) -> View:
    """Return a run as the sections of its page take it."""
    run = results.run
    overall = {row.method: row for row in sorted(results.overall, key=lambda row: -(row.speedup or 0.0))}
    controls = ranking.controls(overall)
    drawn = palette.styles(run.labels, controls, run.baseline)
    look = {label: drawn[label] for label in overall}
    folded = {row.reference for row in overall.values() if row.method not in controls} & controls
    contestants = [label for label in overall if label not in folded]
    contestants.sort(key=lambda label: label in controls)
    return View(results, look, overall, contestants)


def page(results: Results) -> dict[str, Any]:
    """Return everything that the template shows."""
    run, manifest, view = results.run, results.manifest, view_of(results)
    axis = ranking.axis_of(view.overall.values())
    ranked = ranking.ranking(view, axis)
    notes = [*verdict_text.notes(list(view.overall.values()), results.config, short=True), *_unlike(view)]
    notices, rows = health.notices(results.checks), machine.rows_of(view)
    had = what_each_had(run, [] if view.served else view.contestants)
    drafts = samples.recorded(run)
    return {
        "title": f"{manifest['model']['name']} on {manifest['suite']['name']}",
        "version": __version__,
        "baseline": visible(run.baseline),
        "servers": machine.servers(view),
        "in_flight": machine.in_flight(view),
        "styles": list(view.look.values()),
        "definitions": palette.symbols(),
        "chips": health.chips(run),
        "finding": results.headline,
        "alerts": health.notices(worst_first(results.checks)),  # nothing in a good run
        "health": _counted(notices),
        "promised": verdict_text.PROMISED if manifest["config"]["temperature"] else "",
        "ranking": ranked,
        "legend": ranking.legend(ranked),
        "weighting": _weighting(view),
        "prefill": _prefill(run),
        "axis": [(f"{tick:g}×", axis.at(tick)) for tick in axis.ticks],
        "ranking_notes": [note for note in notes if not note.startswith(NOT_SHOWN)],
        **_why(view),
        "budgets": ranking.budgets_table(view, had),
        "trained": trained(had),
        "scope": "" if view.served else scope_note(run, had),
        "matrix": speed.matrix(view),
        "of_a_task": _of_a_task(results.rows),
        "speedups": speed.chart(view),
        "everything": speed.everything(view),
        "others": speed.others(view),
        "others_title": speed.others_title(view),
        "acceptance": [steps.histogram(view), steps.by_position(view)],
        "time": steps.times(view),
        "latency": steps.latency(view),
        "steps": steps.decomposition(view),
        "machine": machine.tables(view, rows),
        "machine_lines": machine_lines(rows, manifest),
        "samples": samples.samples(view),
        "replay": samples.replay(view, drafts),
        "kinds": samples.kinds(view, drafts),
        "what_if": _what_if(view),
        "roofline": machine.roofline(view),
        "timeline": machine.timeline(view),
        "published": health.published_beside(view),
        "notices": notices,
        "differences": health.differences(view),
        "output_match_note": health.output_match_note(view),
        "sameness": health.output_match(view),
        "facts": health.facts(run),
    }


def _weighting(view: View) -> str:
    """Say how prompts are weighted, and what Spec-Bench's formula makes of the fastest method."""
    best = next((row for row in view.overall.values() if row.speedup), None)
    if best is None or best.method == view.run.baseline:
        return ""
    said = "A prompt weighs as much as it takes: times of all prompts are added up before they are divided."
    if best.speedup_specbench is None:
        return said
    return (
        f"{said} Spec-Bench's formula, in which all questions weigh the same, gives "
        f"{format_speedup(best.speedup_specbench)} "
        f"for {best.method}; By task has it, and the geometric mean, for every method."
    )


def _prefill(run: Run) -> str:
    """Return which share of the reference's time the reading of prompts takes; '' where that is not known."""
    rows = [row for row in run.rows if row.ok and row.method == run.baseline]
    known = [(row.prefill_s, row.wall_s) for row in rows if row.wall_s and row.prefill_s is not None]
    return percent(sum(prefill for prefill, _ in known) / sum(wall for _, wall in known)) if known else ""


def _unlike(view: View) -> list[str]:
    """Say where the methods were not compared on the same prompts, as in a run that is not complete."""
    counts = [row.n_prompts for row in view.overall.values() if row.comparison != "reference"]
    if not counts or min(counts) == max(counts):
        return []
    return [f"Not every method was compared on the same prompts: {min(counts):,} to {max(counts):,} of them"]


def _why(view: View) -> dict[str, Any]:
    by_label = waterfalls(view.results.pairs)
    found = [by_label[label] for label in view.contestants if label in by_label]
    room = max(1, 7 - len(found) // 4)  # below the table, which has a row for each method
    sentences = [one.sentence() for one in found[: min(PRINTED, room)]]
    printed = steps.waterfall_table(view, found, "why-printed")
    return {"why": steps.why(view, found), "why_printed": printed, "sentences": sentences}


def _what_if(view: View) -> list[dict[str, Any]]:
    """Return the measured parts of every method's step, and of the reference's on the same prompts, for predictions."""
    found = parts(view.results.pairs, roof_of(view.run))
    return [
        asdict(found[label][0])
        | {"method": visible(label), "plain": asdict(found[label][1])}
        | {"css": view.look[label].css, "symbol": view.look[label].symbol}
        for label in view.contestants
        if label in found and label != view.run.baseline
    ]


def _of_a_task(summaries: Sequence[SummaryRow]) -> str:
    """Return how many questions a task has, as '4' or '1 to 20'."""
    counts = sorted(
        {row.n_questions for row in summaries if row.category != OVERALL and row.comparison != "reference"} - {0}
    )
    return "" if not counts else f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"


def _counted(notices: Sequence[Notice]) -> list[tuple[str, str]]:
    """Return how many checks ended how, the worst first, as (level, '2 to beware of')."""
    counts = Counter(notice.level for notice in notices)
    return [(level, f"{counts[level]} {word}") for level, word in HEALTH if counts[level]]


def _experiment_page(experiment: Experiment, result: Result, facts: Mapping[str, str]) -> dict[str, Any]:
    """Return everything that the template shows. Charts whose library is not there are their tables alone."""
    drawn = [plot.grid for plot in result.plots]
    return {
        "title": experiment.title,
        "source": experiment.source,
        "version": __version__,
        "charts": [_chart(plot) for plot in result.plots],
        "tables": [_table(grid, grid.name) for grid in result.grids if grid not in drawn],
        "lines": result.lines,
        "notes": result.notes,
        "facts": [Fact(name, value, name == "command") for name, value in facts.items()],
    }


def _chart(plot: Plot) -> Chart:
    drawn = {"data": plot.data, "layout": plot.layout}
    return Chart(plot.name, plot.title, drawn, _table(plot.grid, plot.name), plot.note, label=plot.label)


def _table(grid: Grid, name: str) -> Table:
    columns = [Column(column.title, numeric=column.form != "text") for column in grid.columns]
    rows = [[Cell(cell(value, c), value) for value, c in zip(row, grid.columns, strict=True)] for row in grid.rows]
    return Table(name, columns, rows, grid.caption)
