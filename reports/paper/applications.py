"""ACL appendix C: memory of drafters for several applications of one base, counted on published shapes.

Every application has a drafter of its own beside the shared base. Its LoRA is left out: all methods need as much of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from specbench_ss.reports.paper.figures import ACL, axes, lines, source
from specbench_ss.reports.paper.overheads import DRAFT, HALF, as_printed, counted
from specbench_ss.results.report import Bench, Claim, Column, Experiment, Grid, Part, Plot, Request, Result, Value

MODEL = "Llama-2-7B"
METHODS = ("Medusa", "Hydra", "Eagle", "2-Model SD", "SS-Lossless", "SS-Shared")
APPLICATIONS = (1, 2, 4, 6, 8, 10, 12, 16, 20, 24)
TEN = 10  # the paper's example
GB = 1e9
BASES = {"a byte a weight": 1.0, "in blocks": 1.0 + 2 / 32}  # bytes of a weight
PARAMETERS = {"Medusa": "5.9E8", "SS-Shared": "8.2E4"}  # as appendix C prints them
NOTES = (
    "Drafters in 16 bits, the base in 8; GB are 10^9 bytes. Blocks: 32 weights and a scale of 16 bits, 34 bytes, as "
    "GGUF's Q8_0 stores them: the printed 7.2 GB agrees with that size; a byte a weight would be 6.7 GB.",
    "Not counted: the base's LM head, which Eagle and the streams use again, and each application's own LoRA, which "
    "all methods need. SS-Shared: stream embeddings and the pruning map; its LoRA is the application's.",
    f"2-Model SD: a draft model of {DRAFT}'s shape, that of ACL table 5; its vocabulary is not {MODEL}'s.",
)


class AppendixC(Experiment):
    """The experiment `appendix-c`."""

    name, source = "appendix-c", source(ACL, "appendix", "C")
    title = f"memory of drafters for several applications of one {MODEL}"
    uses = ()

    def parts(self, request: Request) -> Sequence[Part]:
        """Return a single row, which always runs, since no weights are needed."""
        return [Part(f"{MODEL}, without weights")]

    def run(self, bench: Bench) -> Result:
        """Count every drafter once, and multiply."""
        from specbench_ss.reports.paper.paper_models import meta_target

        each = {method: counted(MODEL, method) for method in METHODS}
        weights = meta_target(MODEL).parameter_count
        bases = {name: int(weights * bytes_each) for name, bytes_each in BASES.items()}
        return Result((_drafters(each, bases), _bases(weights, bases)), (_plot(each, bases),), notes=NOTES)

    def claims(self, result: Result) -> Sequence[Claim]:
        """The numbers that appendix C prints, and that ten applications' heads outgrow the base."""
        grids = {grid.name: grid for grid in result.grids}
        rows = {str(row[0]): row for row in grids["drafters"].rows}
        bases = {str(row[0]): float(row[2] or 0) for row in grids["bases"].rows}
        one, ten = float(rows["Medusa"][2] or 0), float(rows["Medusa"][3] or 0)
        told = ", ".join(f"{size:.2f} GB ({name})" for name, size in bases.items())
        outgrown = f"{ten:.2f} GB; the base: {told}"
        return [
            *(_parameters(method, int(rows[method][1] or 0)) for method in PARAMETERS),
            _printed("Medusa's heads of an application take 1.2 GB in 16 bits", 1.2, [one], f"{one:.3f} GB"),
            _printed("Medusa's heads of 10 applications take 11.8 GB", 11.8, [ten], f"{ten:.2f} GB"),
            _printed(f"{MODEL} takes about 7.2 GB in 8 bits", 7.2, list(bases.values()), told),
            Claim("Medusa's heads of 10 applications outgrow the base", ten > max(bases.values()), outgrown),
        ]


def _parameters(method: str, count: int) -> Claim:
    text = PARAMETERS[method]
    return Claim(f"{method}: {text} parameters an application", bool(as_printed(count, text)), f"{count:,}")


def _printed(says: str, number: float, values: Sequence[float], found: str) -> Claim:
    """Hold a number with one digit after the point: agrees where one of the values is rounded to it."""
    return Claim(says, number in [round(value, 1) for value in values], found)


def _drafters(each: dict[str, int], bases: dict[str, int]) -> Grid:
    """Return the drafters of one application and of ten, and of how many they take more than the base."""
    columns = (
        Column("drafter", "text"), Column("parameters", "count"), Column("GB an application", "number", 5),
        Column(f"GB of {TEN}", "number", 4), *(Column(f"outgrows the base ({name}) at", "count") for name in bases),
    )  # fmt: skip
    rows: list[tuple[Value, ...]] = []
    for method, count in each.items():
        size = HALF * count
        rows.append((method, count, size / GB, TEN * size / GB, *(base // size + 1 for base in bases.values())))
    return Grid("drafters", columns, tuple(rows), f"Drafters of applications that share one {MODEL}")


def _bases(weights: int, bases: dict[str, int]) -> Grid:
    columns = Column("the base", "text"), Column("parameters", "scientific", 3), Column("GB", "number", 2)
    rows = tuple((name, float(weights), size / GB) for name, size in bases.items())
    return Grid("bases", columns, rows, f"{MODEL} in 8 bits, by two definitions")


def _plot(each: dict[str, int], bases: dict[str, int]) -> Plot:
    """Draw the drafters' GB against the number of applications, and the base's beside them."""
    series: dict[str, list[tuple[float, float | None]]] = {
        method: [(n, n * HALF * count / GB) for n in APPLICATIONS] for method, count in each.items()
    }
    series |= {f"the base, {name}": [(n, size / GB) for n in APPLICATIONS] for name, size in bases.items()}
    columns = (Column("applications", "count"), *(Column(name, "number", 4) for name in series))
    rows = tuple((n, *(points[i][1] for points in series.values())) for i, n in enumerate(APPLICATIONS))
    grid = Grid("growth", columns, rows, "GB of all applications' drafters, and of the base")
    label = "Line chart: GB of all drafters against the number of applications, logarithmic, with the base's."
    return Plot("growth", AppendixC.title, label, lines(series), axes("applications", "GB", type="log"), grid)
