"""Figures of a run: `results.plot.ranking()` in a notebook, `ssbench plot` for a paper."""

from __future__ import annotations

from collections.abc import Collection

from plotly.graph_objects import Figure

from specbench_ss.errors import UserError, known_words
from specbench_ss.reports import charts
from specbench_ss.reports.html.steps import ms_per_step
from specbench_ss.reports.palette import styles
from specbench_ss.results.analysis import Results
from specbench_ss.results.cost_model import pairs, points, roof_of, waterfalls
from specbench_ss.results.report import Figures
from specbench_ss.results.summary import SummaryRow

MIB = 2**20


class RunFigures(Figures):
    """Plotly figures of one run, each of all methods but the baselines of changed models, the fastest first.

    results: of `analyse`. methods: labels of the only methods to draw. Raises UserError for a label that the run does
    not have and where the run has no sample; so does each figure that has nothing to draw.
    """

    def __init__(self, results: Results, methods: Collection[str] = ()) -> None:
        run = results.run
        if not run.rows:
            raise UserError(f"nothing to draw: {run.path} has none of the run's {run.samples:,} samples")
        for label in methods:
            if label not in run.labels:
                raise UserError(f"the run has no method {label!r}{known_words(label, run.labels)}")
        plain = {row.method for row in results.overall if row.reference_of}
        kept = [row for row in results.overall if (row.method in methods if methods else row.method not in plain)]
        self.results = results
        self.rows = sorted(kept, key=lambda row: -(row.speedup or 0.0))
        self.styles = styles(run.labels, plain, run.baseline)

    @property
    def contestants(self) -> list[SummaryRow]:
        """Rows of the methods to draw without the baseline."""
        return [row for row in self.rows if row.comparison != "reference"]

    @property
    def title(self) -> str:
        """Model, suite and device in a few words."""
        model, suite = self.results.manifest["model"], self.results.manifest["suite"]
        prompts = f"{suite['prompts']:,} prompt{'s' * (suite['prompts'] != 1)}"
        return charts.text_of(f"{model['name']}, {model['dtype']}, {model['device']}; {suite['name']}, {prompts}")

    def ranking(self) -> Figure:
        """Return the speedups with their intervals."""
        rows = [row for row in self.contestants if row.speedup is not None]
        if not rows:
            raise UserError("nothing to draw: no method of the run has a speedup")
        return charts.ranking(rows, self.styles)

    def acceptance(self) -> Figure:
        """Return the acceptance rate by draft position."""
        rows = [row for row in self.contestants if max(row.acceptance_given_n, default=0) >= charts.FEW]
        if not rows:
            raise UserError(f"nothing to draw: no method drafted {charts.FEW} tokens at any position")
        return charts.acceptance(rows, self.styles)

    def waterfall(self) -> Figure:
        """Return the milliseconds per token from the baseline to each method."""
        made = waterfalls(self.results.run)
        found = [made[row.method] for row in self.contestants if row.method in made]
        if not found:
            raise UserError("nothing to draw: no method of the run was timed beside plain decoding")
        made = charts.waterfall(found)
        bars = ", ".join(name for name, _, _ in charts.steps_of(found[0]))
        return made.update_xaxes(title_text=f"milliseconds per token; bars from the top:<br>{bars}")

    def roofline(self) -> Figure:
        """Return FLOP per second against FLOP per byte, under the machine's measured limits."""
        roof, wanted = roof_of(self.results.run), {row.method for row in self.rows}
        if roof is None:
            raise UserError("nothing to draw: the run does not know the machine's limits (ssbench doctor --calibrate)")
        found = [point for point in points(pairs(self.results.run)) if point.method in wanted]
        if not found:
            raise UserError("nothing to draw: what a step reads and computes could not be counted")
        return charts.roofline(roof, found, self.styles)

    def pareto(self) -> Figure:
        """Return tokens per step against relative step time."""
        rows = [row for row in self.contestants if row.step_cost and row.tau]
        if not rows:
            raise UserError("nothing to draw: no method of the run has timed steps beside plain decoding")
        return charts.pareto(rows, self.styles)

    def tasks(self) -> Figure:
        """Return a heat map of speedups by task."""
        cells = {(row.method, row.category): row for row in self.results.rows}
        return charts.task_map(cells, [row.method for row in self.rows])

    def time(self) -> Figure:
        """Return the parts of a step."""
        parts = {row.method: found for row in self.rows if (found := ms_per_step(row))}
        if not parts:
            raise UserError("nothing to draw: no step of the run was timed")
        return charts.parts(parts, "milliseconds of a step")

    def memory(self) -> Figure:
        """Return the peak memory of a sample."""
        found = {row.method: row.peak_memory_bytes / MIB for row in self.rows if row.peak_memory_bytes is not None}
        if not found:
            raise UserError("nothing to draw: peak memory is recorded on CUDA devices only")
        return charts.memory(found, self.styles)
