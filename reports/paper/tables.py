"""Tables of the papers: a run of the same methods on the same tasks, with the published numbers alongside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import numpy as np

from specbench_ss.errors import UserError
from specbench_ss.models.devices import resolve_device
from specbench_ss.models.quantize import check_quantize
from specbench_ss.options import REFERENCE
from specbench_ss.reports.paper.claims import at_least, at_most, number_or_none, place_of, point, rising, same_order
from specbench_ss.reports.paper.cost_figures import parameter_grid
from specbench_ss.reports.paper.experiment import (
    A100,
    ACL,
    METHODS,
    MT_BENCH,
    OLD,
    Entry,
    PaperExperiment,
    as_published,
    comes_along,
    config_for,
    health,
    interval_text,
    machine,
    missing_for,
    model_parts,
    overall,
    published,
    source,
    table,
    trees_note,
)
from specbench_ss.reports.paper.figures import Axis, Text, bars
from specbench_ss.results.quality import MARGIN, cautious, non_inferiority
from specbench_ss.results.report import Bench, Claim, Column, Grid, Part, Plot, Request, Result, Value
from specbench_ss.results.summary import OVERALL, SummaryRow, paired, summarise
from specbench_ss.results.text import counted, end, interval, interval_of
from specbench_ss.runs.config import RunConfig
from specbench_ss.runs.records import Run
from specbench_ss.stats import FEWEST, Floats, ratio_interval

BASELINE, FROZEN = "Baseline", "Frozen base"  # the second is a row of its own where the first has a fine-tune's quality
SHARED, DRAFT_MODEL = "SS-Shared", "2-Model SD"
FINE_TUNE = "the base fine-tuned with a LoRA on next tokens alone"


# -- columns and weights ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Metric:
    """A column of the papers' tables: its name in the published data, and its value in this project's summary."""

    column: str
    title: str
    ours: Callable[[SummaryRow], float | None]
    form: str = "number"


def _latency(row: SummaryRow) -> float | None:
    return None if not row.tokens or not row.tokens_per_s else 1000 * row.tokens / row.tokens_per_s


def _percent(row: SummaryRow) -> float | None:
    return None if row.quality is None else 100 * row.quality


SPEEDUP = Metric("speedup", "speedup", lambda row: row.speedup, "times")
TAU = Metric("tau", "mean accepted tokens (tau)", lambda row: row.tau)
SCORE = Metric("score", "quality (published: GPT-4 score of 10; ours: the suite's metrics of 100)", _percent)
METRIC = Metric("metric", "quality (published: exact match or ROUGE-1; ours: the suite's)", _percent)
TARGET_CALLS = Metric("target_calls", "target calls per sample", lambda row: row.target_calls)
DRAFT_CALLS = Metric("draft_calls", "draft calls per sample", lambda row: row.draft_calls)
LATENCY = Metric("latency_ms", "wall time per sample, ms", _latency)
ORDERED = (SPEEDUP.column, TAU.column)  # metrics by which methods have an order


@dataclass(frozen=True, slots=True)
class Companion:
    """Weights, trained as in the papers, that replace a method's default weights if the model came with them.

    folder: name of their folder. present, absent: notes on the table's row with these weights and without them.
    """

    method: str
    folder: str
    present: str = ""
    absent: str = ""

    def requested(self, request: Request) -> str:
        """Return the method as a run asks for it; '' without such weights. A user's --set wins."""
        if self._given(request):
            return self.method
        return f"{self.method}[weights={self.folder}]" if comes_along(request.model, self.folder) else ""

    def missing(self, what: str, request: Request) -> str:
        """Return how to give the weights if they are missing, else ''."""
        return "" if self.requested(request) else f"{what} (--set {self.method}.weights=PATH)"

    def note(self, row: str, request: Request) -> str:
        """Return the note on the table's row."""
        if given := self._given(request):
            return f"{row} has the weights {given[-1].partition('=')[2]}, as --set says"
        absent = f"{self.absent}: --set {self.method}.weights=PATH gives others"
        return f"{row} {self.present if self.requested(request) else absent}"

    def _given(self, request: Request) -> list[str]:
        return [setting for setting in request.settings if setting.startswith(f"{self.method}.weights=")]


