"""The HTML report: one file that holds everything it shows. It opens from a disk and makes no network requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specbench_ss import __version__
from specbench_ss.reports import palette
from specbench_ss.reports.html import (
    assets,
    health,
    machine,
    ranking,
    samples,
    speed,
    steps,
)
from specbench_ss.reports.html import comparison_page as of_several
from specbench_ss.reports.html import experiment_page as of_experiment
from specbench_ss.reports.html.page_parts import Chart, Notice, visible
from specbench_ss.results import cost_model, frames
from specbench_ss.results import ranking as verdict_text
from specbench_ss.results.analysis import Results, sources, told_scope, trained
from specbench_ss.results.analysis import budgets as what_each_had
from specbench_ss.results.checks import Check, often_disturbed
from specbench_ss.results.cost_model import MachineRow, Pair, points, roof_of, waterfalls
from specbench_ss.results.ranking import Standing
from specbench_ss.results.report import Experiment, Report, Result
from specbench_ss.results.summary import OVERALL, SummaryRow
from specbench_ss.results.terminal import machine_lines
from specbench_ss.results.text import percent, times
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
        made = of_experiment.page(experiment, result, facts)
        _write(assets.render("experiment.html.jinja", scripts(SCRIPTS[1:3], bool(made["charts"])), page=made), path)


def scripts(names: Sequence[str], charts: bool = True) -> list[str]:
    """Return the scripts of a page, Plotly first where it has charts."""
    return [*([assets.plotly_js()] if charts else []), assets.joined(names)]


def _write(text: str, path: Path) -> None:
    with replacing(path) as file:
        file.write(text.encode())


def page(results: Results) -> dict[str, Any]:
    """Return everything that the template shows."""
    run, manifest, config, summaries = results.run, results.manifest, results.config, results.rows
    cells = speed.by_task(summaries)
    found = {s.method: s for s in summaries if s.category == OVERALL}
    ranked = ranking.order(found)
    overall = {label: found[label] for label in ranked}
    drawn = palette.styles(run.labels, ranking.controls(overall), run.baseline)
    look = {label: drawn[label] for label in ranked}
    made = results.checks
    worked = results.pairs
    made_steps = {pair.own.method: pair.own.tally.steps for pair in worked}
    placed = results.standings
    notices, first = health.notices(made), _first_screen(run, overall, look, config, placed, made)
    contestants = [row.label for row in first["ranking"]]
    had = what_each_had(run, [] if config.get("endpoints") else contestants)
    return {
        "title": f"{manifest['model']['name']} on {manifest['suite']['name']}",
        "version": __version__,
        "baseline": visible(run.baseline),
        "servers": machine.servers(run, overall, look),
        "in_flight": machine.in_flight(run, look),
        "styles": list(look.values()),
        "definitions": palette.symbols(),
        "chips": health.chips(run),
        "finding": results.headline,
        "alerts": health.alerts(made),
        "health": _counted(notices),
        "promised": verdict_text.PROMISED if manifest["config"]["temperature"] else "",
        **first,
        **_why(run, look, contestants, worked),
        "budgets": ranking.budgets_table(had, look),
        "trained": trained(had),
        "scope": "" if config.get("endpoints") else told_scope(run, had),
        "matrix": speed.matrix(cells, look, contestants),
        "of_a_task": _of_a_task(summaries),
        "speedups": speed.chart(cells, look, contestants),
        "everything": speed.everything(cells, look, config, run.questions),
        "others": speed.others(cells, look),
        "others_title": speed.others_title(cells),
        "acceptance": [
            steps.histogram(frames.tokens_per_step(run), look, contestants),
            steps.by_position(overall, made_steps, look, contestants),
        ],
        "time": [steps.per_token(overall, look, contestants), steps.per_step(overall, look, contestants)],
        "latency": steps.latency(overall, look),
        "steps": steps.decomposition(overall, frames.median_step_ms(run), look),
        **_machine(run, look, results.machine_rows),
        "samples": samples.samples(run, overall, look, ranked),
        **_replay(run, look, ranked),
        "what_if": _what_if(run, look, contestants, worked),
        "roofline": _roofline(run, look, ranked, worked),
        "timeline": machine.timeline(manifest.get("traces") or {}, look, contestants),
        "published": health.published_beside(run, overall, look, contestants),
        "notices": notices,
        "differences": health.differences(run, overall),
        "sameness_note": health.sameness_note(run),
        "sameness": health.sameness(overall, look),
        "facts": health.facts(run),
    }


def _first_screen(
    run: Run,
    overall: Mapping[str, SummaryRow],
    look: Mapping[str, palette.Style],
    config: Mapping[str, Any],
    placed: Mapping[str, Standing],
    made: Sequence[Check],
) -> dict[str, Any]:
    axis = ranking.axis_of(list(overall.values()))
    rows = ranking.ranking(overall, look, config, axis, placed, often_disturbed(run), sources(run))
    notes = [*verdict_text.notes(list(overall.values()), config, short=True), *_unlike(overall)]
    return {
        "ranking": rows,
        "legend": ranking.legend(rows),
        "weighting": _weighting(run, overall),
        "prefill": _prefill(run),
        "axis": [(f"{tick:g}×", axis.at(tick)) for tick in axis.ticks],
        "ranking_notes": [note for note in notes if not note.startswith(NOT_SHOWN)],
    }


def _weighting(run: Run, overall: Mapping[str, SummaryRow]) -> str:
    """Say how prompts are weighted, and what Spec-Bench's formula makes of the fastest method."""
    best = max((row for row in overall.values() if row.speedup), key=lambda row: row.speedup or 0.0, default=None)
    if best is None or best.method == run.baseline:
        return ""
    said = "A prompt weighs as much as it takes: times of all prompts are added up before they are divided."
    if best.speedup_specbench is None:
        return said
    return (
        f"{said} Spec-Bench's formula, in which all questions weigh the same, gives {times(best.speedup_specbench)} "
        f"for {best.method}; By task has it, and the geometric mean, for every method."
    )


