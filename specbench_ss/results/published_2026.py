"""Numbers published in 2026, one metric per row, with the conditions that decide what compares with a run.

`published_2026.csv` has the values, `published_2026_series.csv` the conditions that the values of a series share. An
empty cell is a condition that the source does not state.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from specbench_ss.engine.sampling import BLOCK
from specbench_ss.errors import UserError
from specbench_ss.results.summary import SummaryRow
from specbench_ss.runs.records import Run

VALUES = Path(__file__).with_suffix(".csv")
SERIES = VALUES.with_name("published_2026_series.csv")
QUESTIONS = {"GSM8K": ("gsm8k", 1319), "HumanEval": ("humaneval", 164), "MT-Bench": ("mtbench", 80)}  # suite, size

Method = Literal["", "dflash", "dspark", "eagle3", "medusa", "mtp", "peagle", "uno"]
Metric = Literal[
    "tau", "speedup", "decode_speedup", "throughput_ratio", "tokens_per_s", "ms_per_token",
    "speedup_over_eagle3", "tau_gain", "time_gain_percent",
]  # fmt: skip
Pooling = Literal["", "pooled", "per request"]
Counts = Literal["", "with bonus", "without bonus", "per forward"]
Shape = Literal["", "chain", "tree"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Conditions that several published values share. Empty or None: the source does not state it.

    method: the name in ssbench, '' if ssbench lacks it. pooling: τ of all steps together, or the mean of each request's
    τ. counts: of τ: tokens per step with the bonus token, accepted tokens per step without it, or tokens per forward
    pass if a step has two passes. draft_length: drafted tokens on the longest path. note: a range or other facts.
    """

    series: str
    published_as: str
    metric: Metric
    source: str
    method: Method = ""
    temperature: float | None = None
    pooling: Pooling = ""
    counts: Counts = ""
    draft_length: int | None = None
    draft_shape: Shape = ""
    hardware: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedValue:
    """One published number with the conditions of its series. concurrency: requests at a time, None if not stated."""

    of: Series
    value: float
    model: str = ""
    benchmark: str = ""
    concurrency: int | None = None


@cache
def published_values() -> tuple[PublishedValue, ...]:
    """Return all numbers published in 2026 that ssbench lists."""
    return read_values(VALUES, SERIES)


def read_values(values: Path, series: Path) -> tuple[PublishedValue, ...]:
    """Return the published numbers of the two CSV files.

    Raises UserError with the file and line of an unknown column, method, metric or series, of a value that is no
    positive number, and of a line that repeats an earlier one.
    """
    by_key: dict[str, Series] = {}
    for place, cells in _lines(series):
        shared = _record(place, cells, Series)
        if shared.series in by_key:
            raise UserError(f"{place}: the series {shared.series!r} is defined twice")
        if shared.metric != "tau" and (shared.pooling or shared.counts):
            raise UserError(f"{place}: pooling and counts belong to tau, not to {shared.metric}")
        by_key[shared.series] = shared
    found: dict[tuple[Any, ...], PublishedValue] = {}
    for place, cells in _lines(values):
        key = cells.pop("series", "")
        if key not in by_key:
            raise UserError(f"{place}: unknown series {key!r}; define it in {series.name}")
        one = _record(place, {**cells, "of": by_key[key]}, PublishedValue)
        if not 0 < one.value < math.inf:
            raise UserError(f"{place}: the value {one.value} is no positive number")
        if found.setdefault((key, one.model, one.benchmark, one.concurrency), one) is not one:
            raise UserError(f"{place}: a second value of the same series, model, benchmark and concurrency")
    return tuple(found.values())


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield 'file line n' and the cells of each line of a CSV file that are not empty."""
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        for cells in reader:
            place = f"{path.name} line {reader.line_num}"
            if None in cells:
                raise UserError(f"{place}: more cells than columns")
            yield place, {name: cell for name, cell in cells.items() if cell}


def _record(place: str, cells: Mapping[str, Any], kind: type[T]) -> T:
    """Return the record of a line. Raises UserError for an unknown column or a value of another type."""
    if unknown := set(cells) - {field.name for field in fields(kind)}:  # type: ignore[arg-type]
        raise UserError(f"{place}: unknown column {', '.join(sorted(unknown))}")
    try:
        return msgspec.convert(cells, kind, strict=False)
    except msgspec.ValidationError as error:
        raise UserError(f"{place}: {error}") from error


@dataclass(frozen=True, slots=True)
class Measured:
    """A method of a run. draft_length: of its longest draft, None without drafts. draft_shape: '' if unknown."""

    name: str
    row: SummaryRow
    draft_length: int | None
    draft_shape: Shape

    @classmethod
    def of(cls, run: Run, row: SummaryRow) -> Measured:
        """Return the method of a row of the summary of this run."""
        steps = run.steps.together(one.key for one in run.of(row.method) if one.ok)
        nodes, depth = int(steps.draft_nodes.sum()), int(steps.draft_depth.sum())
        shape: Shape = "" if not nodes else "chain" if nodes == depth else "tree"
        return cls(run.entry(row.method)["name"], row, len(row.acceptance_rate_per_pos) or None, shape)

    def value(self, of: Series) -> float | None:
        """Return the number of this run in the metric and counting of a series; None if it cannot be computed.

        τ with an unknown pooling, per forward pass or without the bonus token has none.
        """
        if of.metric == "tau":
            taus = {"pooled": self.row.mean_acceptance_length, "per request": self.row.request_mean_acceptance_length}
            return taus.get(of.pooling) if of.counts == "with bonus" else None
        rates = ("speedup", "decode_speedup", "tokens_per_s")
        return getattr(self.row, of.metric) if of.metric in rates else None

    def drafts_as(self, of: Series) -> bool | None:
        """Return whether length and shape of the drafts are those of a series; None if one is not stated."""
        pairs = ((self.draft_length, of.draft_length), (self.draft_shape, of.draft_shape))
        if any(stated and here != stated for here, stated in pairs):
            return False
        return True if all(stated for _, stated in pairs) else None


@dataclass(frozen=True, slots=True)
class Comparability:
    """Conditions in which a published number and a run differ, and those that the source does not state."""

    differs: tuple[str, ...]
    unstated: tuple[str, ...]

    @property
    def comparable(self) -> bool:
        """Return True if all conditions are stated and the same."""
        return not self.differs and not self.unstated

    def __str__(self) -> str:
        """Return 'comparable', or as in 'differs: model, temperature; not stated: counting'."""
        parts = {"differs": self.differs, "not stated": self.unstated}
        return "; ".join(f"{name}: {', '.join(of)}" for name, of in parts.items() if of) or "comparable"


def comparability(manifest: Mapping[str, Any], measured: Measured, value: PublishedValue) -> Comparability:
    """Compare the conditions of a run's method with those of a published number. The drafters are not compared."""
    of, sampling = value.of, manifest["config"]
    found: dict[str, bool | None] = {
        "model": _equal(value.model.lower(), manifest["model"]["name"].rpartition("/")[2].lower()),
        "questions": _same_questions(manifest, value.benchmark),
        "temperature": _equal(of.temperature, sampling["temperature"]),
        "top-p or top-k": sampling.get("top_p", 1) == 1 and not sampling.get("top_k"),
        "verification": not sampling["temperature"] or sampling.get("verification") != BLOCK,
        "stop strings": not sampling.get("stop"),
        **(_of_tau(measured, of) if of.metric == "tau" else _of_speed(manifest, value)),
    }
    return Comparability(
        tuple(name for name, same in found.items() if same is False),
        tuple(name for name, same in found.items() if same is None),
    )


