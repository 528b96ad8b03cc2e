"""Costs of drafters without weights: extra parameters, memory, FLOPs, and equation 10."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from specbench_ss.reports.paper.claims import number_or_none, smallest
from specbench_ss.reports.paper.experiment import CountedExperiment, published, table
from specbench_ss.reports.paper.figures import LOG, TIMES, bars, lines
from specbench_ss.reports.paper.meta_drafters import Overhead, added_parameters, all_overheads, meta_target
from specbench_ss.results.report import Bench, Claim, Grid, Plot, Result, Value
from specbench_ss.results.text import scientific

BASE, OURS = "Llama-13B", "SS-Lossless"
HALF = 2  # bytes of a float16 parameter
GB = 1e9

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
    "One node: the streams of a single node and the draft's logits; nothing is pruned, so there is no early exit. "
    "The others draft a chain, one node on each level, which for Medusa and 2-Model SD costs what their draft costs. "
    "Seeing 64 tokens saves nothing there: with fewer than eight nodes the code computes the whole attention too.",
    "Every kept node carries streams, since which one will be accepted is not known: that is most of the count "
    "of SS-Lossless per draft. The paper plots its values, prints none, and does not state the number of nodes.",
)
WHOLE, ONE_NODE = "GFLOPs per draft", "GFLOPs of one node"  # columns of figure 9
FLOP_COUNTS = (  # and the columns that they hold against each other: the streams' and the other drafters'
    ("Per draft", WHOLE, WHOLE),
    ("Of one node each", ONE_NODE, ONE_NODE),
    ("Of one node, next to the whole drafts of the others", ONE_NODE, WHOLE),
)


PRINTED = tuple(
    dict.fromkeys(
        (row["model"], row["method"], row["parameters"], where)
        for where, name in (("2024 table 1", "2024-table-1"), ("EMNLP table 3", "table-3"))
        for row in published(name)
        if row["parameters"]
    )
)  # (model, method, printed number, table), once for each model and method: the same on every task


def as_printed(count: int, text: str) -> str:
    """Return the relation of the count to the printed text: 'rounded', 'truncated', or '' for another number."""
    mantissa, _, exponent = text.partition("E")
    digits = len(mantissa.partition(".")[2])
    if scientific(count, digits) == text:
        return "rounded"
    unit = 10 ** (int(exponent) - digits)
    return "truncated" if count // unit == round(float(mantissa) * 10**digits) else ""


class Parameters(CountedExperiment):
    """The extra-parameter columns of 2024 table 1 and EMNLP table 3."""

    name = "parameters"
    title = "extra parameters of each method, counted on published shapes"
    source = "EMNLP table 3, 2024 table 1"
    rows = {"every published model, without weights": ""}

    def claims(self, result: Result) -> Sequence[Claim]:
        """Test every printed number of parameters, digit by digit."""
        rows = [row for row in result.grids[0].rows if row[4]]
        wrong = [f"{row[0]} {row[1]}: {row[2]:,} for {row[4]}" for row in rows if row[6] == "no"]
        found = "; ".join(wrong) or "all agree in the digits that are printed"
        return [Claim(f"{len(rows)} printed numbers of extra parameters", not wrong, found)]

    def make(self, bench: Bench) -> Result:
        lossless = added_parameters("Llama-2-7B", "SS-Lossless")
        more = f"SS-Lossless at Llama-2-7B: gamma h + 2 R_s h N_s + 2 theta h = {lossless:,} parameters."
        return Result((parameter_grid(),), notes=(*PARAMETER_NOTES, more))


def parameter_grid(where: str = "") -> Grid:
    """Return counted and printed numbers, of one table or of all."""
    rows: list[tuple[Value, ...]] = []
    for model, method, text, printed_in in PRINTED:
        if where in ("", printed_in):
            n = added_parameters(model, method)
            rows.append((model, method, n, float(n), text, printed_in, as_printed(n, text) or "no"))
    forms = {
        "model": "text", "method": "text", "parameters": "count", "as a power": "scientific 4", "published": "text",
        "in": "text", "agrees": "text",
    }  # fmt: skip
    return table("parameters", forms, rows, "Extra parameters, counted on published shapes")


class _Overheads(CountedExperiment):
    """Figures 8 and 9, which count the same drafters."""

    rows = {f"{BASE}, without weights": ""}
    compared: ClassVar[tuple[str, ...]]  # columns

    def make(self, bench: Bench) -> Result:
        return self.show(all_overheads(BASE))

    def claims(self, result: Result) -> Sequence[Claim]:
        """Test EMNLP sec. 1: fewer additional parameters and FLOPs than state-of-the-art methods, by each count."""
        statement = "Streaming needs fewer parameters and FLOPs than other methods (here: {})"
        return [smallest(statement.format(title), OURS, _compared(result.grids[0], title)) for title in self.compared]

    @abstractmethod
    def show(self, found: dict[str, Overhead]) -> Result:
        """Return the figure of these costs."""


def _compared(grid: Grid, title: str) -> dict[str, float]:
    """Return a column's value of each drafter, of our forms only the one that the paper draws."""
    values = {str(row["drafter"]): number_or_none(row[title]) for row in grid.records()}
    return {k: v for k, v in values.items() if v is not None and (k == OURS or not k.startswith("SS"))}


