"""Parts that the papers' experiments share: sources, missing pieces of rows, runs, grids and notes."""

from __future__ import annotations

import csv
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, cast

from specbench_ss import registry
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.models.resolve import companions, is_lab
from specbench_ss.options import REFERENCE, MethodSpec
from specbench_ss.results.checks import checks, worst_first
from specbench_ss.results.concurrency import at_a_time
from specbench_ss.results.report import Bench, Column, Experiment, Form, Grid, Part, Request, Result, Value
from specbench_ss.results.summary import OVERALL, SummaryRow, summarise
from specbench_ss.results.text import interval
from specbench_ss.runs.config import RunConfig
from specbench_ss.runs.records import Run
from specbench_ss.suite import Question, SuiteRequest

ACL, OLD = "ACL", "2024"
A100 = "one NVIDIA A100-80G, float16, batch 1"  # ACL sec. 3, 2024 sec. 4.1
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
OF_THE_RUN = ("incomplete", "warnings", "sessions", "disturbed", "noise")  # checks that name no method
METHODS = {  # the papers' names -> ours; a name that no plugin has yet is a missing piece
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
TREES = (  # the papers' trees: 4 streams with 3 candidates are 120 nodes, of which 32 are kept (ACL app. H)
    *(f"{name}.{option}" for name in ("ss", "ss-shared") for option in ("gamma=4", "k=3", "n_draft=0", "n_keep=32",
      "prune=on", "stream_attention_top_p=64")),
    *(f"{name}.tree=published" for name in ("medusa", "medusa2", "hydra", "eagle")),
)  # fmt: skip
STEP_TIME = "step time over ar's"
MEASURED = {"speedup": "times", "95 % interval": "text", "tau": "number", STEP_TIME: "times", "prompts": "count"}


def source(paper: str, kind: str, number: int | str) -> str:
    """Return the name of a source, as in 'ACL table 3' or 'ACL appendix C'."""
    return f"{paper} {kind} {number}"


class PaperExperiment(Experiment):
    """A table or figure that checks its rows before it is made."""

    def able(self, request: Request) -> bool:
        """Return whether enough rows can run; without another rule, all of them have to."""
        return not any(part.missing for part in self.parts(request))

    def run(self, bench: Bench) -> Result:
        """Make the table or figure. Raises UserError, with what each row lacks, where it cannot be made."""
        if self.able(bench.request):
            return self.make(bench)
        lacking = "; ".join(
            dict.fromkeys(f"{p.name} needs {p.missing}" for p in self.parts(bench.request) if p.missing)
        )
        raise UserError(f"{self.name}: no row can run: {lacking}")

    @abstractmethod
    def make(self, bench: Bench) -> Result:
        """Make the table or figure with the rows that can run."""

    def left_out(self, request: Request) -> list[str]:
        """Return a note for each row that cannot run."""
        return [f"left out: {part.name} needs {part.missing}" for part in self.parts(request) if part.missing]


class CountedExperiment(PaperExperiment):
    """A table or figure that is computed without a model. subject: the name of its single row."""

    uses = ()
    subject: ClassVar[str]

    def parts(self, request: Request) -> Sequence[Part]:
        """Return a single row, which always runs."""
        return [Part(self.subject)]


class TrainingExperiment(PaperExperiment):
    """A figure that trains on the lab's text."""

    rows: ClassVar[tuple[str, ...]]  # names of its rows

    def parts(self, request: Request) -> Sequence[Part]:
        """Return the rows; those of another model than the lab lack text in its chat form."""
        missing = "" if is_lab(request.model) else f"training text for {request.model}: only the lab brings its own"
        return [Part(name, missing) for name in self.rows]


# -- what a row lacks ---------------------------------------------------------------------------------------------


def missing_for(text: str, request: Request) -> str:
    """Return what NAME[option=value] lacks on the request's model: a method, an option or weights; '' for nothing."""
    spec = MethodSpec.parse(text)
    if spec.name not in registry.names(registry.METHODS):
        return f"method {spec.name}"
    method = registry.method_class(spec.name)
    known = {f.name for f in fields(method.Options)}
    unknown = [name for name in spec.options if name not in known]
    if unknown:
        return f"option {unknown[0]} of method {spec.name}"
    given = "weights" in spec.options or any(s.startswith(f"{spec.name}.weights=") for s in request.settings)
    folder = getattr(method, "companion", spec.name)
    if "weights" in known and not given and not comes_along(request.model, folder):
        return f"weights of method {spec.name} for {request.model} (--set {spec.name}.weights=PATH)"
    return ""


def comes_along(model: str, name: str) -> bool:
    """Return whether the model came with a folder of this name, where methods look for their weights too."""
    folder = companions(model)
    return folder is not None and (folder / name).is_dir()


def model_parts(names: Iterable[str], request: Request) -> list[Part]:
    """Return the rows on published models. Each lacks something, since the user has to name such a model."""
    import torch

    from specbench_ss.reports.paper.meta_drafters import MODELS, at_hand

    def missing(hub: str) -> str:
        if not at_hand(hub):
            return f"the weights {hub}"
        return f"--model {hub} and its drafters by --set" if torch.cuda.is_available() else "a CUDA device"

    return [Part(name, missing(MODELS[name].hub)) for name in names if not request.model.endswith(name)]


# -- runs ---------------------------------------------------------------------------------------------------------


def as_published(request: Request, methods: Sequence[str]) -> Request:
    """Add the papers' trees of these methods to the request's settings if it asks for them; user settings win."""
    names = {MethodSpec.parse(text).name for text in methods}
    trees = tuple(text for text in TREES if text.partition(".")[0] in names)
    return replace(request, settings=(*trees, *request.settings)) if request.published else request


def trees_note(request: Request) -> list[str]:
    """Return the note of a table that drafts the papers' trees in place of those that came with the weights."""
    return ["ours: with the papers' draft trees"] if request.published else []


def config_for(request: Request, methods: Sequence[str], **settings: Any) -> RunConfig:
    """Return a run of these methods, the reference first, with the request's settings.

    Raises UserError for a bad --set.
    """
    from specbench_ss.bench.build_config import method_specs

    asked = ",".join([REFERENCE, *dict.fromkeys(m for m in methods if m != REFERENCE)])
    specs = method_specs(asked, (*_paper_streams(request, methods), *request.settings))
    given = {name: getattr(request, name) for name in ("model", "device", "dtype", "seed", "data", "chat_template")}
    limit = settings.pop("limit", None)
    return RunConfig(methods=specs, limit=limit if request.limit is None else request.limit, **given, **settings)


def _paper_streams(request: Request, methods: Sequence[str]) -> tuple[str, ...]:
    """Return the setting that gives `ss` the papers' streams, where a model's folder may advise others.

    The lab's advises none, and what the user gives with --set comes first.
    """
    drafts = any(MethodSpec.parse(text).name == "ss" for text in methods)
    given = any(text.startswith(("ss.parent=", "ss.root=", "ss.weights=")) for text in request.settings)
    if not drafts or given or is_lab(request.model) or not comes_along(request.model, "ss"):
        return ()
    return ("ss.parent=off",)


def questions(request: Request, suite: str, category: str, limit: int) -> tuple[Question, ...]:
    """Return the first questions of a category. Raises UserError where the suite has none for this model."""
    data = None if request.data is None else Path(request.data)
    asked = SuiteRequest((category,), limit, data, is_lab(request.model))
    return registry.load_suite(suite).load(asked).questions


def first_turn(target: Target, question: Question) -> list[int]:
    """Return the token ids of the conversation that asks the first turn."""
    return target.encode_chat(question.messages())


def overall(run: Run) -> dict[str, SummaryRow]:
    """Return the summary over all tasks, by method label."""
    return {row.method: row for row in summarise(run) if row.category == OVERALL}


def measured(row: SummaryRow) -> tuple[Value, ...]:
    """Return the cells of the columns MEASURED."""
    return (row.speedup, interval_text(row), row.tau, step_time(row), row.n_prompts)


def interval_text(row: SummaryRow) -> str | None:
    """Return the speedup's interval as text."""
    return interval(row.speedup_interval) or None


def step_time(row: SummaryRow) -> float | None:
    """Return the time of a step over that of the reference."""
    return None if not row.step_ratio else 1 / row.step_ratio


def machine(run: Run) -> str:
    """Describe the machine of a run, as in 'lab, float32, cpu: AMD EPYC, 1 thread, batch 1'."""
    model, here = run.manifest["model"], run.manifest["environment"]
    on_gpu = model["device"].startswith("cuda") and here["gpus"]
    chip = here["gpus"][0]["name"] if on_gpu else (here.get("cpu") or {}).get("model")
    count = (here.get("threads") or {}).get("intra_op")
    threads = "" if on_gpu else f", {count} thread{'s' * (count != 1)}"
    return f"{model['name']}, {model['dtype']}, {model['device']}: {chip}{threads}, batch {at_a_time(run.manifest)}"


def health(run: Run) -> list[str]:
    """Return what makes the numbers of a run hard to believe: of single methods, then of the whole run."""
    rows = list(overall(run).values())
    of_methods = [f"{row.method}: {finding}" for row in rows for finding in row.health]
    return [*of_methods, *(check.sentence for check in worst_first(checks(run, rows)) if check.name in OF_THE_RUN)]


# -- grids --------------------------------------------------------------------------------------------------------


def table(name: str, forms: Mapping[str, str], rows: Iterable[Sequence[Value]], caption: str) -> Grid:
    """Return a grid. forms: {title: form of the column}, with digits after the point, if not two, as in 'number 4'."""
    columns = []
    for title, text in forms.items():
        form, _, digits = text.partition(" ")
        columns.append(Column(title, cast(Form, form), int(digits or 2)))
    return Grid(name, tuple(columns), tuple(tuple(row) for row in rows), caption)


def records(grid: Grid) -> list[dict[str, Value]]:
    """Return the rows of a grid by column title."""
    return [dict(zip((column.title for column in grid.columns), row, strict=True)) for row in grid.rows]


# -- published tables ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entry:
    """One printed row. values: {column: text as printed}, without columns that are empty in print."""

    task: str
    model: str
    method: str
    values: dict[str, str]

    def number(self, column: str) -> float | None:
        """Return the value of a column, of 'ROUGE-1/ROUGE-LSum' the first; None where nothing is printed."""
        text = self.values.get(column, "").partition("/")[0]
        return float(text) if text else None


@cache
def published(name: str) -> tuple[Entry, ...]:
    """Return the rows of a printed table in print order. name: 'acl_table_1', 'old_table_2' and so on.

    Sources: "Speculative Streaming: Efficient and Scalable Speculative Decoding with Multi-Stream Attention" (ACL) and
    arXiv:2402.11131 (2024, `old_`), all measured on A100. Tasks have this project's names.
    """
    with (Path(__file__).parent / "published" / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return tuple(_entry(row) for row in csv.DictReader(file))


def _entry(row: dict[str, str]) -> Entry:
    values = {k: v for k, v in row.items() if k not in ("task", "model", "method") and v}
    return Entry(row["task"], row["model"], row["method"], values)
