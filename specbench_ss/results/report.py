"""Interfaces of reports and of experiments of the papers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.results.analysis import Results
from specbench_ss.results.text import MISSING, format_number, format_speedup, percent, scientific
from specbench_ss.runs.config import Recording, RunConfig

Value = str | float | int | None
Form = Literal["text", "count", "number", "times", "percent", "scientific"]
CLAIMS = "claims"  # name of the table of claims in a result
VERDICTS = ("agrees", "tends to agree", "open", "tends not to", "does not agree")
Mark = Literal["plain", "accepted", "rejected", "next"]
BRACKETS: dict[Mark, tuple[str, str]] = {  # around marked text, without colours
    "plain": ("", ""),
    "accepted": ("", ""),
    "rejected": ("[-", "-]"),
    "next": ("*", "*"),
}


@dataclass(frozen=True, slots=True)
class Request:
    """Request for an experiment. The names are those of `RunConfig`. limit: None takes the experiment's own.

    settings: METHOD.OPTION=VALUE, as `ssbench run --set` takes them. published: draft as the papers print it.
    """

    model: str = "lab"
    limit: int | None = None
    device: str = "auto"
    dtype: str = "auto"
    seed: int = 0
    data: str | None = None
    chat_template: str | None = None
    settings: tuple[str, ...] = ()
    published: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """One row of an experiment. missing: requirements that are not met; '' if the row can run."""

    name: str
    missing: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a grid. form: how its numbers are written. digits: number of digits after the point."""

    title: str
    form: Form = "number"
    digits: int = 2

    def text(self, value: Value) -> str:
        """Return a value as text for people."""
        if value is None:
            return MISSING
        if isinstance(value, str):
            return value
        if self.form in ("count", "text"):
            return f"{value:,}"
        written = {
            "number": format_number,
            "times": lambda v, _: format_speedup(v),
            "percent": percent,
            "scientific": scientific,
        }
        return written[self.form](value, self.digits)


@dataclass(frozen=True, slots=True)
class Grid:
    """A table: rows of raw values, with None for a missing one. name: becomes a file name, so plain characters only."""

    name: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    caption: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"grid {self.name!r}: a row of {len(row)} values, {len(self.columns)} columns")

    @property
    def titles(self) -> list[str]:
        """Return the titles of the columns."""
        return [column.title for column in self.columns]

    def records(self) -> list[dict[str, Value]]:
        """Return the rows by column title."""
        return [dict(zip(self.titles, row, strict=True)) for row in self.rows]


@dataclass(frozen=True, slots=True)
class Plot:
    """A Plotly figure. label: text for screen readers. grid: the numbers that are drawn."""

    name: str
    title: str
    label: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    grid: Grid
    note: str = ""


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of text and what became of it."""

    text: str
    mark: Mark = "plain"


@dataclass(frozen=True, slots=True)
class Claim:
    """Statement of a paper, compared with a measurement. holds: None if that is undecided. found: the measurement.

    sure: False where single values were compared, of which it is not known how far they are off.
    """

    statement: str
    holds: bool | None
    found: str
    sure: bool = True

    @property
    def verdict(self) -> str:
        """Return one of VERDICTS."""
        if self.holds is None:
            return "open"
        if self.sure:
            return "agrees" if self.holds else "does not agree"
        return "tends to agree" if self.holds else "tends not to"


@dataclass(frozen=True, slots=True)
class Result:
    """Result of an experiment. lines: lines of marked text, for text rather than tables."""

    grids: tuple[Grid, ...] = ()
    plots: tuple[Plot, ...] = ()
    lines: tuple[tuple[Span, ...], ...] = ()
    notes: tuple[str, ...] = ()

    def with_claims(self, claims: Sequence[Claim]) -> Result:
        """Return the same with a table of claims behind the others; itself where there are none."""
        if not claims:
            return self
        columns = (Column("the paper", "text"), Column("here", "text"), Column("found", "text"))
        rows = tuple((claim.statement, claim.verdict, claim.found) for claim in claims)
        return replace(
            self, grids=(*self.all_grids(), Grid(CLAIMS, columns, rows, "Statements of the paper, and measurements"))
        )

    def all_grids(self) -> list[Grid]:
        """Return the tables, then the grids of those plots whose numbers are in no table."""
        return [*self.grids, *(p.grid for p in self.plots if p.grid not in self.grids)]


@dataclass(frozen=True, slots=True)
class Bench:
    """Context of an experiment while it runs.

    measure(config, name): makes (or resumes) the run in the folder out/name, and returns its results. target(): returns
    the loaded model. folder: for what else the experiment leaves behind. log: takes progress messages for people.
    """

    request: Request
    folder: Path
    measure: Callable[[RunConfig, str], Results]
    target: Callable[[], Target]
    log: Callable[[str], None] = field(default=lambda text: None)


class Experiment(ABC):
    """One table or figure of a paper.

    Experiments are found through the entry-point group `specbench_ss.experiments`.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    source: ClassVar[str]  # the paper, and the table or figure in it
    trains: ClassVar[bool] = False  # whether its runs decode with weights that it makes itself
    recording: ClassVar[Recording] = Recording()  # recordings of its runs in addition to samples
    # of the request; others are refused
    uses: ClassVar[tuple[str, ...]] = tuple(f.name for f in fields(Request) if f.name != "published")

    @abstractmethod
    def parts(self, request: Request) -> Sequence[Part]:
        """Return every row with what it lacks for this request. Loads no model."""

    def configs(self, request: Request) -> dict[str, RunConfig]:
        """Return the runs that it would make, by the name of their folder; empty where it makes none."""
        return {}

    def claims(self, result: Result) -> Sequence[Claim]:
        """Return the paper's statements on this table or figure, compared with the result."""
        return ()

    @abstractmethod
    def run(self, bench: Bench) -> Result:
        """Make the table or figure. Raises UserError where no part of it can run."""


class Figures(ABC):
    """Figures of a run, `results.plot`: found through the entry point `run` of the group `specbench_ss.figures`."""

    @abstractmethod
    def __init__(self, results: Results, methods: Collection[str] = ()) -> None:
        """Take the results to draw. methods: labels of the only methods to draw."""


class Report(ABC):
    """A kind of report. Reports are found through the entry-point group `specbench_ss.reports`."""

    name: ClassVar[str]
    summary: ClassVar[str]
    filename: ClassVar[str]  # what the file is called inside the run directory
    filename_of_several: ClassVar[str] = ""  # the same of several runs; empty: it shows one run

    @abstractmethod
    def write(self, results: Results, path: Path) -> None:
        """Write the report of a run to the file `path`."""

    def write_runs(self, runs: Sequence[Results], path: Path) -> None:
        """Write several runs side by side to the file `path`; the others are compared with the first."""
        raise UserError(f"report {self.name!r} shows one run at a time")

    def write_result(self, experiment: Experiment, result: Result, facts: Mapping[str, str], path: Path) -> None:
        """Write the result of an experiment of a paper. facts: its settings, to be shown next to it."""
        raise UserError(f"report {self.name!r} shows runs only, no experiments")
