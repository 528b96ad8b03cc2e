"""ACL table 4: an 8-bit and a 4-bit base compared with the half-precision one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from specbench_ss.errors import UserError
from specbench_ss.models.devices import resolve_device
from specbench_ss.models.quantize import check_quantize
from specbench_ss.options import REFERENCE
from specbench_ss.reports.paper.application_pairs import SHARED
from specbench_ss.reports.paper.claims import number_or_none, place_of, rising
from specbench_ss.reports.paper.companions import NEXT_TOKEN
from specbench_ss.reports.paper.figures import A100, ACL, axes, bars, health, machine, source
from specbench_ss.reports.paper.missing_parts import (
    METHODS,
    as_published,
    config_for,
    model_parts,
    nothing_runs,
    of_method,
    told_trees,
)
from specbench_ss.reports.paper.published import published
from specbench_ss.reports.paper.tables import BASELINE, FINE_TUNE, FROZEN
from specbench_ss.results.report import Bench, Claim, Column, Experiment, Grid, Part, Plot, Request, Result, Value
from specbench_ss.results.summary import OVERALL, SummaryRow, summarise
from specbench_ss.results.text import interval
from specbench_ss.runs.config import RunConfig
from specbench_ss.runs.records import Run

UNQUANTISED = "FP16"  # in the paper; here the model in the dtype of the run, which its rows name
LIMIT = 20  # questions
LEVELS = (UNQUANTISED, "INT8", "INT4", "NF4")  # the last: 4 bits by the paper's package, which CPUs compute with too
ROWS = (BASELINE, SHARED, "SS-Lossless")
OURS, PUBLISHED = 2, "Mistral-7B"  # place of our speedups in the table; the published model


class Table4(Experiment):
    """The experiment `table-4`."""

    name = "table-4"
    uses = tuple(f.name for f in fields(Request))
    title = "speedup and quality with a quantised base"
    source = source(ACL, "table", 4)

    def parts(self, request: Request) -> Sequence[Part]:
        """Return a row for each method and level."""
        mine = [Part(f"{m} {level} on {request.model}", _missing(m, level, request)) for level in LEVELS for m in ROWS]
        tuned = Part(f"{BASELINE}'s fine-tune on next tokens", NEXT_TOKEN.lacks("its LoRA", request))
        return [*mine, tuned, *model_parts([PUBLISHED], request)]

    def configs(self, request: Request) -> dict[str, RunConfig]:
        """Return a run for each level. Its reference is the base of the same level."""
        made = {level.lower(): _config(level, request) for level in LEVELS}
        return {name: config for name, config in made.items() if config is not None}

    def claims(self, result: Result) -> Sequence[Claim]:
        """App. E.5: a quantised base leaves less to gain; speedups of separate runs, without intervals."""
        grid = result.grids[0]
        rows = {str(row[0]): row for row in grid.rows if row[1] == SHARED and row[OURS] is not None}
        whole = next((level for level in rows if level.startswith(UNQUANTISED)), UNQUANTISED)
        found = [rows[level] for level in ("INT4" if "INT4" in rows else "NF4", "INT8", whole) if level in rows]
        says = "SS-Shared gains less the fewer bits the base has"
        claim = rising(says, [(row[0], number_or_none(row[OURS])) for row in found])
        asked = place_of(grid, "questions")
        counts = ", ".join(dict.fromkeys(str(row[asked]) for row in found))
        return [replace(claim, found=f"{claim.found}; {counts} questions")]

    def run(self, bench: Bench) -> Result:
        """Measure every level that can run."""
        parts, configs = self.parts(bench.request), self.configs(bench.request)
        if not configs:
            raise nothing_runs(self.name, parts)
        runs = {name: bench.measure(config, name) for name, config in configs.items()}
        tuned = next((s.label for c in configs.values() for s in c.methods if s.name == NEXT_TOKEN.method), "")
        rows = tuple(_rows(runs, tuned))
        grid = Grid("speedup", _columns(bench.request.model), rows, f"{self.source}: {self.title}")
        series = {
            name: [(f"{row[0]} {row[1]}", number_or_none(row[at])) for row in grid.rows]
            for name, at in (("ours", OURS), ("published", place_of(grid, PUBLISHED)))
        }
        plot = Plot("figure", self.title, "Bar chart: speedup by level.", bars(series), axes("", "speedup"), grid)
        ours = f"ours: {machine(next(iter(runs.values())))}"
        notes = [ours, _whose(tuned), *told_trees(bench.request), *_health(runs)]
        out = [f"left out: {p.name} needs {p.missing}" for p in parts if p.missing]
        return Result((grid,), (plot,), notes=(*notes, f"published: {A100}, bitsandbytes", *out))


def _config(level: str, request: Request) -> RunConfig | None:
    """Return the run of a level; None where only its baseline, or nothing, can run."""
    able = [METHODS[m] for m in ROWS if not _missing(m, level, request)]
    if not any(name != REFERENCE for name in able):
        return None
    able += [tuned] if (tuned := NEXT_TOKEN.asked(request)) else []
    config = config_for(as_published(request, able), able, suite="apps", categories=("sql",), limit=LIMIT)
    return config if level == UNQUANTISED else replace(config, quantize=level.lower())


def _missing(method: str, level: str, request: Request) -> str:
    name = METHODS[method]
    if level == UNQUANTISED or of_method(name, request):
        return of_method(name, request)
    try:
        check_quantize(level.lower(), resolve_device(request.device))
    except UserError as error:
        return str(error).partition(" needs ")[2] or str(error)
    return ""


def _columns(model: str) -> tuple[Column, ...]:
    return (
        Column("level", "text"),
        Column("method", "text"),
        Column(f"ours: {model}", "times"),
        Column("95 % interval", "text"),
        Column("tau"),
        Column("quality, of 100"),
        Column("questions", "count"),
        Column(PUBLISHED, "times"),
        Column("exact match, of 100"),
    )


def _health(runs: dict[str, Run]) -> list[str]:
    return [f"{name.upper()}: {finding}" for name, run in runs.items() for finding in health(run)]


def _whose(tuned: str) -> str:
    """Say which model Baseline is, and which speedups are over. ACL table 4 has table 3's exact match for FP16."""
    over = "speedups are over plain decoding of the frozen base of the same level"
    if tuned:
        return f"{BASELINE} is plain decoding of {FINE_TUNE} ({tuned}), held as the base of its level is; {over}"
    return f"{BASELINE} is the frozen base of each level; in the paper it is {FINE_TUNE}; {over}"


