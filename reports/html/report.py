"""HTML report: one self-contained file without network requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specbench_ss import __version__
from specbench_ss.reports import palette
from specbench_ss.reports.html import assets, health, machine, published, ranking, samples, speed, steps
from specbench_ss.reports.html import comparison_page as of_several
from specbench_ss.reports.html.page_parts import Cell, Chart, Column, Fact, Table, View
from specbench_ss.results import ranking as run_ranking
from specbench_ss.results.analysis import Budget, Results, budgets, scope_note, trained
from specbench_ss.results.cost_model import machine_lines, parts, roof_of, waterfalls
from specbench_ss.results.findings import STATES, Check, worst_first
from specbench_ss.results.report import Experiment, Grid, Plot, Report, Result
from specbench_ss.results.text import cut, format_speedup, percent, pluralize, visible
from specbench_ss.runs.records import Run
from specbench_ss.stats.intervals import FEWEST
from specbench_ss.storage import write_text

SCRIPTS = ("page.js", "charts.js", "tables.js", "explorer.js", "scatter.js", "replay.js", "what-if.js")
NOT_SHOWN = ("n counts", run_ranking.NO_MEAN)  # the ranking has neither n nor quality
SHOWN = 3  # checks on the first screen
RANKS = (
    "A rank such as 1–3 is open: the order of two methods counts if the interval of their ratio, paired by question, "
    "excludes 1. These intervals hold for all pairs together in 95% of runs."
)
ABSENT = {  # parts of the page -> how to record them
    "matrix": f"Results by task: at least {FEWEST} questions per task (`--limit {FEWEST}`).",
    "roofline": "Roofline and what-if: `ssbench doctor --calibrate` before the run.",
    "timeline": "Kernel timeline: `ssbench run --trace`.",
    "replay": "Replay: `ssbench run --record-drafts first`.",
}


class HtmlReport(Report):
    """The report `html`."""

    name = "html"
    summary = "one self-contained page: ranking, tasks, acceptance, time, every sample, details"
    filename = "report.html"
    filename_of_several = "comparison.html"

    def write(self, results: Results, path: Path) -> None:
        """Write the page, whole or not at all."""
        write_text(path, assets.render("report.html.jinja", scripts(SCRIPTS), page=page(results)))

    def write_runs(self, runs: Sequence[Results], path: Path) -> None:
        """Write the page of several runs, whole or not at all."""
        made = of_several.page(runs)
        write_text(path, assets.render("comparison.html.jinja", scripts(SCRIPTS[:3]), page=made))

    def write_result(self, experiment: Experiment, result: Result, facts: Mapping[str, str], path: Path) -> None:
        """Write the page of an experiment, whole or not at all."""
        made = _experiment_page(experiment, result, facts)
        write_text(path, assets.render("experiment.html.jinja", scripts(SCRIPTS[1:3], bool(made["charts"])), page=made))


def scripts(names: Sequence[str], charts: bool = True) -> list[str]:
    """Return the scripts of a page, Plotly first where it has charts."""
    return [*([assets.plotly_js()] if charts else []), assets.joined(names)]


def view_of(results: Results) -> View:
    """Return a run as the sections of its page take it."""
    run = results.run
    overall = {row.method: row for row in run_ranking.by_speed(results.overall)}
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
    alerts, rows = [check for check in worst_first(results.checks) if check.is_alert], machine.rows_of(view)
    had = budgets(run, [] if view.served else view.contestants)
    accepted = (steps.histogram(view), steps.by_position(view), steps.along_the_answer(view))
    drafts, found = samples.recorded(run), waterfalls(results.pairs)
    stairs = [found[label] for label in view.contestants if label in found]
    made = {
        "title": f"{manifest['model']['name']} on {manifest['suite']['name']}",
        "version": __version__,
        "baseline": visible(run.baseline),
        "servers": machine.servers(view),
        "in_flight": machine.in_flight(view),
        "draft_schedule": machine.draft_schedule(view),
        "styles": list(view.look.values()),
        "definitions": palette.symbols(),
        "chips": health.chips(run),
        "headline": _abbreviated(results.headline, view),
        "alerts": alerts[:SHOWN],
        "more_alerts": alerts[SHOWN:],
        "counts": _counted(results.checks),
        "ranking": ranking.ranking(view, axis, had),
        "axis": [(f"{tick:g}×", axis.at(tick)) for tick in axis.ticks],
        "prefill": _prefill(run),
        "how": _how_computed(view, had),
        "abbreviated": [style for style in view.look.values() if style.name != visible(style.label)],
        "pareto": steps.pareto(view),
        "matrix": speed.matrix(view),
        "acceptance": [chart for chart in accepted if chart],
        "time": steps.time_per_token(view),
        "waterfalls": steps.waterfall_choices(view, stairs),
        "waterfall_table": steps.waterfall_table(view, stairs) if stairs else None,
        "latency": steps.latency(view),
        "steps": steps.decomposition(view),
        "samples": samples.samples(view),
        "replay": samples.replay(view, drafts),
        "kinds": samples.kinds(view, drafts),
        "budgets": ranking.budgets_table(view, had),
        "scope": "" if view.served else scope_note(run, had),
        "everything": speed.everything(view),
        "machine": machine.tables(view, rows),
        "machine_lines": machine_lines(rows, manifest),
        "roofline": machine.roofline(view),
        "timeline": machine.timeline(view),
        "what_if": _what_if(view),
        "published": health.published(view),
        "published_2026": published.table(view),
        "checks": results.checks,
        "differences": health.differences(view),
        "output_match_note": health.output_match_note(view),
        "output_match": health.output_match(view),
        "facts": health.facts(run),
    }
    return made | {"absent": [] if view.served else _absent(made, several=len(run.categories) > 1)}


def _abbreviated(text: str, view: View) -> str:
    """Return a text with long labels abbreviated."""
    for style in view.look.values():
        if style.name != visible(style.label):
            text = text.replace(style.label, style.name).replace(cut(style.label), style.name)
    return text


def _absent(made: Mapping[str, Any], several: bool) -> list[str]:
    """Return how to record the parts that the page lacks. several: the run has more than one task."""
    return [text for name, text in ABSENT.items() if not made[name] and (several or name != "matrix")]


def _how_computed(view: View, had: Sequence[Budget]) -> list[str]:
    """Return how speedup, interval and rank are computed, and what the marks of the ranking mean."""
    rows = list(view.overall.values())
    notes = run_ranking.notes(rows, view.results.config, short=True)
    open_ranks = any(found.best != found.worst for found in view.results.rank_ranges.values())
    return [
        f"Speedup: time per token of {view.run.baseline} / of the method, prefill included; times and tokens are "
        "summed over all prompts before the division.",
        *_specbench(view),
        "Speedup = τ / relative step time × a factor for prefill, the first token and unequal output lengths.",
        "Intervals are Student's t over questions, within tasks, and 1% wider on each side for effects that are "
        f"constant within a process{' (2% for two servers)' * view.run.served}"
        f"{'; one repeat' * (view.run.repeats == 1)}.",
        *([RANKS] if open_ranks else []),
        *(note for note in notes if not note.startswith(NOT_SHOWN)),
        *_unlike(view),
        *filter(None, [trained(had)]),
    ]


def _specbench(view: View) -> list[str]:
    best = next((row for row in view.overall.values() if row.speedup), None)
    if best is None or best.method == view.run.baseline or best.speedup_specbench is None:
        return []
    value = format_speedup(best.speedup_specbench)
    return [f"Spec-Bench's formula, which weighs all questions equally, gives {value} for {best.method}."]


def _prefill(run: Run) -> str:
    """Return the share of prefill in the baseline's time; '' if it was not measured."""
    rows = [row for row in run.rows if row.ok and row.method == run.baseline]
    known = [(row.prefill_s, row.wall_s) for row in rows if row.wall_s and row.prefill_s is not None]
    return percent(sum(prefill for prefill, _ in known) / sum(wall for _, wall in known)) if known else ""