NEXT_TOKEN = Companion("ss-shared-ar", "next-token")  # plain decoding of the base with a LoRA on next tokens alone
EQ1 = Companion(
    "ss-shared",
    "ss-shared-eq1",
    "is trained by the 2024 paper's eq. 1: main rows do not see streams",
    "is trained by eq. 3 of the ACL paper, under which main rows see their streams, as the 2024 paper's do not (eq. 1)",
)
APP_DRAFT = Companion(
    "sd",
    "draft-apps",
    "drafts with a model that one LoRA tuned for the three applications together; the paper's draft model has a LoRA "
    "for each of them",
    "drafts with a model that is not tuned for the applications, as the paper's is, by LoRA",
)


def tuned_part(request: Request) -> Part:
    """Return the row of Baseline's fine-tune."""
    return Part(f"{BASELINE}'s fine-tune on next tokens", NEXT_TOKEN.missing("its LoRA", request))


def tuned_label(configs: Sequence[RunConfig]) -> str:
    """Return the label of Baseline's fine-tune in runs; '' if they lack it."""
    return next((s.label for c in configs for s in c.methods if s.name == NEXT_TOKEN.method), "")


# -- a table as one run -------------------------------------------------------------------------------------------


class RunTable(PaperExperiment):
    """A table of a paper as one run. Tasks of the published data are the suite's categories, or all of the run.

    Every speedup is over `ar`, plain decoding of the frozen base, whose time per token is Baseline's of 1.
    """

    data: ClassVar[str]
    suite: ClassVar[str]
    categories: ClassVar[tuple[str, ...]]
    limit: ClassVar[int | None] = None  # questions of a task; None: the suite's usual number
    metrics: ClassVar[tuple[Metric, ...]]
    extra_rows: ClassVar[tuple[str, ...]] = ()  # rows that the paper lacks, so that ours has a counterpart
    parameters: ClassVar[bool] = False
    companions: ClassVar[Mapping[str, Companion]] = {}  # weights of rows that are not the method's own
    fine_tunes: ClassVar[bool] = False  # whether the paper's models are fine-tuned on the tasks, Baseline's too
    uses = tuple(f.name for f in fields(Request))

    def methods(self) -> list[str]:
        """Return the paper's methods in print order, then the extra rows."""
        return list(dict.fromkeys([e.method for e in self._entries()] + list(self.extra_rows)))

    def parts(self, request: Request) -> Sequence[Part]:
        """Return a row for each method on the request's model, and one for each published model."""
        requested = self._requested(request)
        mine = [Part(f"{m} on {request.model}", missing_for(text, request)) for m, text in requested.items()]
        tuned = [tuned_part(request)] if self._has_tuned_baseline() else []
        return [*mine, *tuned, *model_parts(self._models(), request)]

    def configs(self, request: Request) -> dict[str, RunConfig]:
        """Return one run with every method that can run, and with plain decoding of Baseline's model."""
        able = [text for text in self._requested(request).values() if not missing_for(text, request)]
        if self._has_tuned_baseline() and (tuned := NEXT_TOKEN.requested(request)):
            able.append(tuned)
        settings = {"suite": self.suite, "categories": self.categories, "limit": self.limit}
        return {"run": config_for(as_published(request, able), able, **settings)}

    def able(self, request: Request) -> bool:
        """Return whether a method besides plain decoding can run."""
        return any(spec.name != REFERENCE for spec in self.configs(request)["run"].methods)

    def make(self, bench: Bench) -> Result:
        """Measure, and put each metric next to its published values."""
        config = self.configs(bench.request)["run"]
        run = bench.measure(config, "run")
        tuned = tuned_label([config])
        grids = [self._grid(metric, run, tuned) for metric in self.metrics]
        plot = self._plot(grids[0])
        grids += self._pairs(run, tuned)
        if self.parameters:
            grids.append(parameter_grid(self.source))
        weights = (c.note(row, bench.request) for row, c in self.companions.items() if self._runs(row, bench.request))
        ours = (f"ours: {machine(run)}", *trees_note(bench.request), *weights, *self._model_note(tuned), *health(run))
        notes = (*ours, f"published: {A100}", *self.left_out(bench.request))
        return Result(tuple(grids), (plot,), notes=notes)

    def claims(self, result: Result) -> Sequence[Claim]:
        """Test the published order of methods on each task, and the pairs that the paper compares."""
        grids = {grid.name: grid for grid in result.grids}
        made = [claim for name in ORDERED if name in grids for claim in self._orders(grids[name])]
        if (grid := grids.get(KEPT)) is not None:
            made += kept_claims(grid, grid.columns[2].title)
        return [*made, *draft_model_claims(grids[AGAINST])] if AGAINST in grids else made

    def _entries(self) -> tuple[Entry, ...]:
        return published(self.data)

    def _models(self) -> list[str]:
        return list(dict.fromkeys(e.model for e in self._entries()))

    def _requested(self, request: Request) -> dict[str, str]:
        """Return each method of the paper as a run here asks for it."""
        own = {m: c.requested(request) for m, c in self.companions.items()}
        return {m: own.get(m) or METHODS[m] for m in self.methods()}

    def _runs(self, row: str, request: Request) -> bool:
        return row in self.methods() and not missing_for(self._requested(request)[row], request)

    def _has_tuned_baseline(self) -> bool:
        """Return whether the paper prints a Baseline, and means a fine-tune of the base by it."""
        return self.fine_tunes and BASELINE in self.methods()

    def _model_note(self, tuned: str) -> list[str]:
        """Return whose quality and whose time each row shows, where the paper fine-tunes the models of all of them."""
        if not self.fine_tunes:
            return []
        kept = "SS-Shared has a model of its own, all other methods draft for the frozen base and have its quality"
        theirs = "speedups are over plain decoding of the frozen base; in the paper all of it is of fine-tuned models"
        if not self._has_tuned_baseline():
            return [f"{kept}; {theirs}"]
        whose = f"{FINE_TUNE} ({tuned}), shown beside the frozen base" if tuned else "the frozen base"
        return [f"the quality of {BASELINE} is that of {whose}; {kept}; {theirs}"]

    def _orders(self, grid: Grid) -> list[Claim]:
        """Test the order on the published model that has the most of our methods."""
        places = [i for i, c in enumerate(grid.columns) if c.title in self._models()]
        made = []
        for task in dict.fromkeys(row[0] for row in grid.rows):
            rows = [row for row in grid.rows if row[0] == task]
            ours = {str(row[1]): number_or_none(row[2]) for row in rows}
            printed = {
                i: {str(row[1]): value for row in rows if (value := number_or_none(row[i])) is not None
                    and ours.get(str(row[1])) is not None}
                for i in places
            }  # fmt: skip
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
        printed = {(e.task, e.method, e.model): e.number(metric.column) for e in self._entries()}
        models, spread = self._models(), metric is SPEEDUP
        ours = _by_name(summarise(run), tuned)
        rows: list[tuple[Value, ...]] = []
        for task in dict.fromkeys(e.task for e in self._entries()):
            category = task if task in self.categories else OVERALL
            for method, shown in self._rows(metric, tuned):
                row = ours.get((category, shown))
                mine: tuple[Value, ...] = (None if row is None else metric.ours(row),)
                mine += (None if row is None else interval_text(row),) if spread else ()
                mine += (None if row is None else row.n_prompts,)
                rows.append((task, method, *mine, *(printed.get((task, method, m)) for m in models)))
        forms = {"task": "text", "method": "text", f"ours: {run.manifest['model']['name']}": metric.form}
        forms |= {"95 % interval": "text"} if spread else {}
        forms |= {"prompts": "count"} | dict.fromkeys(models, metric.form)
        return table(metric.column, forms, rows, f"{self.source}: {metric.title}")

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
        title = self.metrics[0].title
        text = Text("figure", self.title, f"Bar chart: {title} of each method, ours and published.")
        return bars(text, series, grid, Axis(title))


