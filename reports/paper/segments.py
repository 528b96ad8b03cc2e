"""Figure 16 and ACL appendix I: what segment attention saves of a training step of shared mode, and what it costs.

Naive: the streams of all positions are alive at once. Every form begins with the same weights and learns from the same
rows; the forms take their steps in turns, in one process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from specbench_ss import storage, user_files
from specbench_ss.engine.target import Target
from specbench_ss.reports.paper.claims import all_of, at_most, number_or_none, place_of
from specbench_ss.reports.paper.figures import ACL, axes, bars, source
from specbench_ss.reports.paper.lab_text import lab_text
from specbench_ss.reports.paper.missing_parts import nothing_runs, training_text
from specbench_ss.reports.paper.segment_pattern import pattern, pattern_plot
from specbench_ss.reports.paper.step_costs import (
    MIB,
    WARMUPS,
    MeteredTrainer,
    StepCost,
    drafters,
    machine_of,
    measure,
    share,
    timed_steps,
    told_machine,
)
from specbench_ss.results.report import Bench, Claim, Column, Experiment, Grid, Part, Plot, Request, Result, Value
from specbench_ss.results.text import interval, interval_of
from specbench_ss.training.side_by_side import Budget, DrafterText
from specbench_ss.training.text.lab_text import special_ids

LENGTHS = (512, 1024)  # tokens of a row, as far as the model's context goes
PIECES = (8, 4, 2)  # segments of a row
GAMMA, ANCHORS, TALKS, STEPS = 4, 128, 400, 4
EQUAL = 1e-4  # of the loss: float32 sums in another order, which further updates enlarge
Cells = tuple[Value, ...]
NAIVE, WHOLE = "naive", "completion at once"
COLUMNS = (
    Column("tokens", "count"), Column("form", "text"), Column("peak, MiB", "number", 0),
    Column("peak over naive", "times"), Column("s a step", "number", 3), Column("time over naive", "times"),
    Column("95 % interval", "text"), Column("time over the completion's", "times"), Column("its interval", "text"),
    Column("loss differs by", "scientific", 1),
)  # fmt: skip
NOTES = (
    "naive: streams at every position of the row, all alive at once; completion at once: at those that predict a token "
    "of a completion; segments: of these, those of a segment at a time, computed a second time in the backward pass",
    "peak: what tensors hold at most in a step, over what they held before it, the optimizer's step included",
    "loss differs by: the largest difference from the completion's at once on the same batch, as a share of it, each "
    "form after updates of its own. The naive form has another loss, since it learns the prompts too",
    "published: the figure is a picture of the pattern; appendix I gives no numbers",
)


class Figure16(Experiment):
    """The experiment `figure-16`."""

    name, source = "figure-16", source(ACL, "figure", 16)
    title = "segment attention: memory and time of a training step of shared mode"
    uses = ("model", "limit", "device", "dtype", "seed")

    def parts(self, request: Request) -> Sequence[Part]:
        """Return a single row: the pattern is drawn beside what was measured."""
        return [Part("training steps", training_text(request))]

    def run(self, bench: Bench) -> Result:
        """Take steps of all forms in turns at each length, and draw the pattern. Raises UserError without text."""
        parts = self.parts(bench.request)
        if any(part.missing for part in parts):
            raise nothing_runs(self.name, parts)
        target, steps = bench.target(), timed_steps(bench.request, STEPS)
        rows: list[Cells] = []
        notes = [f"{told_machine(target)}; {steps} timed steps of a row each after {WARMUPS} others, gamma {GAMMA}"]
        for length in LENGTHS:
            if length <= target.context_length:
                text = lab_text(target, "train", TALKS, bench.request.seed, length)
                rows += _once(bench, length, partial(_measured, target, text, steps, bench), machine_of(target).exact)
                notes.append(f"rows of {length} tokens: {_learnt(text):.0%} of the tokens belong to a completion")
        grid = Grid("segments", COLUMNS, tuple(rows), f"{self.source}: a training step of shared mode")
        plots = (_bars(grid, "peak over naive"), _bars(grid, "time over naive"), pattern_plot(pattern()))
        return Result((grid,), plots, notes=(*notes, *NOTES))

    def claims(self, result: Result) -> Sequence[Claim]:
        """App. I and the caption. Peaks are counted from tensors' sizes, so they are sure as single values."""
        grid = result.grids[0]
        peak, differs = place_of(grid, "peak over naive"), place_of(grid, "loss differs by")
        whole = [row for row in grid.rows if row[1] == WHOLE]
        cut = [row for row in grid.rows if row[1] not in (NAIVE, WHOLE)]
        least = {row[0]: float(row[peak] or 0) for row in whole}  # of each length, without segments
        smaller = [(row, row[peak], float(row[peak] or 0) < least[row[0]]) for row in cut]
        unneeded = [(row, row[peak], float(row[peak] or 0) < 1) for row in whole]
        same = [(row, row[differs], float(row[differs] or 0) <= EQUAL) for row in cut]
        equal = f"Segments change nothing of what is learnt (here: the loss, within {EQUAL:g} of it)"
        told = all(row[differs] is not None for row in cut)
        return [
            _all("Without streams of the prompt, peak memory is lower (here: over naive)", unneeded),
            _all("Segments reduce peak memory further (here: over naive)", smaller),
            _faster("Segment attention improves throughput (here: time over naive)", grid, cut, "time over naive"),
            _faster(
                "Segments by themselves improve throughput (here: time over the completion's at once)",
                grid,
                cut,
                "time over the completion's",
            ),
            _all(equal, same, "{:.1e}") if told else Claim(equal, None, "held in float32 alone"),
        ]


