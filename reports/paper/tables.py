"""Tables 1, 2, 3, 5, 6 (ACL) and 1, 2 (2024): a run of the same methods on the same tasks, beside what is published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import ClassVar

from specbench_ss.options import REFERENCE
from specbench_ss.reports.paper.application_pairs import (
    AGAINST,
    DRAFT_MODEL,
    KEPT,
    SHARED,
    against_draft_model,
    draft_model_claims,
    kept_claims,
    quality_kept,
)
from specbench_ss.reports.paper.claims import number_or_none, same_order
from specbench_ss.reports.paper.companions import APP_DRAFT, EQ1, NEXT_TOKEN, Companion
from specbench_ss.reports.paper.figures import A100, ACL, OLD, axes, bars, health, machine, source
from specbench_ss.reports.paper.metrics import (
    DRAFT_CALLS,
    LATENCY,
    METRIC,
    SCORE,
    SPEEDUP,
    TARGET_CALLS,
    TAU,
    Metric,
)
from specbench_ss.reports.paper.missing_parts import (
    METHODS,
    as_published,
    config_for,
    model_parts,
    nothing_runs,
    of_method,
    told_trees,
)
from specbench_ss.reports.paper.overheads import parameter_grid
from specbench_ss.reports.paper.published import Entry, published
from specbench_ss.results.report import Bench, Claim, Column, Experiment, Grid, Part, Plot, Request, Result, Value
from specbench_ss.results.summary import OVERALL, summarise
from specbench_ss.results.text import interval
from specbench_ss.runs.config import RunConfig
from specbench_ss.runs.records import Run

ORDERED = ("speedup", "tau")  # metrics by which methods have an order
BASELINE, FROZEN = "Baseline", "Frozen base"  # the second is a row of its own where the first has a fine-tune's quality
FINE_TUNE = "the base fine-tuned with a LoRA on next tokens alone"
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


class RunTable(Experiment):
    """A table of a paper as one run. Tasks of the published data are the suite's categories, or all of the run.

    Every speedup is over `ar`, plain decoding of the frozen base, whose time per token is Baseline's of 1.
    """

    data: ClassVar[str]
    suite: ClassVar[str]
    categories: ClassVar[tuple[str, ...]]
    limit: ClassVar[int | None] = None  # questions of a task; None: the suite's usual number
    metrics: ClassVar[tuple[Metric, ...]]
    beside: ClassVar[tuple[str, ...]] = ()  # rows that the paper has not, so that ours has a counterpart
    parameters: ClassVar[bool] = False
    companions: ClassVar[Mapping[str, Companion]] = {}  # weights of rows that are not the method's own
    fine_tunes: ClassVar[bool] = False  # whether the paper's models are fine-tuned on the tasks, Baseline's too
    uses = tuple(f.name for f in fields(Request))

    def entries(self) -> tuple[Entry, ...]:
        """Return what is printed."""
        return published(self.data)

    def methods(self) -> list[str]:
        """Return the paper's methods in print order, and those that are shown beside them."""
        return list(dict.fromkeys([e.method for e in self.entries()] + list(self.beside)))

    def parts(self, request: Request) -> Sequence[Part]:
        """Return a row for each method on the request's model, and one for each published model."""
        asked = self._asked(request)
        mine = [Part(f"{m} on {request.model}", of_method(text, request)) for m, text in asked.items()]
        if self._has_tuned_baseline():
            mine.append(Part(f"{BASELINE}'s fine-tune on next tokens", NEXT_TOKEN.lacks("its LoRA", request)))
        return [*mine, *model_parts(list(dict.fromkeys(e.model for e in self.entries())), request)]

    def configs(self, request: Request) -> dict[str, RunConfig]:
        """Return one run with every method that can run, and with plain decoding of Baseline's model."""
        able = [text for text in self._asked(request).values() if not of_method(text, request)]
        if self._has_tuned_baseline() and (tuned := NEXT_TOKEN.asked(request)):
            able.append(tuned)
        settings = {"suite": self.suite, "categories": self.categories, "limit": self.limit}
        return {"run": config_for(as_published(request, able), able, **settings)}

    def run(self, bench: Bench) -> Result:
        """Measure, and put each metric beside what was published."""
        parts = self.parts(bench.request)
        config = self.configs(bench.request)["run"]
        if all(spec.name == REFERENCE for spec in config.methods):
            raise nothing_runs(self.name, parts)
        run = bench.measure(config, "run")
        tuned = next((spec.label for spec in config.methods if spec.name == NEXT_TOKEN.method), "")
        grids = [self._grid(metric, run, tuned) for metric in self.metrics]
        plot = self._plot(grids[0])
        grids += self._pairs(run, tuned)
        if self.parameters:
            grids.append(parameter_grid(self.source))
        out = [f"left out: {p.name} needs {p.missing}" for p in parts if p.missing]
        weights = (c.note(row, bench.request) for row, c in self.companions.items() if self._runs(row, bench.request))
        ours = (f"ours: {machine(run)}", *told_trees(bench.request), *weights, *self._models(tuned), *health(run))
        notes = (*ours, f"published: {A100}", *out)
        return Result(tuple(grids), (plot,), notes=notes)

    def claims(self, result: Result) -> Sequence[Claim]:
        """The published order of methods on each task, and what pairs of them are held to."""
        grids = {grid.name: grid for grid in result.grids}
        made = [claim for name in ORDERED if name in grids for claim in self._orders(grids[name])]
        if (grid := grids.get(KEPT)) is not None:
            made += kept_claims(grid, grid.columns[2].title)
        return [*made, *draft_model_claims(grids[AGAINST])] if AGAINST in grids else made

    def _asked(self, request: Request) -> dict[str, str]:
        """Return each method of the paper as a run here asks for it."""
        own = {m: c.asked(request) for m, c in self.companions.items()}
        return {m: own.get(m) or METHODS[m] for m in self.methods()}

    def _runs(self, row: str, request: Request) -> bool:
        """Say whether a row of the paper was measured here."""
        return row in self.methods() and not of_method(self._asked(request)[row], request)

    def _has_tuned_baseline(self) -> bool:
        """Say whether the paper prints a Baseline, and means a fine-tune of the base by it."""
        return self.fine_tunes and BASELINE in self.methods()

    def _models(self, tuned: str) -> list[str]:
        """Say whose quality and whose time each row shows, where the paper fine-tunes the models of all of them."""
        if not self.fine_tunes:
            return []
        kept = "SS-Shared has a model of its own, all other methods draft for the frozen base and have its quality"
        theirs = "speedups are over plain decoding of the frozen base; in the paper all of it is of fine-tuned models"
        if not self._has_tuned_baseline():
            return [f"{kept}; {theirs}"]
        whose = f"{FINE_TUNE} ({tuned}), shown beside the frozen base" if tuned else "the frozen base"
        return [f"the quality of {BASELINE} is that of {whose}; {kept}; {theirs}"]

    def _orders(self, grid: Grid) -> list[Claim]:
        """Hold the order on the published model that has the most of our methods."""
        models = {e.model for e in self.entries()}
        places = [i for i, c in enumerate(grid.columns) if c.title in models]
        made = []
        for task in dict.fromkeys(row[0] for row in grid.rows):
            ours = {str(row[1]): number_or_none(row[2]) for row in grid.rows if row[0] == task}
            printed = {i: _printed(grid, i, task, ours) for i in places}
            best = max(places, key=lambda i: len(printed[i]))
            made += same_order(printed[best], ours, f"{task}, order by {grid.name} on {grid.columns[best].title}")
        return made

    def _rows(self, metric: Metric, tuned: str) -> list[tuple[str, str]]:
        """Return the rows of a task: their names, and the method of the run that each shows."""
        others = [(method, METHODS[method]) for method in self.methods()]
        if metric is not METRIC or not tuned:
            return others
        return [(BASELINE, tuned), (FROZEN, REFERENCE), *(row for row in others if row[0] != BASELINE)]

    def _grid(self, metric: Metric, run: Run, tuned: str) -> Grid:
        printed = {(e.task, e.method, e.model): e.number(metric.column) for e in self.entries()}
        models = list(dict.fromkeys(e.model for e in self.entries()))
        summary = summarise(run)
        ours = {(row.category, row.method.partition("[")[0]): row for row in summary}  # whatever its options
        ours |= {(row.category, row.method): row for row in summary if row.method == tuned}
        spread = metric is SPEEDUP
        rows: list[tuple[Value, ...]] = []
        for task in dict.fromkeys(e.task for e in self.entries()):
            category = task if task in self.categories else OVERALL
            for method, shown in self._rows(metric, tuned):
                row = ours.get((category, shown))
                mine = (None if row is None else metric.ours(row),)
                around = ((interval(row.speedup_interval) or None) if row else None,) if spread else ()
                asked = (None if row is None else row.n_prompts,)
                rows.append((task, method, *mine, *around, *asked, *(printed.get((task, method, m)) for m in models)))
        name = run.manifest["model"]["name"]
        columns = (
            Column("task", "text"), Column("method", "text"), Column(f"ours: {name}", metric.form),
            *((Column("95 % interval", "text"),) if spread else ()), Column("prompts", "count"),
            *(Column(m, metric.form) for m in models),
        )  # fmt: skip
        return Grid(metric.column, columns, tuple(rows), f"{self.source}: {metric.title}")

    def _pairs(self, run: Run, tuned: str) -> list[Grid]:
        """Return the pairs of rows that the paper's text compares, where both were measured, with intervals."""
        labels = {label.partition("[")[0]: label for label in run.labels if label != tuned}
        shared, draft = (labels.get(METHODS[row]) for row in (SHARED, DRAFT_MODEL))
        made = []
        if shared and METRIC in self.metrics and BASELINE in self.methods():
            other = FINE_TUNE if tuned else "the frozen base (in the paper: its fine-tune on next tokens)"
            made.append(quality_kept(run, (shared, tuned or run.baseline), other, self.source))
        if shared and draft and LATENCY in self.metrics:
            made.append(against_draft_model(run, (shared, draft), self.source))
        return made

    def _plot(self, grid: Grid) -> Plot:
        """Plot this project's numbers as bars, then those of each published model."""
        drawn = [i for i, c in enumerate(grid.columns) if c.form not in ("text", "count")]
        series = {
            grid.columns[i].title: [(f"{row[0]}: {row[1]}", number_or_none(row[i])) for row in grid.rows] for i in drawn
        }
        label = f"Bar chart: {self.metrics[0].title} of each method, ours and published."
        return Plot("figure", self.title, label, bars(series), axes("", self.metrics[0].title), grid)


