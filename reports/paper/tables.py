"""Tables of the papers: a run of the same methods on the same tasks, with the published numbers alongside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import numpy as np

from specbench_ss.errors import UserError
from specbench_ss.models.devices import resolve_device
from specbench_ss.models.quantize import check_quantize
from specbench_ss.options import REFERENCE
from specbench_ss.reports.paper.claims import at_least, at_most, number_or_none, point, rising, same_order
from specbench_ss.reports.paper.cost_figures import parameter_grid
from specbench_ss.reports.paper.experiment import (
    A100,
    METHODS,
    MT_BENCH,
    RunExperiment,
    config_for,
    health,
    interval_text,
    is_bundled,
    missing_for,
    model_parts,
    printed_number,
    published,
    share,
    table,
)
from specbench_ss.reports.paper.figures import bars
from specbench_ss.results.analysis import Results
from specbench_ss.results.quality import MARGIN, conservative_interval, non_inferiority
from specbench_ss.results.report import Claim, Column, Grid, Part, Request, Result, Value
from specbench_ss.results.summary import OVERALL, SummaryRow
from specbench_ss.results.text import end, interval, interval_of, pluralize
from specbench_ss.runs.config import RunConfig
from specbench_ss.runs.records import Run
from specbench_ss.stats.intervals import Floats
from specbench_ss.stats.pairs import Pairs

BASELINE, FROZEN = "Baseline", "Frozen base"  # the latter is a separate row if Baseline is a fine-tune
SHARED, DRAFT_MODEL = "SS-Shared", "2-Model SD"
FINE_TUNE = "the base fine-tuned with a LoRA on next tokens alone"


# -- columns and weights ------------------------------------------------------------------------------------------


METRICS = {  # columns of the printed tables -> title and form
    "speedup": ("speedup", "times"),
    "tau": ("mean accepted tokens (τ)", "number"),
    "score": ("quality (published: GPT-4 score of 10; ours: the suite's metrics of 100)", "number"),
    "target_calls": ("target calls per sample", "number"),
    "draft_calls": ("draft calls per sample", "number"),
    "latency_ms": ("wall time per sample, ms", "number"),
    "metric": ("quality (published: exact match or ROUGE-1; ours: the suite's)", "number"),
}
SUMMARY_COLUMNS = {  # printed columns -> columns of the summary, if they have other names
    "tau": "mean_acceptance_length",
    "target_calls": "num_target_forwards",
    "draft_calls": "num_draft_forwards",
}


def value_of(row: SummaryRow | None, column: str) -> float | None:
    """Return this project's value of a printed column."""
    if row is None:
        return None
    if column in ("score", "metric"):
        return None if row.quality is None else 100 * row.quality
    if column == "latency_ms":
        return None if not row.tokens or not row.tokens_per_s else 1000 * row.tokens / row.tokens_per_s
    value: float | None = getattr(row, SUMMARY_COLUMNS.get(column, column))
    return value


@dataclass(frozen=True, slots=True)
class Companion:
    """Weights, trained as in the papers, that replace a method's default weights if they are bundled with the model.

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
        return f"{self.method}[weights={self.folder}]" if is_bundled(request.model, self.folder) else ""

    def note(self, row: str, request: Request) -> str:
        """Return the note on the table's row."""
        if given := self._given(request):
            return f"{row} has the weights {given} of --set"
        absent = f"{self.absent}: --set {self.method}.weights=PATH gives others"
        return f"{row} {self.present if self.requested(request) else absent}"

    def _given(self, request: Request) -> str:
        option = f"{self.method}.weights="
        return next((text.removeprefix(option) for text in reversed(request.settings) if text.startswith(option)), "")