def _by_name(rows: Sequence[SummaryRow], tuned: str) -> dict[tuple[str, str], SummaryRow]:
    """Return rows by category and method name, whatever its options; the fine-tune's by its label."""
    return {(row.category, row.method if row.method == tuned else row.method.partition("[")[0]): row for row in rows}


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
    """Tables on the three applications.

    The papers fine-tune every model on the tasks: Baseline is plain decoding of the base with a LoRA that learnt next
    tokens alone (ACL table 3, caption; app. A), and Medusa, Eagle and the draft model draft for it. Here they draft
    for the frozen base, so each row's speedup is over `ar`, that base decoded plainly, and so is SS-Shared's. A merged
    LoRA has the base's shapes, so that a step of either takes as long; how many tokens are accepted may differ.
    Baseline's quality alone is the fine-tune's, where that LoRA is at hand.
    """

    fine_tunes = True
    limit = 40  # of a task: with eight, one answer moves exact match by 12 of 100
    suite, categories = "apps", ("sql", "dialogue_summary", "meaning_representation")
    extra_rows = ("SS-Lossless",)
    companions: ClassVar[Mapping[str, Companion]] = {DRAFT_MODEL: APP_DRAFT}


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
    """Tables of the 2024 paper, whose main rows do not see streams (eq. 1)."""

    companions: ClassVar[Mapping[str, Companion]] = {**_Apps.companions, SHARED: EQ1}


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