def _printed(grid: Grid, place: int, task: Value, ours: Mapping[str, float | None]) -> dict[str, float]:
    """Return the published numbers of a task in one column, of the methods that were measured here."""
    rows = [(str(row[1]), number_or_none(row[place])) for row in grid.rows if row[0] == task]
    return {method: value for method, value in rows if value is not None and ours.get(method) is not None}


class Table1(RunTable):
    """ACL table 1: speedup and quality on MT-Bench."""

    name, source, data = "table-1", source(ACL, "table", 1), "acl_table_1"
    title = "speedup and quality on MT-Bench"
    suite, categories, metrics = "specbench", MT_BENCH, (SPEEDUP, SCORE)


class Table2(RunTable):
    """ACL table 2: the other tasks of Spec-Bench."""

    name, source, data = "table-2", source(ACL, "table", 2), "acl_table_2"
    title = "speedup by task of Spec-Bench, lossless methods"
    suite, categories = "specbench", ("translation", "summarization", "qa", "math_reasoning", "rag")
    metrics = (SPEEDUP,)


class _Apps(RunTable):
    """What the tables on the three applications share.

    The papers fine-tune every model on the tasks: Baseline is plain decoding of the base with a LoRA that learnt next
    tokens alone (ACL table 3, caption; app. A), and Medusa, Eagle and the draft model draft for it. Here they draft
    for the frozen base, so each row's speedup is over `ar`, that base decoded plainly, and so is SS-Shared's. A merged
    LoRA has the base's shapes, so that a step of either takes as long; how many tokens are accepted may differ.
    Baseline's quality alone is the fine-tune's, where that LoRA is at hand.
    """

    fine_tunes = True
    limit = 40  # of a task: with eight, one answer moves exact match by 12 of 100
    suite, categories = "apps", ("sql", "dialogue_summary", "meaning_representation")
    beside = ("SS-Lossless",)
    companions: ClassVar[Mapping[str, Companion]] = {"2-Model SD": APP_DRAFT}