def _once(bench: Bench, length: int, measured: Callable[[], dict[str, StepCost]], exact: bool) -> list[Cells]:
    """Return the rows of a length, from an earlier session where that measured them: lengths are not compared."""
    file = bench.folder / f"rows-{length}.json"
    if file.exists():
        return [tuple(row) for row in user_files.decoder(list[list[str | float | int | None]])(file.read_bytes())]
    rows = _rows(length, measured(), exact)
    with storage.replacing(file) as kept:
        kept.write(json.dumps(rows).encode())
    return rows


def _measured(target: Target, text: DrafterText, steps: int, bench: Bench) -> dict[str, StepCost]:
    """Measure all forms on rows of one length, by name."""
    length, pad = text.rows.shape[1], special_ids(target.tokenizer)["pad"]
    asked = {WHOLE: ""} | {f"segments of {length // n}": f",segment={length // n}" for n in PIECES}
    budget = Budget(WARMUPS + steps + 1, rows_per_step=1, anchors_per_row=ANCHORS, ahead=GAMMA, warmup=WARMUPS)

    def trainer(forms: dict[str, str], text: DrafterText, folder: str) -> MeteredTrainer:
        made = drafters(",".join(f"ss[mode=shared,gamma={GAMMA}{more}]" for more in forms.values()), target, bench)
        for trainee, name in zip(made, forms, strict=True):
            trainee.name = name
        return MeteredTrainer(target, made, text, budget, bench.folder / f"{folder}-{length}", machine_of(target))

    every = replace(text, answer_mask=lambda row: np.asarray(row != pad))
    bench.log(f"rows of {length} tokens")
    naive, others = measure([trainer({NAIVE: ""}, every, "naive"), trainer(asked, text, "completion")], steps, bench)
    return {NAIVE: naive[NAIVE]} | {name: others[name] for name in asked}


def _rows(length: int, found: dict[str, StepCost], exact: bool) -> list[Cells]:
    """Return a row for each form. exact: in float32; elsewhere sums in another order differ by more than is held."""
    naive, whole = found[NAIVE], found[WHOLE]
    rows: list[Cells] = []
    for name, cost in found.items():
        times = [
            value
            for other, told in ((naive, name != NAIVE), (whole, name not in (NAIVE, WHOLE)))
            for value in _share(cost, other, told)
        ]
        differs = float((abs(cost.loss - whole.loss) / whole.loss).max())
        rows.append(
            (length, name, cost.peak / MIB, cost.peak / naive.peak, float(cost.seconds.mean()), *times,
             None if name in (NAIVE, WHOLE) or not exact else differs)
        )  # fmt: skip
    return rows


def _share(cost: StepCost, other: StepCost, told: bool) -> tuple[float | None, str | None]:
    """Return the time over another form's and its interval; nothing where it is not told."""
    over, around = share(cost.seconds, other.seconds)
    return (over, interval(around) or None) if told else (None, None)


def _learnt(text: DrafterText) -> float:
    return float(np.mean([text.answer_mask(row).mean() for row in text.rows]))


def _bars(grid: Grid, title: str) -> Plot:
    """Draw a column as bars, a group for each form and a series for each length."""
    at = place_of(grid, title)
    lengths = dict.fromkeys(row[0] for row in grid.rows)
    series = {
        f"{n} tokens": [(str(row[1]), number_or_none(row[at])) for row in grid.rows if row[0] == n] for n in lengths
    }
    name = title.split()[0]
    about = f"{name} of a training step over the naive form's"
    return Plot(name, about, f"Bar chart: {about}, by form.", bars(series), axes("", title, ticksuffix="×"), grid)


def _told(row: Sequence[Value]) -> str:
    return f"{row[0]} tokens, {row[1]}"


def _faster(says: str, grid: Grid, rows: Sequence[Sequence[Value]], title: str) -> Claim:
    """Hold that every one of the rows takes less time; an interval follows the column."""
    at = place_of(grid, title)
    points = [(row, (number_or_none(row[at]), interval_of(row[at + 1]))) for row in rows]
    held = [(row, at_most("", point, 1.0)) for row, point in points]
    return all_of(says, [replace(claim, found=f"{_told(row)}: {claim.found}") for row, claim in held])


def _all(says: str, held: Sequence[tuple[Sequence[Value], Value, bool]], form: str = "{:.2f}×") -> Claim:
    """Hold single values of rows, each of which is held or not; open where there is none."""
    found = "; ".join(f"{_told(row)}: {form.format(value)}" for row, value, _ in held)
    return Claim(says, all(holds for *_, holds in held) if held else None, found or "not measured here")