class Figure8(_Overheads):
    """Figure 8: parameters and memory access."""

    name, source, compared = "figure-8", "EMNLP figure 8", ("parameters",)
    title = f"parameters and memory access of each drafter at {BASE}"

    def show(self, found: dict[str, Overhead]) -> Result:
        forms = {
            "drafter": "text", "parameters": "scientific 3", "passes per draft": "count",
            "GB read per draft": "number 3", "over SS-Lossless": "times",
        }  # fmt: skip
        rows: list[tuple[Value, ...]] = []
        for name, o in found.items():
            reads = 1 if name.startswith("Hydra") else o.passes  # each pass of Hydra reads another head
            read = o.parameters * HALF * reads / GB
            rows.append((name, float(o.parameters), o.passes, read, o.parameters / found[OURS].parameters))
        grid = table("overhead", forms, rows, "Parameters beyond the base")
        figure = bars("overhead", self.title, grid, "drafter", ["parameters"], "parameters", **LOG)
        return Result((grid,), (figure,), notes=ACCESS_NOTES)


class Figure9(_Overheads):
    """Figure 9: FLOPs, per draft and of one node."""

    name, source, compared = "figure-9", "EMNLP figure 9", (WHOLE, ONE_NODE)
    title = f"FLOPs of one draft of each drafter at {BASE}"

    def show(self, found: dict[str, Overhead]) -> Result:
        forms = {"drafter": "text", "passes per draft": "count", WHOLE: "number", ONE_NODE: "number"}
        rows = [(name, o.passes, o.flops / 1e9, o.one_node / 1e9) for name, o in found.items()]
        grid = table("flops", forms, rows, "FLOPs per draft, and of a draft of one node on each level")
        columns = {title.removeprefix("GFLOPs "): title for title in (WHOLE, ONE_NODE)}
        figure = bars("flops", self.title, grid, "drafter", columns, "GFLOPs", **LOG)
        return Result((grid,), (figure,), notes=(*FLOP_NOTES, *_orders(grid)))


def _orders(grid: Grid) -> list[str]:
    """Return for each count the drafters with fewer and with more FLOPs than the streams (EMNLP figure 9, app. H)."""
    found = []
    for count, ours, theirs in FLOP_COUNTS:
        own, others = _compared(grid, ours)[OURS], _compared(grid, theirs)
        less = [name for name, value in others.items() if name != OURS and value < own]
        more = [name for name in others if name not in (OURS, *less)]
        groups = [f"{word} than {', '.join(names)}" for word, names in (("more", less), ("fewer", more)) if names]
        found.append(f"{count}: {OURS} needs {own:.3g} GFLOPs, {' and '.join(groups)}.")
    return found


