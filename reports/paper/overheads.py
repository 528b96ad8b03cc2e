"""Extra parameters as the papers print them, and figures 8 and 9: what each drafter costs. No weights are needed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from specbench_ss.reports.paper.claims import number_or_none, smallest
from specbench_ss.reports.paper.figures import ACL, OLD, axes, bars, source
from specbench_ss.reports.paper.published import published
from specbench_ss.results.report import Bench, Claim, Column, Experiment, Grid, Part, Plot, Request, Result, Value
from specbench_ss.results.text import scientific

if TYPE_CHECKING:
    from specbench_ss.reports.paper.meta_device import Overhead

BASE, OURS = "Llama-13B", "SS-Lossless"
DRAFT = "OPT-125M"  # the draft model of ACL table 5
HALF = 2  # bytes of a float16 parameter

PARAMETER_NOTES = (
    "SS-Shared: stream embeddings and the pruning map, gamma h + 2 theta h = 20 h, beyond the baseline's adapters.",
    "Medusa: our heads also count a bias of h each, which changes no printed digit. The papers cut 4.286E8 to 4.28E8.",
    "Eagle: fusion layer and one decoder layer of the base's own shape. With Mistral's shape (8 key-value "
    "heads, wider MLP) that is 2.52E8, not the printed 2.4E8, which is the count of the Llama shape.",
)
ACCESS_NOTES = (
    "Read per draft: the drafter's own parameters in float16, once a pass; each pass of Hydra reads another "
    "head. The base's LM head, which Eagle and the streams use again, is not counted.",
    "The paper draws its values and prints none.",
)
FLOP_NOTES = (
    "torch's FLOP counter over the decoding code, 512 tokens in the cache. SS-Lossless: the fused pass over 32 "
    "kept nodes less verification of the same nodes, plus the draft's logits and the early exit at the 40 nodes "
    "with children; gamma = 4, k = 3, streams attending to 64 tokens (H.1) or to all.",
    "2-Model SD: a chain of 4 from Llama-68M. Medusa and Hydra: the published 63-node tree. Eagle: its 25-node tree.",
    "One node: the streams beside a single node and the draft's logits; nothing is pruned, so there is no early exit. "
    "The others draft a chain, one node on each level, which for Medusa and 2-Model SD costs what their draft costs. "
    "Seeing 64 tokens saves nothing there: with fewer than eight nodes the code computes the whole attention too.",
    "Every kept node carries streams, since which one will be accepted is not known: that is most of the count "
    "of SS-Lossless per draft. The paper draws its values, prints none, and does not say per how many nodes they are.",
)
FLOP_COUNTS = (  # and the columns of figure 9 that they hold against each other: the streams' and the other drafters'
    ("Per draft", 2, 2),
    ("Of one node each", 3, 3),
    ("Of one node, beside the whole drafts of the others", 3, 2),
)


@dataclass(frozen=True, slots=True)
class Printed:
    """A published count of extra parameters, as text, and where it stands."""

    model: str
    method: str
    text: str
    where: str


PRINTED: tuple[Printed, ...] = tuple(
    dict.fromkeys(
        Printed(e.model, e.method, e.values["parameters"], where)
        for where, data in ((source(OLD, "table", 1), "old_table_1"), (source(ACL, "table", 3), "acl_table_3"))
        for e in published(data)
        if "parameters" in e.values
    )
)  # once for each model and method: the same on every task


def counted(model: str, method: str) -> int:
    """Count the parameters that the method adds to a published model, with modules built on the meta device."""
    from specbench_ss.reports.paper import drafter_costs, meta_device, paper_models, rival_costs

    shape = paper_models.MODELS[model].shape
    hidden, vocab = shape["hidden_size"], shape["vocab_size"]
    made: dict[str, Callable[[], int]] = {
        "Medusa": lambda: meta_device.count(drafter_costs.meta_heads(hidden, vocab)),
        "Hydra": lambda: meta_device.count(rival_costs.meta_hydra(hidden, vocab, plus=False)),
        "Eagle": lambda: meta_device.count(rival_costs.Eagle(model)),
        "2-Model SD": lambda: paper_models.meta_target(DRAFT).parameter_count,
        "SS-Shared": lambda: meta_device.count(drafter_costs.meta_streams(hidden, drafter_costs.SHARED)),
        "SS-Lossless": lambda: meta_device.count(drafter_costs.meta_streams(hidden)),
    }
    return made[method]()


def as_printed(count: int, text: str) -> str:
    """Say how the count becomes the printed text: 'rounded', 'truncated', or '' where it is another number."""
    mantissa, _, exponent = text.partition("E")
    digits = len(mantissa.partition(".")[2])
    if scientific(count, digits) == text:
        return "rounded"
    unit = 10 ** (int(exponent) - digits)
    return "truncated" if count // unit == round(float(mantissa) * 10**digits) else ""


class Parameters(Experiment):
    """The extra-parameter columns of 2024 table 1 and ACL table 3."""

    name = "parameters"
    title = "extra parameters of each method, counted on published shapes"
    source = "ACL table 3, 2024 table 1"
    uses = ()

    def parts(self, request: Request) -> Sequence[Part]:
        """Return a single row, which always runs, since no weights are needed."""
        return [Part("every published model, without weights")]

    def claims(self, result: Result) -> Sequence[Claim]:
        """Every printed number of parameters, digit by digit."""
        rows = [row for row in result.grids[0].rows if row[4]]
        wrong = [f"{row[0]} {row[1]}: {row[2]:,} for {row[4]}" for row in rows if row[6] == "no"]
        found = "; ".join(wrong) or "all agree in the digits that are printed"
        return [Claim(f"{len(rows)} printed numbers of extra parameters", not wrong, found)]

    def run(self, bench: Bench) -> Result:
        """Count, and compare digit by digit."""
        lossless = counted("Llama-2-7B", "SS-Lossless")
        more = f"SS-Lossless at Llama-2-7B: gamma h + 2 R_s h N_s + 2 theta h = {lossless:,} parameters."
        return Result((parameter_grid(),), notes=(*PARAMETER_NOTES, more))


def parameter_grid(where: str = "") -> Grid:
    """Return counted beside printed numbers, of one table or of all."""
    columns = (
        Column("model", "text"),
        Column("method", "text"),
        Column("parameters", "count"),
        Column("as a power", "scientific", 4),
        Column("published", "text"),
        Column("in", "text"),
        Column("agrees", "text"),
    )
    rows: list[tuple[Value, ...]] = []
    for p in PRINTED:
        if where in ("", p.where):
            n = counted(p.model, p.method)
            rows.append((p.model, p.method, n, float(n), p.text, p.where, as_printed(n, p.text) or "no"))
    return Grid("parameters", columns, tuple(rows), "Extra parameters, counted on published shapes")


class _Overheads(Experiment):
    """What figures 8 and 9 share: their counting."""

    uses = ()
    places: ClassVar[tuple[int, ...]]  # of the columns that are compared

    def parts(self, request: Request) -> Sequence[Part]:
        """Return a single row, which always runs, since no weights are needed."""
        return [Part(f"{BASE}, without weights")]

    def run(self, bench: Bench) -> Result:
        """Build every drafter on the meta device and count."""
        from specbench_ss.reports.paper.drafter_costs import all_overheads

        return self.show(all_overheads(BASE))

    def claims(self, result: Result) -> Sequence[Claim]:
        """ACL sec. 1: fewer additional parameters and FLOPs than state-of-the-art methods, by each count."""
        grid = result.grids[0] if result.grids else result.plots[0].grid
        says = "Streaming needs fewer parameters and FLOPs than other methods (here: {})"
        return [smallest(says.format(grid.columns[i].title), OURS, _compared(grid, i)) for i in self.places]

    @abstractmethod
    def show(self, found: dict[str, Overhead]) -> Result:
        """Return the figure of these costs."""


def _compared(grid: Grid, place: int) -> dict[str, float]:
    """Return a column's value of each drafter, of our forms only the one that the paper draws."""
    values = {str(row[0]): number_or_none(row[place]) for row in grid.rows}
    return {k: v for k, v in values.items() if v is not None and (k == OURS or not k.startswith("SS"))}


