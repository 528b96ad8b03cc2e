"""Figures of a run: `results.plot.ranking()` in a notebook, `ssbench plot` for a paper."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from plotly.graph_objects import Figure

from specbench_ss.errors import UserError, first_line, known_words, os_errors
from specbench_ss.reports import charts
from specbench_ss.reports.html.assets import plotly_js
from specbench_ss.reports.html.steps import ms_per_step
from specbench_ss.reports.palette import styles
from specbench_ss.results.analysis import Results
from specbench_ss.results.cost_model import points, roof_of, waterfalls
from specbench_ss.results.ranking import by_speed
from specbench_ss.results.report import Figures
from specbench_ss.results.sample_checks import check_samples
from specbench_ss.results.summary import SummaryRow
from specbench_ss.results.text import pluralize, visible
from specbench_ss.storage import replacing

MIB = 2**20
FORMATS = (".pdf", ".svg", ".png", ".html")
INCH, PNG_SCALE = 96, 2  # pixels
NO_EXTRA = "figures as files need kaleido: pip install -e '.[plot]'; --out NAME.html needs nothing"
NO_BROWSER = "figures as files need Chrome or Chromium: install chromium, or set BROWSER_PATH; or use --out NAME.html"


class RunFigures(Figures):
    """Plotly figures of one run, each of all methods but the baselines of changed models, the fastest first.

    results: of `analyse`. methods: labels of the only methods to draw. Raises UserError for a label that the run does
    not have and where the run has no sample; so does each figure that has nothing to draw.
    """

    def __init__(self, results: Results, methods: Collection[str] = ()) -> None:
        run = results.run
        check_samples(run, "draw")
        for label in methods:
            if label not in run.labels:
                raise UserError(f"the run has no method {label!r}{known_words(label, run.labels)}")
        own_baselines = {row.method for row in results.overall if row.reference_of}
        shown = methods or {row.method for row in results.overall} - own_baselines
        rows = [row for row in results.overall if row.method in shown]
        self.results = results
        self.rows = by_speed(rows)
        self.styles = styles(run.labels, own_baselines, run.baseline)

    @property
    def contestants(self) -> list[SummaryRow]:
        """Rows of the methods to draw without the baseline."""
        return [row for row in self.rows if row.comparison != "baseline"]

    @property
    def title(self) -> str:
        """Model, suite and device in a few words."""
        model, suite = self.results.manifest["model"], self.results.manifest["suite"]
        prompts = pluralize(suite["prompts"], "prompt")
        short = [f"{of.name} = {label}" for label, of in self.styles.items() if of.name != visible(label)]
        facts = f"{model['name']}, {model['dtype']}, {model['device']}; {suite['name']}, {prompts}"
        return "<br>".join(map(charts.text_of, [facts, *short]))

    def ranking(self) -> Figure:
        """Return the speedups with their intervals."""
        rows = [row for row in self.contestants if row.speedup is not None]
        if not rows:
            raise UserError("nothing to draw: no method of the run has a speedup")
        return charts.ranking(rows, self.styles)

    def acceptance(self) -> Figure:
        """Return the acceptance rate by draft position."""
        rows = [row for row in self.contestants if max(row.conditional_acceptance_rate_n, default=0) >= charts.FEW]
        if not rows:
            raise UserError(f"nothing to draw: no method drafted {charts.FEW} tokens at any position")
        return charts.acceptance(rows, self.styles)

    def waterfall(self) -> Figure:
        """Return the milliseconds per token from the baseline to each method."""
        made = waterfalls(self.results.pairs)
        found = [
            replace(made[row.method], method=self.styles[row.method].name)
            for row in self.contestants
            if row.method in made
        ]
        if not found:
            raise UserError("nothing to draw: no method was timed on the prompts of the baseline")
        made = charts.waterfall(found)
        if len(found) == 1:
            return made
        first, *bars = (name for name, _, _ in charts.steps_of(found[0]))
        return made.update_xaxes(title_text=f"milliseconds per token; bars from the top: {first},<br>{', '.join(bars)}")

    def roofline(self) -> Figure:
        """Return FLOP per second against FLOP per byte, under the machine's measured limits."""
        roof, wanted = roof_of(self.results.run), {row.method for row in self.rows}
        if roof is None:
            raise UserError("nothing to draw: no machine limits in the run; run ssbench doctor --calibrate first")
        found = [point for point in points(self.results.pairs) if point.method in wanted]
        if not found:
            raise UserError("nothing to draw: what a step reads and computes could not be counted")
        return charts.roofline(roof, found, self.styles)

    def pareto(self) -> Figure:
        """Return τ against relative step time."""
        rows = [row for row in self.contestants if row.relative_step_time and row.mean_acceptance_length]
        if not rows:
            raise UserError("nothing to draw: no method has timed steps on the prompts of the baseline")
        return charts.pareto(rows, self.styles)

    def tasks(self) -> Figure:
        """Return a heat map of speedups by task."""
        cells = {(row.method, row.task): row for row in self.results.rows}
        return charts.task_map(cells, self.styles, [row.method for row in self.rows])

    def time(self) -> Figure:
        """Return the parts of a step."""
        parts = {self.styles[row.method].name: found for row in self.rows if (found := ms_per_step(row))}
        if not parts:
            raise UserError("nothing to draw: no step of the run was timed")
        return charts.parts(parts, "milliseconds of a step")

    def memory(self) -> Figure:
        """Return the peak memory of a sample."""
        found = {row.method: row.peak_memory_bytes / MIB for row in self.rows if row.peak_memory_bytes is not None}
        if not found:
            raise UserError("nothing to draw: peak memory is recorded on CUDA devices only")
        return charts.memory(found, self.styles)


