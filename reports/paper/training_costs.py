"""ACL appendix J: what a training step of streams costs beside one of Medusa's heads and of other drafters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from specbench_ss.reports.paper.claims import at_most, number_or_none, place_of
from specbench_ss.reports.paper.figures import ACL, axes, bars, source
from specbench_ss.reports.paper.lab_text import lab_text
from specbench_ss.reports.paper.missing_parts import nothing_runs, training_text
from specbench_ss.reports.paper.step_costs import (
    BASE,
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
from specbench_ss.reports.paper.training_flops import counted_steps
from specbench_ss.results.report import Bench, Claim, Column, Experiment, Grid, Part, Plot, Request, Result, Value
from specbench_ss.results.text import interval, interval_of, times
from specbench_ss.training.batches import Anchors, Batch
from specbench_ss.training.side_by_side import Budget, DrafterText
from specbench_ss.training.trainee import Trainee

MEDUSA, LOSSLESS, NAIVE = "Medusa", "SS-Lossless", "SS-Lossless, naive"
SEGMENT, GAMMA, AHEAD = 128, 4, 5  # AHEAD: labels a position, as many as the drafter that looks farthest has
DRAFTERS = {  # with the defaults of `ssbench train`, which are as published
    MEDUSA: "medusa",
    "Hydra++": "hydra",
    "Eagle": "eagle",
    LOSSLESS: f"ss[gamma={GAMMA},segment={SEGMENT}]",
    NAIVE: f"ss[gamma={GAMMA}]",
    "SS-Shared": f"ss[mode=shared,gamma={GAMMA},segment={SEGMENT}]",
}
PAPERS = "Vicuna-7B"  # the base of the published hours
COUNTED = (MEDUSA, "Hydra++", LOSSLESS, NAIVE)  # the FLOPs of the others depend on the text
LENGTH, ROWS, TALKS, STEPS = 512, 2, 400, 8
MOST = 4 / 3  # of Medusa's time: the paper calls 4 hours comparable with 3 to 4
SAYS = f"Training streams takes about as long as training Medusa's heads (here: at most {MOST:.2f} times, %s)"
NOTES = (
    "with the base: the step and the base's pass over the rows, which all but SS-Shared need; SS-Shared runs a base of "
    "its own. Over Medusa's: these seconds over those of a step of Medusa's heads",
    f"segments of {SEGMENT} positions, which are computed a second time in the backward pass; naive: all at once",
    "every drafter learns at every answer position of the rows, with the losses and shapes that `ssbench train` has by "
    "default; a step is loss, gradients and optimizer",
    "peak: what tensors hold at most in the drafter's part of a step, over what they held before it",
    "FLOPs: of a row, by torch's counter on the meta device. The more positions learn, the less the base's pass "
    "weighs. Not counted: Eagle and SS-Shared, whose steps depend on the text and not on the number of positions alone",
    f"published: {PAPERS} on ShareGPT, about 4 hours with segments, 3 to 4 hours for Medusa's heads, comparable: "
    f"here at most {MOST:.2f} times Medusa's. Hours depend on the number of steps as well, which is taken to be equal",
)


@dataclass(frozen=True, slots=True)
class EveryAnswer(DrafterText):
    """Text of which every answer position that two tokens follow is an anchor."""

    def batch(self, step: int, budget: Budget, device: torch.device) -> Batch:
        """Return the batch of a step, with as many anchors a row as its fullest row has."""
        batch = DrafterText.batch(self, step, replace(budget, anchors_per_row=self.rows.shape[1]), device)
        most = int((batch.anchors.labels[..., 1] != -100).sum(1).max())  # they come first
        return replace(batch, anchors=Anchors(batch.anchors.at[:, :most], batch.anchors.labels[:, :most]))


class AppendixJ(Experiment):
    """The experiment `appendix-j`."""

    name, source = "appendix-j", source(ACL, "appendix", "J")
    title = "training cost: a step of each drafter on the same batches"
    uses = ("model", "limit", "device", "dtype", "seed")

    def parts(self, request: Request) -> Sequence[Part]:
        """Return a row for each drafter."""
        return [Part(name, training_text(request)) for name in DRAFTERS]

    def run(self, bench: Bench) -> Result:
        """Let all learn from the same batches in turns. Raises UserError where there is no text."""
        parts = self.parts(bench.request)
        if any(part.missing for part in parts):
            raise nothing_runs(self.name, parts)
        target, steps = bench.target(), timed_steps(bench.request, STEPS)
        made = dict(zip(DRAFTERS, drafters(",".join(DRAFTERS.values()), target, bench), strict=True))
        for name, trainee in made.items():
            trainee.name = name
        plain = lab_text(target, "train", TALKS, bench.request.seed, LENGTH)
        text = EveryAnswer(plain.rows, plain.answer_mask, plain.end, plain.seed)
        budget = Budget(WARMUPS + steps + 1, rows_per_step=ROWS, ahead=AHEAD, warmup=WARMUPS)
        trainer = MeteredTrainer(target, list(made.values()), text, budget, bench.folder / "steps", machine_of(target))
        (found,) = measure([trainer], steps, bench)
        grid = Grid("steps", _columns(), tuple(_rows(made, found)), f"{self.source}: a training step of each drafter")
        about = f"{told_machine(target)}; {steps} timed steps of {ROWS} rows of {LENGTH} tokens, after {WARMUPS} others"
        return Result((grid, _flops(bench)), (_plot(grid),), notes=(about, *NOTES))

    def claims(self, result: Result) -> Sequence[Claim]:
        """App. J: comparable with the time for Medusa's heads. Counted, it is open where the shares disagree."""
        steps, flops = result.grids
        at = place_of(steps, "over Medusa's")
        of = {row[0]: (number_or_none(row[at]), interval_of(row[at + 1])) for row in steps.rows}
        at = place_of(flops, "over Medusa's")
        shares = [(row[1], float(row[at] or 0)) for row in flops.rows if row[0] == LOSSLESS]
        within = {value <= MOST for _, value in shares}
        told = ", ".join(f"{times(value)} where {learnt:.0%} of the positions learn" for learnt, value in shares)
        return [
            at_most(SAYS % "a step on this model", of.get(LOSSLESS, (None, None)), MOST),
            Claim(SAYS % f"FLOPs of a step at {PAPERS}", within.pop() if len(within) == 1 else None, told),
        ]