# -- pairs of rows, compared question by question ------------------------------------------------------------------

KEPT, AGAINST = "quality-kept", "against-a-draft-model"  # names of the grids
TIME, CALLS = "time of an answer", "target calls of an answer"
LOST = -100 * MARGIN  # of 100: less quality than this is a loss
HOLDS = {"non-inferior": True, "inferior": False, "not shown": None}
Pair = tuple[str, str]  # labels in the run: SS-Shared's, and that of the method or model that it is compared with


def quality_kept(run: Run, pair: Pair, other: str, source: str) -> Grid:
    """Return SS-Shared's quality on each task, that of another model, and the difference, of 100."""
    rows: list[tuple[Value, ...]] = []
    for task in run.categories:
        own, others = _by_question(run, pair, task, "quality")
        if len(own):
            around = cautious(own - others)
            written = interval((100 * around[0], 100 * around[1]), 1, LOST) if around else None
            means = 100 * float(own.mean()), 100 * float(others.mean()), 100 * float((own - others).mean())
            rows.append((task, *means, written, len(own)))
    numbers = dict.fromkeys((SHARED, other, "difference"), "number")
    forms = {"task": "text", **numbers, "95 % interval": "text", "questions": "count"}
    return table(KEPT, forms, rows, f"{source}: quality of shared mode, of 100")


def against_draft_model(run: Run, pair: Pair, source: str) -> Grid:
    """Return SS-Shared's time and target calls of an answer over those of two-model speculative decoding."""
    around = Column("95 % interval", "text")
    columns = Column("task", "text"), Column(TIME, "times"), around, Column(CALLS, "times"), around
    rows: list[tuple[Value, ...]] = []
    for task in run.categories:
        seconds = _by_question(run, pair, task, "wall_s")
        if len(seconds[0]):
            both = _ratio(*seconds, processes=1), _ratio(*_by_question(run, pair, task, "steps"))
            rows.append((task, *both[0], *both[1], len(seconds[0])))
    caption = f"{source}: {SHARED} over {DRAFT_MODEL}"
    return Grid(AGAINST, (*columns, Column("questions", "count")), tuple(rows), caption)


def kept_claims(grid: Grid, other: str) -> list[Claim]:
    """Test that shared mode costs no quality (ACL table 3), as non-inferiority within a margin."""
    made = []
    for task, own, theirs, difference, around, count in grid.rows:
        says = f"{task}: shared mode costs no quality against {other} (here: at most {-LOST:g} of 100)"
        found = f"{own:.1f} and {theirs:.1f} of 100, difference {end(float(difference or 0), 1, 0)}"
        found += f" ({around})" if around else ""
        bounds = interval_of(around)
        verdict = non_inferiority(bounds and (bounds[0] / 100, bounds[1] / 100), MARGIN)
        made.append(Claim(says, HOLDS[verdict], f"{found}, {counted(int(count or 0), 'question')}"))
    return made