# -- appendix C: memory of drafters for several applications of one base ---------------------------------------------

APP_MODEL = "Llama-2-7B"
APP_METHODS = ("Medusa", "Hydra", "Eagle", "2-Model SD", "SS-Lossless", "SS-Shared")
APPLICATIONS = (1, 2, 4, 6, 8, 10, 12, 16, 20, 24)
TEN = 10  # the paper's example
BASES = {"a byte a weight": 1.0, "in blocks": 1.0 + 2 / 32}  # bytes of a weight
APP_PARAMETERS = {"Medusa": "5.9E8", "SS-Shared": "8.2E4"}  # as appendix C prints them
APP_NOTES = (
    "Drafters in 16 bits, the base in 8; GB are 10^9 bytes. Blocks: 32 weights and a scale of 16 bits, 34 bytes, as "
    "GGUF's Q8_0 stores them: the printed 7.2 GB agrees with that size; a byte a weight would be 6.7 GB.",
    "Not counted: the base's LM head, which Eagle and the streams use again, and each application's own LoRA, which "
    "all methods need. SS-Shared: stream embeddings and the pruning map; its LoRA is the application's.",
    f"2-Model SD: a draft model of OPT-125M's shape, that of EMNLP table 5; its vocabulary is not {APP_MODEL}'s.",
)


