"""`ssbench plot`: one figure of a run as SVG, PDF, PNG or HTML."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from specbench_ss.errors import UserError, known_words, os_reason

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from specbench_ss.reports.palette import Style
    from specbench_ss.results.summary import SummaryRow
    from specbench_ss.runs.records import Run

Kind = Literal["ranking", "acceptance", "waterfall", "roofline", "pareto", "tasks", "time", "memory"]
FORMATS = (".pdf", ".svg", ".png", ".html")
INCH, PNG_SCALE = 96, 2  # pixels
NO_EXTRA = "figures as files need kaleido: pip install -e '.[plot]'; --out NAME.html needs nothing"
NO_BROWSER = "figures as files need Chrome or Chromium: install chromium, or set BROWSER_PATH; or use --out NAME.html"
MIB = 2**20


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run.")],
    kind: Annotated[
        Kind,
        typer.Option(
            help="ranking: speedups with intervals. acceptance: acceptance rate by draft position. waterfall: "
            "milliseconds per token from the baseline to each method. roofline: FLOP per second against FLOP per byte, "
            "under the machine's measured limits. pareto: tokens per step against relative step time. tasks: heat map "
            "of speedups. time: parts of a step. memory: peak memory of a sample."
        ),
    ] = "ranking",
    out: Annotated[
        Path | None,
        typer.Option("--out", help="File to write: .pdf, .svg, .png or .html. Default: KIND.pdf in the run directory."),
    ] = None,
    methods: Annotated[
        str,
        typer.Option(metavar="A,B", help="Draw only these methods. Default: all but baselines of changed models."),
    ] = "",
    width: Annotated[
        float, typer.Option(min=2.0, max=20.0, help="Width in inches; a column of a paper has 3.3.")
    ] = 6.0,
    height: Annotated[
        float, typer.Option(min=0.0, max=40.0, help="Height in inches. 0: what the content needs.")
    ] = 0.0,
) -> None:
    """Draw one figure of a run for a paper: vector graphics with fixed fonts."""
    from specbench_ss.options import split_methods
    from specbench_ss.runs.run_dir import read_run

    done = read_run(run)
    path = out or done.path / f"{kind}.pdf"
    write_plot(done, kind, path, split_methods(methods), width, height)
    print(f"figure: {path}")


def write_plot(
    run: Run, kind: Kind, path: Path, methods: Collection[str] = (), width: float = 6.0, height: float = 0.0
) -> None:
    """Write one figure of a run, in inches; a height of 0 is what the content needs. Raises UserError."""
    if path.suffix not in FORMATS:
        raise UserError(f"cannot draw {path}: the name must end in {', '.join(FORMATS)}")
    if path.is_dir():
        raise UserError(f"cannot write {path}: it is a folder")
    numbers = numbers_of(run, methods)
    figure = KINDS[kind](numbers)
    figure.update_layout(
        title={"text": numbers.title, "font": {"size": 11, "color": "#56606C"}, "x": 0.01, "y": 0.99, "yanchor": "top"},
        margin_t=44, paper_bgcolor="white", width=round(width * INCH),
        height=round(height * INCH) if height else figure.layout.height + 34,
    )  # fmt: skip
    try:
        path.write_bytes(_html(figure) if path.suffix == ".html" else _image(figure, path.suffix[1:]))
    except OSError as error:
        raise UserError(f"cannot write {path}: {os_reason(error)}") from error


def _html(figure: Figure) -> bytes:
    from specbench_ss.reports.html.assets import plotly_js

    drawn = figure.to_html(full_html=False, include_plotlyjs=False, div_id="figure")
    head = (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>ssbench</title>\n<script>{plotly_js()}</script>'
    )
    return f"{head}\n{drawn}\n</html>\n".encode()


def _image(figure: Figure, suffix: str) -> bytes:
    """Return the bytes of an image, the same for the same figure. Raises UserError without kaleido or a browser."""
    try:
        import kaleido
        from choreographer.errors import ChromeNotFoundError
    except ImportError:
        raise UserError(NO_EXTRA) from None
    try:
        options = {"format": suffix, "scale": PNG_SCALE if suffix == "png" else 1}
        drawn = bytes(kaleido.calc_fig_sync(figure, opts=options))
    except (ChromeNotFoundError, kaleido.errors.KaleidoError) as error:
        raise UserError(NO_BROWSER) from error
    if suffix == "pdf":  # the browser writes the time
        return re.sub(rb"\(D:\d{14}", b"(D:20000101000000", drawn)
    if suffix == "svg" and (uid := re.search(rb'id="topdefs-(\w+)"', drawn)):  # Plotly names clips at random
        return drawn.replace(uid[1], b"figure")
    return drawn


@dataclass(frozen=True, slots=True)
class Numbers:
    """A run, its rows over all tasks of the methods to draw, fastest first, and how each is drawn."""

    run: Run
    rows: list[SummaryRow]
    styles: dict[str, Style]
    summary: list[SummaryRow]

    @property
    def contestants(self) -> list[SummaryRow]:
        """Return the rows without the reference."""
        return [row for row in self.rows if row.comparison != "reference"]

    @property
    def title(self) -> str:
        """Return model, suite and device in a few words."""
        from specbench_ss.reports.charts import text_of

        model, suite = self.run.manifest["model"], self.run.manifest["suite"]
        prompts = f"{suite['prompts']:,} prompt{'s' * (suite['prompts'] != 1)}"
        return text_of(f"{model['name']}, {model['dtype']}, {model['device']}; {suite['name']}, {prompts}")


def numbers_of(run: Run, wanted: Collection[str] = ()) -> Numbers:
    """Return what to draw. wanted: labels of methods; none: all but baselines of changed models.

    Raises UserError for a label that the run does not have, and where the run has no sample.
    """
    from specbench_ss.reports.palette import styles
    from specbench_ss.results.summary import OVERALL, summarise

    if not run.rows:
        raise UserError(f"nothing to draw: {run.path} has none of the run's {run.samples:,} samples")
    for label in wanted:
        if label not in run.labels:
            raise UserError(f"the run has no method {label!r}{known_words(label, run.labels)}")
    summary = summarise(run)
    rows = [row for row in summary if row.category == OVERALL]
    plain = {row.method for row in rows if row.reference_of}
    kept = [row for row in rows if (row.method in wanted if wanted else row.method not in plain)]
    look = styles(run.labels, plain, run.baseline)
    return Numbers(run, sorted(kept, key=lambda row: -(row.speedup or 0.0)), look, summary)


def _ranking(numbers: Numbers) -> Figure:
    from specbench_ss.reports import charts

    rows = [row for row in numbers.contestants if row.speedup is not None]
    if not rows:
        raise UserError("nothing to draw: no method of the run has a speedup")
    return charts.ranking(rows, numbers.styles)


def _acceptance(numbers: Numbers) -> Figure:
    from specbench_ss.reports import charts

    rows = [row for row in numbers.contestants if max(row.acceptance_given_n, default=0) >= charts.FEW]
    if not rows:
        raise UserError(f"nothing to draw: no method drafted {charts.FEW} tokens at any position")
    return charts.acceptance(rows, numbers.styles)


def _waterfall(numbers: Numbers) -> Figure:
    from specbench_ss.reports import charts
    from specbench_ss.results.cost_model import waterfalls

    made = waterfalls(numbers.run)
    found = [made[row.method] for row in numbers.contestants if row.method in made]
    if not found:
        raise UserError("nothing to draw: no method of the run was timed beside plain decoding")
    made = charts.waterfall(found)
    bars = ", ".join(name for name, _, _ in charts.steps_of(found[0]))
    return made.update_xaxes(title_text=f"milliseconds per token; bars from the top:<br>{bars}")


def _roofline(numbers: Numbers) -> Figure:
    from specbench_ss.reports import charts
    from specbench_ss.results.cost_model import pairs, points, roof_of

    roof, wanted = roof_of(numbers.run), {row.method for row in numbers.rows}
    if roof is None:
        raise UserError("nothing to draw: the run does not know the machine's limits (ssbench doctor --calibrate)")
    found = [point for point in points(pairs(numbers.run)) if point.method in wanted]
    if not found:
        raise UserError("nothing to draw: what a step reads and computes could not be counted")
    return charts.roofline(roof, found, numbers.styles)


def _pareto(numbers: Numbers) -> Figure:
    from specbench_ss.reports import charts

    rows = [row for row in numbers.contestants if row.step_cost and row.tau]
    if not rows:
        raise UserError("nothing to draw: no method of the run has timed steps beside plain decoding")
    return charts.pareto(rows, numbers.styles)


def _tasks(numbers: Numbers) -> Figure:
    from specbench_ss.reports import charts

    cells = {(row.method, row.category): row for row in numbers.summary}
    return charts.task_map(cells, [row.method for row in numbers.rows])


def _time(numbers: Numbers) -> Figure:
    from specbench_ss.reports import charts
    from specbench_ss.reports.html.steps import ms_per_step

    parts = {row.method: found for row in numbers.rows if (found := ms_per_step(row))}
    if not parts:
        raise UserError("nothing to draw: no step of the run was timed")
    return charts.parts(parts, "milliseconds of a step")


def _memory(numbers: Numbers) -> Figure:
    from specbench_ss.reports import charts

    found = {row.method: row.peak_memory_bytes / MIB for row in numbers.rows if row.peak_memory_bytes is not None}
    if not found:
        raise UserError("nothing to draw: peak memory is recorded on CUDA devices only")
    return charts.memory(found, numbers.styles)


KINDS: dict[str, Callable[[Numbers], Figure]] = {
    "ranking": _ranking,
    "acceptance": _acceptance,
    "waterfall": _waterfall,
    "roofline": _roofline,
    "pareto": _pareto,
    "tasks": _tasks,
    "time": _time,
    "memory": _memory,
}