def write_plot(
    results: Results, kind: str, path: Path, methods: Collection[str] = (), width: float = 6.0, height: float = 0.0
) -> None:
    """Write one figure of a run, in inches; a height of 0 is what the content needs. Raises UserError."""
    if path.suffix not in FORMATS:
        raise UserError(f"cannot draw {path}: the name must end in {', '.join(FORMATS)}")
    figures = RunFigures(results, methods)
    figure: Figure = getattr(figures, kind)()
    figure.update_layout(
        title={"text": figures.title, "font": {"size": 11, "color": "#56606C"}, "x": 0.01, "y": 0.99, "yanchor": "top"},
        margin_t=44 + 14 * (lines := figures.title.count("<br>")), paper_bgcolor="white", width=round(width * INCH),
        height=round(height * INCH) if height else figure.layout.height + 34 + 14 * lines,
    )  # fmt: skip
    with os_errors(f"cannot write {path}"), replacing(path) as file:
        file.write(_html(figure) if path.suffix == ".html" else _image(figure, path.suffix[1:]))


def _html(figure: Figure) -> bytes:
    drawn = figure.to_html(full_html=False, include_plotlyjs=False, div_id="figure")
    head = (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>ssbench</title>\n<script>{plotly_js()}</script>'
    )
    return f"{head}\n{drawn}\n</html>\n".encode()


def _image(figure: Figure, suffix: str) -> bytes:
    """Return the bytes of an image, the same for the same figure. Raises UserError without kaleido or a browser."""
    try:
        import kaleido
    except ImportError:
        raise UserError(NO_EXTRA) from None
    try:
        options = {"format": suffix, "scale": PNG_SCALE if suffix == "png" else 1}
        drawn = bytes(kaleido.calc_fig_sync(figure, opts=options))
    except Exception as error:  # kaleido, its driver and the browser raise many kinds
        raise UserError(f"{NO_BROWSER} ({first_line(error)})") from error
    if suffix == "pdf":  # the browser writes the time
        return re.sub(rb"\(D:\d{14}", b"(D:20000101000000", drawn)
    if suffix == "svg" and (uid := re.search(rb'id="topdefs-(\w+)"', drawn)):  # Plotly names clips at random
        return drawn.replace(uid[1], b"figure")
    return drawn