def draft_model_claims(grid: Grid) -> list[Claim]:
    """Test that SS-Shared answers sooner though it calls the target more often (ACL table 5, 2024 table 2)."""
    made = []
    for row in grid.rows:
        for says, hold, title in (
            (f"{row[0]}: {SHARED} answers sooner than {DRAFT_MODEL}", at_most, TIME),
            (f"{row[0]}: {SHARED} calls the target more often than {DRAFT_MODEL}", at_least, CALLS),
        ):
            claim = hold(f"{says} (here: its {title} over the other's)", point(grid, row, title), 1.0)
            made.append(replace(claim, found=f"{claim.found}, {counted(int(row[-1] or 0), 'question')}"))
    return made


def _by_question(run: Run, pair: Pair, task: str, column: str) -> tuple[Floats, Floats]:
    """Return means of a column over the samples of each question that both answered, [questions] each."""
    rows = [[r for r in run.rows if r.method == label and r.category == task] for label in pair]
    given: dict[str, list[tuple[float, float]]] = {}
    for own, other in zip(*paired(*rows), strict=True):
        mine, theirs = getattr(own, column), getattr(other, column)
        if mine is not None and theirs is not None:
            given.setdefault(own.question_id, []).append((mine, theirs))
    means = np.array([np.mean(both, axis=0) for both in given.values()], dtype=np.float64).reshape(-1, 2)
    return means[:, 0], means[:, 1]


def _ratio(own: Floats, others: Floats, processes: int = 0) -> tuple[float | None, str | None]:
    """Return the ratio of sums [questions] and its interval as text."""
    if not len(own) or not others.sum():
        return None, None
    around = ratio_interval((own,), (others,), processes) if len(own) >= FEWEST else None
    return float(own.sum() / others.sum()), interval(around) or None


# -- quantised bases: a run for each level -------------------------------------------------------------------------

UNQUANTISED = "FP16"  # in the paper; here the model in the dtype of the run, which its rows name
LEVELS = (UNQUANTISED, "INT8", "INT4", "NF4")  # the last: 4 bits by the paper's package, which CPUs compute with too
LEVEL_ROWS = (BASELINE, SHARED, "SS-Lossless")
QUANTISED_MODEL = "Mistral-7B"  # the published one
QUESTIONS = 20