def _prefill(run: Run) -> str:
    """Return which share of the reference's time the reading of prompts takes; '' where that is not known."""
    own = [
        row for row in run.rows if row.ok and row.method == run.baseline and row.wall_s and row.prefill_s is not None
    ]
    whole = sum(row.wall_s or 0.0 for row in own)
    return percent(sum(row.prefill_s or 0.0 for row in own) / whole) if whole else ""


def _unlike(overall: Mapping[str, SummaryRow]) -> list[str]:
    """Say where the methods were not compared on the same prompts, as in a run that is not complete."""
    counts = [row.n_prompts for row in overall.values() if row.comparison != "reference"]
    if not counts or min(counts) == max(counts):
        return []
    return [f"Not every method was compared on the same prompts: {min(counts):,} to {max(counts):,} of them"]


def _why(run: Run, look: Mapping[str, palette.Style], ranked: Sequence[str], worked: Sequence[Pair]) -> dict[str, Any]:
    found = waterfalls(worked)
    order = [label for label in ranked if label in found]
    room = max(1, 7 - len(order) // 4)  # below the table, which has a row for each method
    sentences = [found[label].sentence() for label in order[: min(PRINTED, room)]]
    printed = steps.waterfall_table(found, look, order, "why-printed")
    return {"why": steps.why(found, look, order), "why_printed": printed, "sentences": sentences}


def _machine(run: Run, look: Mapping[str, palette.Style], found: Sequence[MachineRow]) -> dict[str, Any]:
    order = list(look)
    rows = sorted(found, key=lambda row: order.index(row.method))
    tables = [machine.counted(rows, look), machine.read(rows, look)]
    return {"machine": tables, "machine_lines": machine_lines(rows, run.manifest)}


def _replay(run: Run, look: Mapping[str, palette.Style], ranked: Sequence[str]) -> dict[str, Any]:
    drafts = samples.recorded(run)
    return {"replay": samples.replay(run, drafts, look, ranked), "kinds": samples.kinds(drafts, look, ranked)}


def _roofline(
    run: Run, look: Mapping[str, palette.Style], ranked: Sequence[str], worked: Sequence[Pair]
) -> Chart | None:
    roof, found = roof_of(run), points(worked)
    return machine.roofline(roof, found, look, ranked) if roof and found else None


def _what_if(
    run: Run, look: Mapping[str, palette.Style], ranked: Sequence[str], worked: Sequence[Pair]
) -> list[dict[str, Any]]:
    """Return the measured parts of every method's step, and of the reference's on the same prompts, for predictions."""
    found = cost_model.parts(worked, roof_of(run))
    return [
        asdict(found[label][0])
        | {"method": visible(label), "plain": asdict(found[label][1])}
        | {"css": look[label].css, "symbol": look[label].symbol}
        for label in ranked
        if label in found and label != run.baseline
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