def _unlike(view: View) -> list[str]:
    """Return a note if the methods have different numbers of prompts, as in a run that is not complete."""
    counts = [row.n_prompts for row in view.overall.values() if row.comparison != "baseline"]
    if not counts or min(counts) == max(counts):
        return []
    return [f"The methods were compared on different numbers of prompts: {min(counts):,} to {max(counts):,}."]


def _what_if(view: View) -> list[dict[str, Any]]:
    """Return the measured parts of every method's step, and of the baseline's on the same prompts, for predictions."""
    found = parts(view.results.pairs, roof_of(view.run))
    return [
        asdict(found[label][0])
        | {"method": visible(label), "baseline": asdict(found[label][1])}
        | {"css": view.look[label].css, "symbol": view.look[label].symbol, "name": view.look[label].name}
        for label in view.contestants
        if label in found and label != view.run.baseline
    ]


def _counted(made: Sequence[Check]) -> list[tuple[str, str]]:
    """Return the number of checks by state, the worst first, as (state, '2 warnings')."""
    counts = Counter(check.state for check in made)
    return [
        (state, pluralize(counts[state], state) if state == "warning" else f"{counts[state]} {state}")
        for state in STATES
        if counts[state]
    ]


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
    rows = [[Cell(c.text(value), value) for value, c in zip(row, grid.columns, strict=True)] for row in grid.rows]
    return Table(name, columns, rows, grid.caption)