class AppendixC(CountedExperiment):
    """Memory of drafters for several applications of one base, counted on published shapes.

    Every application has its own drafter and shares the base. Its LoRA is left out: all methods need as much of it.
    """

    name, source = "appendix-c", "EMNLP appendix C"
    title = f"memory of drafters for several applications of one {APP_MODEL}"
    rows = {f"{APP_MODEL}, without weights": ""}

    def make(self, bench: Bench) -> Result:
        sizes = {method: HALF * added_parameters(APP_MODEL, method) for method in APP_METHODS}
        weights = meta_target(APP_MODEL).parameter_count
        bases = {name: int(weights * size) for name, size in BASES.items()}
        forms = {
            "drafter": "text", "parameters": "count", "GB an application": "number 5", f"GB of {TEN}": "number 4",
            **{f"outgrows the base ({name}) at": "count" for name in bases},
        }  # fmt: skip
        rows: list[tuple[Value, ...]] = [
            (method, size // HALF, size / GB, TEN * size / GB, *(base // size + 1 for base in bases.values()))
            for method, size in sizes.items()
        ]
        drafters = table("drafters", forms, rows, f"Drafters of applications that share one {APP_MODEL}")
        base_rows = [(name, float(weights), size / GB) for name, size in bases.items()]
        forms = {"the base": "text", "parameters": "scientific 3", "GB": "number"}
        grids = drafters, table("bases", forms, base_rows, f"{APP_MODEL} in 8 bits, by two definitions")
        return Result(grids, (self._growth(sizes, bases),), notes=APP_NOTES)

    def _growth(self, sizes: dict[str, int], bases: dict[str, int]) -> Plot:
        """Draw the drafters' GB against the number of applications, and the base's."""
        gb = {method: [n * size / GB for n in APPLICATIONS] for method, size in sizes.items()}
        gb |= {f"the base, {name}": [size / GB for _ in APPLICATIONS] for name, size in bases.items()}
        forms = {"applications": "count", **dict.fromkeys(gb, "number 4")}
        rows = zip(APPLICATIONS, *gb.values(), strict=True)
        grid = table("growth", forms, rows, "GB of all applications' drafters, and of the base")
        return lines("growth", self.title, grid, "applications", list(gb), "GB", **LOG)

    def claims(self, result: Result) -> Sequence[Claim]:
        """Test the numbers that appendix C prints, and that ten applications' heads outgrow the base."""
        drafters, bases = (grid.records() for grid in result.grids[:2])
        rows = {str(row["drafter"]): row for row in drafters}
        sizes = {str(row["the base"]): float(row["GB"] or 0) for row in bases}
        one, ten = (float(rows["Medusa"][title] or 0) for title in ("GB an application", f"GB of {TEN}"))
        found = ", ".join(f"{size:.2f} GB ({name})" for name, size in sizes.items())
        counts = {method: int(rows[method]["parameters"] or 0) for method in APP_PARAMETERS}
        return [
            *(
                Claim(f"{m}: {text} parameters an application", bool(as_printed(counts[m], text)), f"{counts[m]:,}")
                for m, text in APP_PARAMETERS.items()
            ),
            _printed("Medusa's heads of an application take 1.2 GB in 16 bits", 1.2, [one], f"{one:.3f} GB"),
            _printed("Medusa's heads of 10 applications take 11.8 GB", 11.8, [ten], f"{ten:.2f} GB"),
            _printed(f"{APP_MODEL} takes about 7.2 GB in 8 bits", 7.2, list(sizes.values()), found),
            Claim(
                "Medusa's heads of 10 applications outgrow the base",
                ten > max(sizes.values()),
                f"{ten:.2f} GB; the base: {found}",
            ),
        ]


def _printed(statement: str, number: float, values: Sequence[float], found: str) -> Claim:
    """Test a number with one digit after the point: one of the values has to be rounded to it."""
    return Claim(statement, number in [round(value, 1) for value in values], found)


# -- equation 10 ----------------------------------------------------------------------------------------------------

RATIOS = (2.0, 5.0, 10.0, 20.0, 50.0, 100.0)  # C_target / C_draft
ADVANCES = tuple(round(0.6 + 0.1 * i, 1) for i in range(15))  # zeta / beta
CHAIN = 4  # gamma


def streaming_over_draft(advance: float, ratio: float, gamma: int = CHAIN) -> float:
    """Return eq. 10 as a speedup: time per token with a draft model over that with streaming.

    advance = zeta / beta, the tokens that a verifying pass advances with the draft model over those with streaming;
    ratio = C_target / C_draft. A pass with streams is taken to cost what a pass of the target costs.
    """
    return parity(ratio, gamma) / advance


def parity(ratio: float, gamma: int = CHAIN) -> float:
    """Return the zeta / beta at which both take the same time: 1.4 for gamma = 4 and ratio 10 (EMNLP appendix N)."""
    return gamma / ratio + 1


class Figure20(CountedExperiment):
    """Figure 20: when streaming is faster than a draft model, from costs and advances alone."""

    name, source = "figure-20", "EMNLP figure 20"
    title = "speedup of streaming over a draft model, in theory (equation 10)"
    rows = {"the equation": ""}

    def make(self, bench: Bench) -> Result:
        """Draw a line for each ratio of target to draft latency, and find where it crosses 1."""
        rows = [(a, *(streaming_over_draft(a, r) for r in RATIOS)) for a in ADVANCES]
        caption = f"Speedup of streaming over a draft model, gamma = {CHAIN}, by C_target / C_draft"
        titles = [f"ratio {r:g}" for r in RATIOS]
        grid = table("speedup", {"zeta / beta": "number", **dict.fromkeys(titles, "times")}, rows, caption)
        forms = {"C_target / C_draft": "number", "zeta / beta at parity": "number"}
        at_parity = table("parity", forms, [(r, parity(r)) for r in RATIOS], "Parity")
        figure = lines("speedup", self.title, grid, "zeta / beta", titles, "speedup of streaming", **TIMES)
        note = f"Published: zeta = 1.4 beta at ratio 10; equation 10: {parity(10):g}."
        return Result((grid, at_parity), (figure,), notes=(note,))