class Table3(_Apps):
    """ACL table 3: speedup, acceptance, quality and parameters on the applications."""

    name, source, data = "table-3", source(ACL, "table", 3), "acl_table_3"
    title = "applications: speedup, mean accepted tokens, quality, extra parameters"
    metrics, parameters = (SPEEDUP, TAU, METRIC), True


class Table5(_Apps):
    """ACL table 5: calls and latency, compared with a draft model."""

    name, source, data = "table-5", source(ACL, "table", 5), "acl_table_5"
    title = "applications: calls and latency against two-model speculative decoding"
    metrics = (TARGET_CALLS, DRAFT_CALLS, LATENCY, METRIC)


class Table6(RunTable):
    """ACL table 6: acceptance on MT-Bench."""

    name, source, data = "table-6", source(ACL, "table", 6), "acl_table_6"
    title = "mean accepted tokens on MT-Bench"
    suite, categories, metrics = "specbench", MT_BENCH, (TAU,)


class _OldApps(_Apps):
    """The 2024 paper's, whose main rows do not see streams (eq. 1)."""

    companions: ClassVar[Mapping[str, Companion]] = {**_Apps.companions, "SS-Shared": EQ1}


class OldTable1(_OldApps):
    """2024 table 1: applications."""

    name, source, data = "2024-table-1", source(OLD, "table", 1), "old_table_1"
    title = "applications: speedup, call reduction, quality, extra parameters"
    metrics, parameters = (SPEEDUP, TAU, METRIC), True


class OldTable2(_OldApps):
    """2024 table 2: compared with a draft model."""

    name, source, data = "2024-table-2", source(OLD, "table", 2), "old_table_2"
    title = "applications: calls and latency against two-model speculative decoding"
    metrics = (TARGET_CALLS, DRAFT_CALLS, LATENCY, METRIC)
