"""Base classes of the papers' experiments: missing requirements, runs, tables and published numbers."""

from __future__ import annotations

import csv
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pandas as pd
import torch

from specbench_ss import registry
from specbench_ss.bench.build_config import method_specs
from specbench_ss.errors import UserError
from specbench_ss.models.bundled import bundled_drafters
from specbench_ss.models.resolve import is_lab
from specbench_ss.options import REFERENCE, MethodSpec
from specbench_ss.reports.paper.meta_drafters import MODELS, at_hand
from specbench_ss.results.analysis import Results
from specbench_ss.results.concurrency import ConcurrencyRow, at_a_time
from specbench_ss.results.findings import worst_first
from specbench_ss.results.report import Bench, Column, Experiment, Form, Grid, Part, Request, Result, Value
from specbench_ss.results.summary import SummaryRow
from specbench_ss.results.text import interval
from specbench_ss.runs.config import RunConfig
from specbench_ss.stats.intervals import Floats, ratio_interval
from specbench_ss.suite import Question, SuiteRequest

A100 = "one NVIDIA A100-80G, float16, batch 1"  # EMNLP sec. 3, 2024 sec. 4.1
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
OF_THE_RUN = ("incomplete", "warnings", "sessions", "timing", "baseline-noise")  # checks that name no method
METHODS = {  # the papers' names -> ours
    "Baseline": REFERENCE,
    "2-Model SD": "sd",
    "Medusa": "medusa",
    "Medusa-2": "medusa2",
    "Hydra": "hydra",
    "Eagle": "eagle",
    "PLD": "pld",
    "REST": "rest",
    "SPACE": "space",
    "LookAhead": "lookahead",
    "SS-Lossless": "ss",
    "SS-Shared": "ss-shared",
}
TREES = (  # the papers' trees: 4 streams with 3 candidates are 120 nodes, of which 32 are kept (EMNLP app. H)
    *(f"{name}.{option}" for name in ("ss", "ss-shared") for option in ("gamma=4", "k=3", "n_draft=0", "n_keep=32",
      "prune=on", "stream_attention_top_p=64")),
    *(f"{name}.tree=published" for name in ("medusa", "medusa2", "hydra", "eagle")),
)  # fmt: skip
STEP_TIME = "relative step time"
MEASURED = {"speedup": "times", "95 % interval": "text", "τ": "number", STEP_TIME: "times", "prompts": "count"}
Row = Sequence[Value] | Mapping[str, Value]  # cells of a row in the order of the columns, or by title


class PaperExperiment(Experiment):
    """A table or figure that checks the requirements of its rows first."""

    rows: ClassVar[Mapping[str, str]]  # row name -> required method; '' for none

    def parts(self, request: Request) -> Sequence[Part]:
        """Return the rows; a name may contain {model}."""
        rows = {name.format(model=request.model): method for name, method in self.rows.items()}
        return [Part(name, missing_for(method, request) if method else "") for name, method in rows.items()]

    def able(self, request: Request) -> bool:
        """Return True if enough rows can run; by default all of them."""
        return not any(part.missing for part in self.parts(request))

    def run(self, bench: Bench) -> Result:
        if self.able(bench.request):
            return self.make(bench)
        lacking = "; ".join(
            dict.fromkeys(f"{p.name} needs {p.missing}" for p in self.parts(bench.request) if p.missing)
        )
        raise UserError(f"{self.name}: no row can run: {lacking}")

    @abstractmethod
    def make(self, bench: Bench) -> Result:
        """Compute the table or figure with the rows that can run."""


class CountedExperiment(PaperExperiment):
    """A table or figure that is computed without a model."""

    uses = ()


class TrainingExperiment(PaperExperiment):
    """A figure that trains on the lab's text."""

    uses: ClassVar[tuple[str, ...]] = ("model", "device", "dtype", "seed")

    def parts(self, request: Request) -> Sequence[Part]:
        """Return the rows; models other than the lab lack training text."""
        missing = "" if is_lab(request.model) else f"training text for {request.model}; only the lab has its own"
        return [replace(part, missing=missing or part.missing) for part in super().parts(request)]