class Table4(PaperExperiment):
    """ACL table 4: an 8-bit and a 4-bit base compared with the half-precision one."""

    name, source = "table-4", source(ACL, "table", 4)
    title = "speedup and quality with a quantised base"
    uses = tuple(f.name for f in fields(Request))

    def parts(self, request: Request) -> Sequence[Part]:
        """Return a row for each method and level."""
        mine = [
            Part(f"{m} {level} on {request.model}", _missing_at(m, level, request))
            for level in LEVELS
            for m in LEVEL_ROWS
        ]
        return [*mine, tuned_part(request), *model_parts([QUANTISED_MODEL], request)]

    def configs(self, request: Request) -> dict[str, RunConfig]:
        """Return a run for each level that more than its baseline can run on, which is its reference."""
        made = {}
        for level in LEVELS:
            able = [METHODS[m] for m in LEVEL_ROWS if not _missing_at(m, level, request)]
            if any(name != REFERENCE for name in able):
                able += [tuned] if (tuned := NEXT_TOKEN.requested(request)) else []
                settings = {"suite": "apps", "categories": ("sql",), "limit": QUESTIONS}
                config = config_for(as_published(request, able), able, **settings)
                made[level.lower()] = config if level == UNQUANTISED else replace(config, quantize=level.lower())
        return made

    def able(self, request: Request) -> bool:
        """Return whether a level can run."""
        return bool(self.configs(request))

    def claims(self, result: Result) -> Sequence[Claim]:
        """App. E.5: a quantised base leaves less to gain; speedups of separate runs, without intervals."""
        grid = result.grids[0]
        rows = {str(row[0]): row for row in grid.rows if row[1] == SHARED and row[2] is not None}
        whole = next((level for level in rows if level.startswith(UNQUANTISED)), UNQUANTISED)
        found = [rows[level] for level in ("INT4" if "INT4" in rows else "NF4", "INT8", whole) if level in rows]
        says = "SS-Shared gains less the fewer bits the base has"
        claim = rising(says, [(row[0], number_or_none(row[2])) for row in found])
        counts = ", ".join(dict.fromkeys(str(row[place_of(grid, "questions")]) for row in found))
        return [replace(claim, found=f"{claim.found}; {counts} questions")]

    def make(self, bench: Bench) -> Result:
        """Measure every level that can run."""
        configs = self.configs(bench.request)
        runs = {name: bench.measure(config, name) for name, config in configs.items()}
        tuned, ours = tuned_label(list(configs.values())), f"ours: {bench.request.model}"
        forms = {
            "level": "text", "method": "text", ours: "times", "95 % interval": "text", "tau": "number",
            "quality, of 100": "number", "questions": "count", QUANTISED_MODEL: "times",
            "exact match, of 100": "number",
        }  # fmt: skip
        grid = table("speedup", forms, _level_rows(runs, tuned), f"{self.source}: {self.title}")
        series = {
            name: [(f"{row[0]} {row[1]}", number_or_none(row[place_of(grid, title)])) for row in grid.rows]
            for name, title in (("ours", ours), ("published", QUANTISED_MODEL))
        }
        plot = bars(Text("figure", self.title, "Bar chart: speedup by level."), series, grid, Axis("speedup"))
        found = [f"{name.upper()}: {finding}" for name, run in runs.items() for finding in health(run)]
        machines = f"ours: {machine(next(iter(runs.values())))}"
        notes = (machines, _baseline_note(tuned), *trees_note(bench.request), *found)
        out = self.left_out(bench.request)
        return Result((grid,), (plot,), notes=(*notes, f"published: {A100}, bitsandbytes", *out))


def _missing_at(method: str, level: str, request: Request) -> str:
    name = METHODS[method]
    if level == UNQUANTISED or missing_for(name, request):
        return missing_for(name, request)
    try:
        check_quantize(level.lower(), resolve_device(request.device))
    except UserError as error:
        return str(error).partition(" needs ")[2] or str(error)
    return ""


def _baseline_note(tuned: str) -> str:
    """Return which model Baseline is, and the base of speedups. ACL table 4 has table 3's exact match for FP16."""
    over = "speedups are over plain decoding of the frozen base of the same level"
    if tuned:
        return f"{BASELINE} is plain decoding of {FINE_TUNE} ({tuned}), held as the base of its level is; {over}"
    return f"{BASELINE} is the frozen base of each level; in the paper it is {FINE_TUNE}; {over}"


def _level_name(level: str, runs: dict[str, Run]) -> str:
    """Return the paper's name of a level, with the number format of a base that is not quantised here."""
    if level != UNQUANTISED or level.lower() not in runs:
        return level
    dtype = runs[level.lower()].manifest["model"]["dtype"]
    return level if dtype == "float16" else f"{level} (here: {dtype})"


def _level_rows(runs: dict[str, Run], tuned: str) -> list[tuple[Value, ...]]:
    shown = {name: METHODS[name] for name in LEVEL_ROWS}
    if tuned:
        shown = {BASELINE: tuned, FROZEN: REFERENCE} | {name: METHODS[name] for name in LEVEL_ROWS[1:]}
    printed = {(e.values["quantization"], e.method): e for e in published("acl_table_4")}
    rows: list[tuple[Value, ...]] = []
    for level in LEVELS:
        run = runs.get(level.lower())
        ours = {} if run is None else _by_name(list(overall(run).values()), tuned)
        for method, name in shown.items():
            own, entry = ours.get((OVERALL, name)), printed.get((level, method))
            mine: tuple[Value, ...] = (None,) * 5
            if own is not None:
                mine = (own.speedup, interval_text(own), own.tau, _percent(own), own.n_questions)
            there = (None, None) if entry is None else (entry.number("speedup"), entry.number("metric"))
            rows.append((_level_name(level, runs), method, *mine, *there))
    return rows