def _of_tau(measured: Measured, of: Series) -> dict[str, bool | None]:
    """Return whether the counting and the draft are the same. A chain is no tree of the same depth."""
    missing = "pooling" if of.counts and not of.pooling else "counting"
    return {
        missing: None if not of.pooling or not of.counts else measured.value(of) is not None,
        "draft": measured.drafts_as(of),
    }


def _of_speed(manifest: Mapping[str, Any], value: PublishedValue) -> dict[str, bool | None]:
    """Return whether hardware, dtype and load are the same. The dtype is in no series; the run's rows have one load."""
    on_gpu = manifest["model"]["device"].startswith("cuda")
    gpus = [gpu["name"] for gpu in manifest["environment"]["gpus"]] if on_gpu else []
    wanted = value.of.hardware.removeprefix("1x")
    return {
        "hardware": any(wanted in name for name in gpus) if wanted else None,
        "dtype": None,
        "concurrency": _equal(value.concurrency, 1),
    }


def _same_questions(manifest: Mapping[str, Any], benchmark: str) -> bool | None:
    if not benchmark:
        return None
    suite = manifest["suite"]
    return suite["edition"] == "official" and QUESTIONS.get(benchmark) == (suite["name"], suite["size"])


def _equal(stated: Any, here: Any) -> bool | None:
    """Return whether both are equal; None if the source does not state it."""
    return None if stated in ("", None) else bool(stated == here)


@dataclass(frozen=True, slots=True)
class ValueComparison:
    """A published number next to that of a run's method. ours: in the same counting, None if it has none."""

    method: str
    value: PublishedValue
    ours: float | None
    compares: Comparability


def compare_values(run: Run, rows: Sequence[SummaryRow]) -> list[ValueComparison]:
    """Return every published number of the methods in these rows, the comparable ones first.

    Then they are in the order of the rows, τ first, by benchmark, temperature and counting. rows: of the summary over
    all tasks. Of several rows of one method the one with the fewest differences is taken.
    """
    measured = [Measured.of(run, row) for row in rows]
    found = []
    for value in published_values():
        pairs = [(comparability(run.manifest, one, value), one) for one in measured if one.name == value.of.method]
        if pairs:
            compares, one = min(pairs, key=lambda pair: len(pair[0].differs) + len(pair[0].unstated))
            found.append(ValueComparison(one.row.method, value, one.value(value.of), compares))
    order = {row.method: i for i, row in enumerate(rows)}
    return sorted(found, key=lambda one: (not one.compares.comparable, order[one.method], *_rank(one.value)))


def _rank(value: PublishedValue) -> tuple[Any, ...]:
    """Return the place of a number within its method; what is not stated comes last."""
    of = value.of
    temperature = math.inf if of.temperature is None else of.temperature
    return of.metric != "tau", not value.benchmark, value.benchmark, temperature, not of.counts, of.counts, of.pooling