NEXT_TOKEN = Companion(
    "ss-shared-ar", "next-token"
)  # autoregressive decoding of the base with a LoRA on next tokens alone
EQ1 = Companion(
    "ss-shared",
    "ss-shared-eq1",
    "is trained by the 2024 paper's eq. 1: main rows do not see streams",
    "is trained by eq. 3 of the EMNLP paper, under which main rows see their streams, unlike the 2024 paper's (eq. 1)",
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
    missing = "" if NEXT_TOKEN.requested(request) else f"its LoRA (--set {NEXT_TOKEN.method}.weights=PATH)"
    return Part(f"{BASELINE}'s fine-tune on next tokens", missing)


def tuned_label(run: Results) -> str:
    """Return the label of Baseline's fine-tune in a run; '' if it lacks it."""
    return next((label for label in run.run.labels if label.partition("[")[0] == NEXT_TOKEN.method), "")


# -- a table as one run -------------------------------------------------------------------------------------------


class RunTable(RunExperiment):
    """A table of a paper as one run. Tasks of the published data are the suite's categories, or all of the run.

    Every speedup is over `ar`, autoregressive decoding of the frozen base, whose time per token is Baseline's of 1.
    """

    suite: ClassVar[str]
    categories: ClassVar[tuple[str, ...]]
    limit: ClassVar[int | None] = None  # questions of a task; None: the suite's usual number
    extra_rows: ClassVar[tuple[str, ...]] = ()  # rows that the paper lacks, so that ours has a counterpart
    companions: ClassVar[Mapping[str, Companion]] = {}  # weights of rows that are not the method's own
    fine_tunes: ClassVar[bool] = False  # the paper's models, including Baseline's, are fine-tuned on the tasks
    uses = tuple(f.name for f in fields(Request))
    published = A100

    def __init__(self) -> None:
        self.printed = published(self.name)
        self.methods = list(dict.fromkeys([*(row["method"] for row in self.printed), *self.extra_rows]))
        self.models = list(dict.fromkeys(row["model"] for row in self.printed))
        self.metrics = [metric for metric in METRICS if metric in self.printed[0]]
        self.tunes_baseline = self.fine_tunes and BASELINE in self.methods  # Baseline is a fine-tune of the base

    def parts(self, request: Request) -> Sequence[Part]:
        """Return a row for each method on the request's model, and one for each published model."""
        requested = self._requested(request)
        mine = [Part(f"{m} on {request.model}", missing_for(text, request)) for m, text in requested.items()]
        return [*mine, *([tuned_part(request)] if self.tunes_baseline else []), *model_parts(self.models, request)]

    def configs(self, request: Request) -> dict[str, RunConfig]:
        """Return one run with every method that can run, and with autoregressive decoding of Baseline's model."""
        able = [text for text in self._requested(request).values() if not missing_for(text, request)]
        if self.tunes_baseline and (tuned := NEXT_TOKEN.requested(request)):
            able.append(tuned)
        settings = {"suite": self.suite, "categories": self.categories, "limit": self.limit}
        return {"run": config_for(request, able, **settings)}

    def show(self, runs: Mapping[str, Results], request: Request) -> Result:
        run = runs["run"]
        tuned = tuned_label(run)
        grids = [self._grid(metric, run, tuned) for metric in self.metrics]
        title = METRICS[self.metrics[0]][0]
        numbers = [column.title for column in grids[0].columns if column.form not in ("text", "count")]
        figure = bars("figure", self.title, grids[0], "{task}: {method}", numbers, title)
        grids += self._pairs(run, tuned)
        if "parameters" in self.printed[0]:
            grids.append(parameter_grid(self.source))
        requested = self._requested(request)
        there = [row for row in self.companions if row in requested and not missing_for(requested[row], request)]
        weights = (self.companions[row].note(row, request) for row in there)
        return Result(tuple(grids), (figure,), notes=(*weights, *self._model_note(tuned)))

    def claims(self, result: Result) -> Sequence[Claim]:
        """Test the published order of methods on each task, and the pairs that the paper compares."""
        grids = {grid.name: grid for grid in result.grids}
        made = [claim for name in ("speedup", "tau") if name in grids for claim in self._orders(grids[name])]
        made += kept_claims(grids[KEPT]) if KEPT in grids else []
        return made + (draft_model_claims(grids[AGAINST]) if AGAINST in grids else [])

    def _requested(self, request: Request) -> dict[str, str]:
        """Return each method of the paper as a run here asks for it."""
        own = {m: c.requested(request) for m, c in self.companions.items()}
        return {m: own.get(m) or METHODS[m] for m in self.methods}

    def _model_note(self, tuned: str) -> list[str]:
        """Return whose quality and whose time each row shows, where the paper fine-tunes the models of all of them."""
        if not self.fine_tunes:
            return []
        kept = "SS-Shared has a model of its own, all other methods draft for the frozen base and have its quality"
        theirs = "speedups are over `ar` of the frozen base; in the paper all of it is of fine-tuned models"
        if not self.tunes_baseline:
            return [f"{kept}; {theirs}"]
        whose = f"{FINE_TUNE} ({tuned}), shown next to the frozen base" if tuned else "the frozen base"
        return [f"the quality of {BASELINE} is that of {whose}; {kept}; {theirs}"]

    def _orders(self, grid: Grid) -> Iterator[Claim]:
        """Test the order on the published model that has the most of our methods."""
        ours = grid.columns[2].title
        shown = [row for row in grid.records() if number_or_none(row[ours]) is not None]
        for task in dict.fromkeys(row[0] for row in grid.rows):
            columns = {
                title: {str(row["method"]): number_or_none(row[title]) for row in shown if row["task"] == task}
                for title in (ours, *(column.title for column in grid.columns if column.title in self.models))
            }
            mine = columns.pop(ours)
            known = {m: {k: v for k, v in values.items() if v is not None} for m, values in columns.items()}
            best = max(known, key=lambda model: len(known[model]))
            yield from same_order(known[best], mine, f"{task}, order by {grid.name} on {best}")

    def _grid(self, metric: str, run: Results, tuned: str) -> Grid:
        """Return a row for each task and method: ours, then the published value of each model."""
        printed = {(r["task"], r["method"], r["model"]): printed_number(r[metric]) for r in self.printed}
        spread, (title, form) = metric == "speedup", METRICS[metric]
        ours = _by_name(run.rows, tuned)
        shown = shown_methods(self.methods, tuned if metric == "metric" else "")
        rows: list[tuple[Value, ...]] = []
        for task in dict.fromkeys(r["task"] for r in self.printed):
            for method, name in shown.items():
                row = ours.get((task if task in self.categories else OVERALL, name))
                around = (row and interval_text(row),) if spread else ()
                mine = (value_of(row, metric), *around, row and row.n_prompts)
                rows.append((task, method, *mine, *(printed.get((task, method, m)) for m in self.models)))
        forms = {"task": "text", "method": "text", f"ours: {run.manifest['model']['name']}": form}
        forms |= {"95 % interval": "text"} if spread else {}
        forms |= {"prompts": "count"} | dict.fromkeys(self.models, form)
        return table(metric, forms, rows, f"{self.source}: {title}")

    def _pairs(self, results: Results, tuned: str) -> Iterator[Grid]:
        """Yield the pairs of rows that the paper's text compares, where both were measured, with intervals."""
        run, valid = results.run, [row.method for row in results.overall if row.comparison != "invalid"]
        labels = {label.partition("[")[0]: label for label in valid if label != tuned}
        shared, draft = (labels.get(METHODS[row]) for row in (SHARED, DRAFT_MODEL))
        if shared and "metric" in self.metrics and BASELINE in self.methods:
            other = FINE_TUNE if tuned else "the frozen base (in the paper: its fine-tune on next tokens)"
            yield quality_kept(run, (shared, tuned or run.baseline), other, self.source)
        if shared and draft and "latency_ms" in self.metrics:
            yield against_draft_model(run, (shared, draft), self.source)


def shown_methods(rows: Sequence[str], tuned: str) -> dict[str, str]:
    """Return the method of each row.

    tuned: that of Baseline's fine-tune, if the run has it; then the frozen base has a row of its own.
    """
    baseline = {BASELINE: tuned, FROZEN: REFERENCE} if tuned else {}
    return baseline | {row: METHODS[row] for row in rows if row not in baseline}


def _by_name(rows: Sequence[SummaryRow], tuned: str) -> dict[tuple[str, str], SummaryRow]:
    """Return rows by task and method name without options; those of the fine-tune by its label."""
    return {(row.task, row.method if row.method == tuned else row.method.partition("[")[0]): row for row in rows}


class Table1(RunTable):
    """EMNLP table 1: speedup and quality on MT-Bench."""

    name, source = "table-1", "EMNLP table 1"
    title = "speedup and quality on MT-Bench"
    suite, categories = "specbench", MT_BENCH


class Table2(RunTable):
    """EMNLP table 2: the other tasks of Spec-Bench."""

    name, source = "table-2", "EMNLP table 2"
    title = "speedup by task of Spec-Bench, lossless methods"
    suite, categories = "specbench", ("translation", "summarization", "qa", "math_reasoning", "rag")


class _Apps(RunTable):
    """Tables on the three applications.

    The papers fine-tune every model on the tasks: Baseline is `ar` of the base with a LoRA that learnt next
    tokens alone (EMNLP table 3, caption; app. A), and Medusa, Eagle and the draft model draft for it. Here they draft
    for the frozen base, so each row's speedup is over `ar` of that base, and so is SS-Shared's. A merged
    LoRA has the base's shapes, so that a step of either takes as long; how many tokens are accepted may differ.
    Baseline's quality alone is the fine-tune's, where that LoRA is at hand.
    """

    fine_tunes = True
    limit = 40  # of a task: with eight, one answer moves exact match by 12 of 100
    suite, categories = "apps", ("sql", "dialogue_summary", "meaning_representation")
    extra_rows = ("SS-Lossless",)
    companions = {DRAFT_MODEL: APP_DRAFT}


class Table3(_Apps):
    """EMNLP table 3: speedup, acceptance, quality and parameters on the applications."""

    name, source = "table-3", "EMNLP table 3"
    title = "applications: speedup, mean accepted tokens, quality, extra parameters"


class Table5(_Apps):
    """EMNLP table 5: calls and latency, compared with a draft model."""

    name, source = "table-5", "EMNLP table 5"
    title = "applications: calls and latency against two-model speculative decoding"


class Table6(RunTable):
    """EMNLP table 6: acceptance on MT-Bench."""

    name, source = "table-6", "EMNLP table 6"
    title = "mean accepted tokens on MT-Bench"
    suite, categories = "specbench", MT_BENCH


class _OldApps(_Apps):
    """Tables of the 2024 paper, whose main rows do not see streams (eq. 1)."""

    companions = {**_Apps.companions, SHARED: EQ1}


class OldTable1(_OldApps):
    """2024 table 1: applications."""

    name, source = "2024-table-1", "2024 table 1"
    title = "applications: speedup, call reduction, quality, extra parameters"


class OldTable2(_OldApps):
    """2024 table 2: compared with a draft model."""

    name, source = "2024-table-2", "2024 table 2"
    title = "applications: calls and latency against two-model speculative decoding"


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
            around = conservative_interval(own - others)
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
            both = share(*seconds), share(*_by_question(run, pair, task, "steps"), processes=0)
            rows.append((task, *both[0], *both[1], len(seconds[0])))
    caption = f"{source}: {SHARED} over {DRAFT_MODEL}"
    return Grid(AGAINST, (*columns, Column("questions", "count")), tuple(rows), caption)


def kept_claims(grid: Grid) -> list[Claim]:
    """Test that shared mode costs no quality (EMNLP table 3), as non-inferiority within a margin."""
    other, made = grid.columns[2].title, []
    for task, own, theirs, difference, around, count in grid.rows:
        statement = f"{task}: shared mode costs no quality against {other} (here: at most {-LOST:g} of 100)"
        found = f"{own:.1f} and {theirs:.1f} of 100, difference {end(float(difference or 0), 1, 0)}"
        found += f" ({around})" if around else ""
        bounds = interval_of(around)
        verdict = non_inferiority(bounds and (bounds[0] / 100, bounds[1] / 100), MARGIN)
        made.append(Claim(statement, HOLDS[verdict], f"{found}, {pluralize(int(count or 0), 'question')}"))
    return made


def draft_model_claims(grid: Grid) -> list[Claim]:
    """Test that SS-Shared answers sooner though it calls the target more often (EMNLP table 5, 2024 table 2)."""
    made = []
    for row in grid.rows:
        for statement, hold, title in (
            (f"{row[0]}: {SHARED} answers sooner than {DRAFT_MODEL}", at_most, TIME),
            (f"{row[0]}: {SHARED} calls the target more often than {DRAFT_MODEL}", at_least, CALLS),
        ):
            claim = hold(f"{statement} (here: its {title} over the other's)", point(grid, row, title), 1.0)
            made.append(replace(claim, found=f"{claim.found}, {pluralize(int(row[-1] or 0), 'question')}"))
    return made


def _by_question(run: Run, pair: Pair, task: str, column: str) -> tuple[Floats, Floats]:
    """Return means of a column over the samples of each question that both answered, [questions] each."""
    rows = [[r for r in run.rows if r.method == label and r.category == task] for label in pair]
    given: dict[str, list[tuple[float, float]]] = {}
    pairs = Pairs(*rows)
    for own, other in zip(pairs.own, pairs.other, strict=True):
        mine, theirs = getattr(own, column), getattr(other, column)
        if mine is not None and theirs is not None:
            given.setdefault(own.question_id, []).append((mine, theirs))
    means = np.array([np.mean(both, axis=0) for both in given.values()], dtype=np.float64).reshape(-1, 2)
    return means[:, 0], means[:, 1]


# -- quantised bases: a run for each level -------------------------------------------------------------------------

UNQUANTISED = "FP16"  # in the paper; here the model in the dtype of the run, which its rows name
LEVELS = (UNQUANTISED, "INT8", "INT4", "NF4")  # the last: 4 bits by the paper's package, which CPUs compute with too
LEVEL_ROWS = (BASELINE, SHARED, "SS-Lossless")
QUANTISED_MODEL = "Mistral-7B"  # the published one
QUESTIONS = 20


class Table4(RunExperiment):
    """EMNLP table 4: an 8-bit and a 4-bit base compared with the half-precision one."""

    name, source = "table-4", "EMNLP table 4"
    title = "speedup and quality with a quantised base"
    uses = tuple(f.name for f in fields(Request))
    published = f"{A100}, bitsandbytes"

    def parts(self, request: Request) -> Sequence[Part]:
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
                config = config_for(request, able, **settings)
                made[level.lower()] = config if level == UNQUANTISED else replace(config, quantize=level.lower())
        return made

    def findings(self, name: str, run: Results) -> list[str]:
        return [f"{name.upper()}: {finding}" for finding in health(run)]

    def claims(self, result: Result) -> Sequence[Claim]:
        """Test app. E.5: a quantised base leaves less to gain; speedups of separate runs, without intervals."""
        rows = {str(row["level"]): row for row in result.grids[0].records() if row["method"] == SHARED}
        ours = result.grids[0].columns[2].title
        rows = {level: row for level, row in rows.items() if row[ours] is not None}
        whole = next((level for level in rows if level.startswith(UNQUANTISED)), UNQUANTISED)
        levels = [level for level in ("INT4" if "INT4" in rows else "NF4", "INT8", whole) if level in rows]
        statement = "SS-Shared gains less the fewer bits the base has"
        claim = rising(statement, [(level, number_or_none(rows[level][ours])) for level in levels])
        counts = ", ".join(dict.fromkeys(str(rows[level]["questions"]) for level in levels))
        return [replace(claim, found=f"{claim.found}; {counts} questions")]

    def show(self, runs: Mapping[str, Results], request: Request) -> Result:
        tuned, ours = tuned_label(next(iter(runs.values()))), f"ours: {request.model}"
        forms = {
            "level": "text", "method": "text", ours: "times", "95 % interval": "text", "τ": "number",
            "quality, of 100": "number", "questions": "count", QUANTISED_MODEL: "times",
            "exact match, of 100": "number",
        }  # fmt: skip
        grid = table("speedup", forms, _level_rows(runs, tuned), f"{self.source}: {self.title}")
        columns = {"ours": ours, "published": QUANTISED_MODEL}
        figure = bars("figure", self.title, grid, "{level} {method}", columns, "speedup")
        over = "speedups are over autoregressive decoding of the frozen base of the same level"
        note = f"{BASELINE} is the frozen base of each level; in the paper it is {FINE_TUNE}; {over}"
        if tuned:  # EMNLP table 4 has table 3's exact match for FP16
            note = f"{BASELINE} is `ar` of {FINE_TUNE} ({tuned}), with the quantization of its level; {over}"
        return Result((grid,), (figure,), notes=(note,))


def _missing_at(method: str, level: str, request: Request) -> str:
    name = METHODS[method]
    if level == UNQUANTISED or missing_for(name, request):
        return missing_for(name, request)
    try:
        check_quantize(level.lower(), resolve_device(request.device))
    except UserError as error:
        return str(error).partition(" needs ")[2] or str(error)
    return ""


def _level_rows(runs: Mapping[str, Results], tuned: str) -> Iterator[tuple[Value, ...]]:
    """Yield the rows of every level; of a base that is not quantised, the number format here is named too."""
    printed = {(row["quantization"], row["method"]): row for row in published("table-4")}
    for level in LEVELS:
        run, title = runs.get(level.lower()), level
        ours = {} if run is None else _by_name(run.overall, tuned)
        if run and level == UNQUANTISED and (dtype := run.manifest["model"]["dtype"]) != "float16":
            title = f"{level} (here: {dtype})"
        for method, name in shown_methods(LEVEL_ROWS, tuned).items():
            own, theirs = ours.get((OVERALL, name)), printed.get((level, method), {})
            mine: tuple[Value, ...] = (None,) * 5
            if own is not None:
                tau, quality = own.mean_acceptance_length, value_of(own, "metric")
                mine = (own.speedup, interval_text(own), tau, quality, own.n_questions)
            yield (title, method, *mine, *(printed_number(theirs.get(name, "")) for name in ("speedup", "metric")))