class RunExperiment(PaperExperiment):
    """A table or figure of runs of the available methods."""

    published: ClassVar[str] = "the paper plots its values and prints none"

    def able(self, request: Request) -> bool:
        return any(spec.name != REFERENCE for config in self.configs(request).values() for spec in config.methods)

    def make(self, bench: Bench) -> Result:
        runs = {name: bench.measure(config, name) for name, config in self.configs(bench.request).items()}
        result = self.show(runs, bench.request)
        out = [f"left out: {part.name} needs {part.missing}" for part in self.parts(bench.request) if part.missing]
        found = [finding for name, run in runs.items() for finding in self.findings(name, run)]
        ours = [f"ours: {machine(next(iter(runs.values())))}"]
        ours += ["ours: with the papers' draft trees"] if bench.request.published else []
        return replace(result, notes=(*ours, *result.notes, *found, f"published: {self.published}", *out))

    @abstractmethod
    def show(self, runs: Mapping[str, Results], request: Request) -> Result:
        """Return tables, figures and notes of the runs, named as in `configs`."""

    def findings(self, name: str, run: Results) -> list[str]:
        """Return findings against the validity of one of the runs."""
        return health(run)


# -- missing requirements -----------------------------------------------------------------------------------------


def missing_for(text: str, request: Request) -> str:
    """Return the missing weights of NAME[option=value] on the request's model, or ''."""
    spec = MethodSpec.parse(text)
    method = registry.method_class(spec.name)
    options = {f.name for f in fields(method.Options)}
    given = "weights" in spec.options or any(s.startswith(f"{spec.name}.weights=") for s in request.settings)
    folder = getattr(method, "bundled_folder", "") or spec.name
    if "weights" in options and not given and not is_bundled(request.model, folder):
        return f"weights of method {spec.name} for {request.model} (--set {spec.name}.weights=PATH)"
    return ""


def is_bundled(model: str, name: str) -> bool:
    """Return True if a weights folder of this name is bundled with the model."""
    folder = bundled_drafters(model)
    return folder is not None and (folder / name).is_dir()


def model_parts(names: Iterable[str], request: Request) -> list[Part]:
    """Return the rows on published models, each with a missing requirement: the user has to name the model."""

    def missing(hub: str) -> str:
        if not at_hand(hub):
            return f"the weights {hub}"
        return f"--model {hub} and its drafters by --set" if torch.cuda.is_available() else "a CUDA device"

    return [Part(name, missing(MODELS[name].hub)) for name in names if not request.model.endswith(name)]


# -- runs ---------------------------------------------------------------------------------------------------------


def config_for(request: Request, methods: Sequence[str], **settings: Any) -> RunConfig:
    """Return a run of these methods, the reference first. The user's settings override the papers' trees.

    Raise UserError for an invalid --set.
    """
    labels = ",".join([REFERENCE, *dict.fromkeys(m for m in methods if m != REFERENCE)])
    names = {MethodSpec.parse(text).name for text in methods}
    trees = [text for text in TREES if request.published and text.partition(".")[0] in names]
    specs = method_specs(labels, (*trees, *_paper_streams(request, names), *request.settings))
    given = {name: getattr(request, name) for name in ("model", "device", "dtype", "seed", "data", "chat_template")}
    limit = settings.pop("limit", None)
    return RunConfig(methods=specs, limit=limit if request.limit is None else request.limit, **given, **settings)


def spec_for(request: Request, method: str) -> MethodSpec:
    """Return a method, NAME or NAME[option=value], with the user's settings. Raise UserError for an invalid --set."""
    return config_for(request, [method]).methods[1]


def _paper_streams(request: Request, names: Collection[str]) -> tuple[str, ...]:
    """Return the setting that gives `ss` the papers' streams if a model's folder may advise others.

    The lab's folder advises none, and --set of the user takes precedence.
    """
    given = any(text.startswith(("ss.parent=", "ss.root=", "ss.weights=")) for text in request.settings)
    if "ss" not in names or given or is_lab(request.model) or not is_bundled(request.model, "ss"):
        return ()
    return ("ss.parent=off",)