class Figure8(_Overheads):
    """Figure 8: parameters and memory access."""

    name, places = "figure-8", (1,)
    title = f"parameters and memory access of each drafter at {BASE}"
    source = source(ACL, "figure", 8)

    def show(self, found: dict[str, Overhead]) -> Result:
        """Show the parameters as bars on a logarithmic axis."""
        columns = (
            Column("drafter", "text"), Column("parameters", "scientific", 3), Column("passes per draft", "count"),
            Column("GB read per draft", "number", 3), Column("over SS-Lossless", "times"),
        )  # fmt: skip
        least = found["SS-Lossless"].parameters
        rows = tuple(
            (name, float(o.parameters), o.passes, o.parameters * HALF * _reads(name, o) / 1e9, o.parameters / least)
            for name, o in found.items()
        )
        grid = Grid("overhead", columns, rows, "Parameters beyond the base")
        data = bars({"parameters": [(name, o.parameters) for name, o in found.items()]})
        label = "Bar chart: parameters that each drafter adds, logarithmic."
        plot = Plot("overhead", self.title, label, data, axes("", "parameters", type="log"), grid)
        return Result((grid,), (plot,), notes=ACCESS_NOTES)


def _reads(name: str, overhead: Overhead) -> int:
    """Return how often a draft reads the drafter's parameters: each pass of Hydra reads another head."""
    return 1 if name.startswith("Hydra") else overhead.passes


class Figure9(_Overheads):
    """Figure 9: FLOPs, per draft and of one node."""

    name, places = "figure-9", (2, 3)
    title = f"FLOPs of one draft of each drafter at {BASE}"
    source = source(ACL, "figure", 9)

    def show(self, found: dict[str, Overhead]) -> Result:
        """Show the FLOPs as bars on a logarithmic axis."""
        columns = (
            Column("drafter", "text"), Column("passes per draft", "count"), Column("GFLOPs per draft"),
            Column("GFLOPs of one node"),
        )  # fmt: skip
        rows = tuple((name, o.passes, o.flops / 1e9, o.one_node / 1e9) for name, o in found.items())
        grid = Grid("flops", columns, rows, "FLOPs per draft, and of a draft of one node on each level")
        series = ("per draft", 2), ("of one node", 3)
        data = bars({title: [(str(row[0]), number_or_none(row[i])) for row in rows] for title, i in series})
        label = "Bar chart: FLOPs that each drafter needs for one draft, and for one node of it, logarithmic."
        plot = Plot("flops", self.title, label, data, axes("", "GFLOPs", type="log"), grid)
        return Result((grid,), (plot,), notes=(*FLOP_NOTES, *_orders(grid)))


def _orders(grid: Grid) -> list[str]:
    """Say by each count which drafters need fewer FLOPs than the streams, and which more (ACL figure 9, app. H)."""
    told = []
    for count, ours, theirs in FLOP_COUNTS:
        own, others = _compared(grid, ours)[OURS], _compared(grid, theirs)
        less = [name for name, value in others.items() if name != OURS and value < own]
        more = [name for name in others if name not in (OURS, *less)]
        groups = [f"{word} than {', '.join(names)}" for word, names in (("more", less), ("fewer", more)) if names]
        told.append(f"{count}: {OURS} needs {own:.3g} GFLOPs, {' and '.join(groups)}.")
    return told