def _shown(level: str, runs: dict[str, Run]) -> str:
    """Name a level as the paper does, with the number format of a base that is not quantised here."""
    if level != UNQUANTISED or level.lower() not in runs:
        return level
    dtype = runs[level.lower()].manifest["model"]["dtype"]
    return level if dtype == "float16" else f"{level} (here: {dtype})"


def _rows(runs: dict[str, Run], tuned: str) -> list[tuple[Value, ...]]:
    shown = {name: METHODS[name] for name in ROWS}
    if tuned:
        shown = {BASELINE: tuned, FROZEN: REFERENCE} | {name: METHODS[name] for name in ROWS[1:]}
    printed = {(e.values["quantization"], e.method): e for e in published("acl_table_4")}
    rows: list[tuple[Value, ...]] = []
    for level in LEVELS:
        ours: dict[str, SummaryRow] = {}
        if level.lower() in runs:
            overall = [row for row in summarise(runs[level.lower()]) if row.category == OVERALL]
            ours = {row.method if row.method == tuned else row.method.partition("[")[0]: row for row in overall}
        for method, name in shown.items():
            own, entry = ours.get(name), printed.get((level, method))
            mine: tuple[Value, ...] = (None,) * 5
            if own is not None:
                quality = None if own.quality is None else 100 * own.quality
                around = interval(own.speedup_interval) or None
                mine = (own.speedup, around, own.tau, quality, own.n_questions)
            there = (None, None) if entry is None else (entry.number("speedup"), entry.number("metric"))
            rows.append((_shown(level, runs), method, *mine, *there))
    return rows