def questions(request: Request, suite: str, category: str, limit: int) -> tuple[Question, ...]:
    """Return the first questions of a category. Raise UserError if the suite has none for this model."""
    data = None if request.data is None else Path(request.data)
    suite_request = SuiteRequest((category,), limit, data, is_lab(request.model))
    return registry.load_suite(suite).load(suite_request).questions


def overall(run: Results) -> dict[str, SummaryRow]:
    """Return the summary over all tasks, by method label."""
    return {row.method: row for row in run.overall}


def measured(row: SummaryRow) -> dict[str, Value]:
    """Return the cells of the columns MEASURED."""
    cells = row.speedup, interval_text(row), row.mean_acceptance_length, row.relative_step_time, row.n_prompts
    return dict(zip(MEASURED, cells, strict=True))


def interval_text(row: SummaryRow | ConcurrencyRow) -> str | None:
    """Return the speedup's interval as text."""
    return interval(row.speedup_interval) or None


def share(
    own: Sequence[float] | Floats, other: Sequence[float] | Floats, processes: int = 1
) -> tuple[float | None, str | None]:
    """Return a sum over steps or questions [n] over another's, with its 95 % interval as text; None without values.

    processes: how many took the times in it, as in `ratio_interval`.
    """
    mine, theirs = np.asarray(own, np.float64), np.asarray(other, np.float64)
    if not len(mine) or not theirs.sum():
        return None, None
    around = ratio_interval((mine,), (theirs,), processes)
    return float(mine.sum() / theirs.sum()), interval(around) or None


def machine(run: Results) -> str:
    """Describe the machine of a run, as in 'lab, float32, cpu: AMD EPYC, 1 thread, batch 1'."""
    model, here = run.manifest["model"], run.manifest["environment"]
    on_gpu = model["device"].startswith("cuda") and here["gpus"]
    chip = here["gpus"][0]["name"] if on_gpu else (here.get("cpu") or {}).get("model")
    count = (here.get("threads") or {}).get("intra_op")
    threads = "" if on_gpu else f", {count} thread{'s' * (count != 1)}"
    return f"{model['name']}, {model['dtype']}, {model['device']}: {chip}{threads}, batch {at_a_time(run.manifest)}"


def health(run: Results) -> list[str]:
    """Return findings against the validity of a run: of single methods, then of the whole run."""
    of_methods = [f"{row.method}: {finding}" for row in run.overall for finding in row.health]
    return [*of_methods, *(check.sentence for check in worst_first(run.checks) if check.name in OF_THE_RUN)]


# -- grids --------------------------------------------------------------------------------------------------------


def table(name: str, forms: Mapping[str, str], rows: Iterable[Row], caption: str) -> Grid:
    """Return a grid.

    forms: {title: form of the column}, with the number of decimals (default 2), as in 'number 4'. rows: cells in the
    order of the columns, or by title.
    """
    columns = []
    for title, text in forms.items():
        form, _, digits = text.partition(" ")
        columns.append(Column(title, cast(Form, form), int(digits or 2)))
    ordered = ([row[title] for title in forms] if isinstance(row, Mapping) else row for row in rows)
    return Grid(name, tuple(columns), tuple(map(tuple, ordered)), caption)


def rows_of(frame: pd.DataFrame) -> list[tuple[Value, ...]]:
    """Return the rows of a frame for a grid, with None for missing values."""
    values = frame.astype(object).where(frame.notna(), None)
    return [tuple(row) for row in values.itertuples(index=False)]


# -- published tables ---------------------------------------------------------------------------------------------


@cache
def published(name: str) -> tuple[dict[str, str], ...]:
    """Return the rows of a printed table in print order, {column: text as printed}. name: that of its experiment.

    Sources: "Speculative Streaming: Efficient and Scalable Speculative Decoding with Multi-Stream Attention" (EMNLP)
    and arXiv:2402.11131 (2024), all measured on A100. Tasks have this project's names.
    """
    with (Path(__file__).parent / "published" / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return tuple(csv.DictReader(file))


def printed_number(text: str) -> float | None:
    """Return a printed number, the first of 'ROUGE-1/ROUGE-LSum'; None for an empty cell."""
    first = text.partition("/")[0]
    return float(first) if first else None