def _columns() -> tuple[Column, ...]:
    return (
        Column("drafter", "text"), Column("parameters that learn", "count"), Column("s a step", "number", 3),
        Column("with the base", "number", 3), Column("over Medusa's", "times"), Column("95 % interval", "text"),
        Column("peak, MiB", "number", 0),
    )  # fmt: skip


def _rows(made: dict[str, Trainee], found: dict[str, StepCost]) -> list[tuple[Value, ...]]:
    base = found[BASE]
    whole = {name: found[name].seconds + base.seconds * trainee.needs_base for name, trainee in made.items()}
    rows: list[tuple[Value, ...]] = [(BASE, None, float(base.seconds.mean()), None, None, None, base.peak / MIB)]
    for name, trainee in made.items():
        over, around = share(whole[name], whole[MEDUSA])
        learnt = sum(p.numel() for p in trainee.module.parameters() if p.requires_grad)
        means = float(found[name].seconds.mean()), float(whole[name].mean())
        between = None if name == MEDUSA else interval(around) or None
        rows.append((name, learnt, *means, over, between, found[name].peak / MIB))
    return rows


def _flops(bench: Bench) -> Grid:
    """Count the same steps at the papers' base."""
    found = list(counted_steps(PAPERS, {name: DRAFTERS[name] for name in COUNTED}, bench))
    medusa = {step.share: step.own + step.base for step in found if step.drafter == MEDUSA}
    columns = (
        Column("drafter", "text"), Column("positions that learn", "percent", 0), Column("TFLOPs a step"),
        Column("with the base"), Column("over Medusa's", "times"),
    )  # fmt: skip
    rows = tuple(
        (s.drafter, s.share, s.own / 1e12, (s.own + s.base) / 1e12, (s.own + s.base) / medusa[s.share]) for s in found
    )
    return Grid("flops", columns, rows, f"FLOPs of a training step at {PAPERS}, a row of {LENGTH} tokens")


def _plot(grid: Grid) -> Plot:
    """Draw the seconds of a step, those of the base's pass apart."""
    own = [(str(row[0]), number_or_none(row[2])) for row in grid.rows[1:]]
    base = [(str(row[0]), float(row[3] or 0) - float(row[2] or 0)) for row in grid.rows[1:]]
    layout = axes("", "s a step") | {"barmode": "stack"}
    label = "Bar chart: seconds of a training step of each drafter, and of the base's pass that it needs."
    return Plot("steps", AppendixJ.title, label, bars({BASE: base, "the drafter": own}), layout, grid)
