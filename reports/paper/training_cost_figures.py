"""Costs of training: segment attention (figure 16, appendix I), and a step of each drafter (appendix J)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal, NamedTuple

import numpy as np
import torch

from specbench_ss import storage, user_files
from specbench_ss.engine.target import Target
from specbench_ss.methods.ss.layers import segment_visibility
from specbench_ss.reports import charts
from specbench_ss.reports.palette import COLOURS
from specbench_ss.reports.paper.claims import NOWHERE, all_of, at_most, point
from specbench_ss.reports.paper.experiment import TrainingExperiment, share, table
from specbench_ss.reports.paper.figures import TIMES, bars, plot
from specbench_ss.reports.paper.meta_drafters import META, flops, meta_target
from specbench_ss.reports.paper.training import (
    BASE,
    MIB,
    WARMUPS,
    StepCost,
    lab_text,
    machine_note,
    machine_of,
    measure,
    new_trainees,
    timed_steps,
    train_variants,
)
from specbench_ss.results.report import Bench, Claim, Grid, Plot, Result, Value
from specbench_ss.results.text import format_speedup
from specbench_ss.training.batch import Anchors, Batch, base_states
from specbench_ss.training.loop import Budget, PackedText
from specbench_ss.training.trainer import DrafterTrainer

TALKS, GAMMA = 400, 4

# -- figure 16: segment attention ---------------------------------------------------------------------------------

LENGTHS = (512, 1024)  # tokens of a row, as far as the model's context goes
PIECES = (8, 4, 2)  # segments of a row
ANCHORS, SEGMENT_STEPS = 128, 4
EQUAL = 1e-4  # of the loss: float32 sums in another order, which further updates enlarge
Cells = tuple[Value, ...]
NAIVE, WHOLE = "naive", "completion at once"
FORMS = {
    "tokens": "count", "form": "text", "peak, MiB": "number 0", "peak over naive": "times", "s a step": "number 3",
    "time over naive": "times", "95 % interval": "text", "time over the completion's": "times",
    "its interval": "text", "loss differs by": "scientific 1",
}  # fmt: skip
SEGMENT_NOTES = (
    "naive: streams at every position of the row, all alive at once; completion at once: at those that predict a token "
    "of a completion; segments: of these, those of a segment at a time, computed a second time in the backward pass",
    "peak: peak tensor memory of a step above its initial value, including the optimizer's step",
    "loss differs by: the largest difference from the completion's at once on the same batch, as a share of it, each "
    "form after updates of its own. The naive form has another loss, since it learns the prompts too",
    "published: the figure is a picture of the pattern; appendix I gives no numbers",
)


class Figure16(TrainingExperiment):
    """Figure 16 and EMNLP appendix I: what segment attention saves of a training step of shared mode, and its cost.

    Naive: the streams of all positions are alive at once. Every form begins with the same weights and learns from the
    same rows; the forms take their steps in turns, in one process.
    """

    name, source = "figure-16", "EMNLP figure 16"
    title = "segment attention: memory and time of a training step of shared mode"
    uses = ("model", "limit", "device", "dtype", "seed")
    rows = {"training steps": ""}

    def make(self, bench: Bench) -> Result:
        target, steps = bench.target(), timed_steps(bench.request, SEGMENT_STEPS)
        rows: list[Cells] = []
        notes = [f"{machine_note(target)}; {steps} timed steps of a row each after {WARMUPS} others, gamma {GAMMA}"]
        for length in LENGTHS:
            if length <= target.context_length:
                text = lab_text(target, "train", TALKS, bench.request.seed, length)
                rows += _rows_of(length, target, text, steps, bench)
                learnt = float(np.mean([mask.mean() for mask in text.packed.mask]))
                notes.append(f"rows of {length} tokens: {learnt:.0%} of the tokens belong to a completion")
        grid = table("segments", FORMS, rows, f"{self.source}: a training step of shared mode")
        plots = [
            bars(name, f"{name} of a training step over the naive form's", grid, "form", {"": f"{name} over naive"},
                 f"{name} over naive", by="tokens", **TIMES, legend_title_text="tokens")
            for name in ("peak", "time")
        ]  # fmt: skip
        return Result((grid,), (*plots, pattern_plot(*pattern())), notes=(*notes, *SEGMENT_NOTES))

    def claims(self, result: Result) -> Sequence[Claim]:
        """Test app. I and the caption. Peaks are counted from tensors' sizes, so single values decide."""
        grid = result.grids[0]
        peak, differs = (grid.titles.index(title) for title in ("peak over naive", "loss differs by"))

        def each(statement: str, rows: Sequence[Cells], test: Callable[[Cells], Claim]) -> Claim:
            tested = [(row, test(row)) for row in rows]
            return all_of(statement, [replace(c, found=f"{row[0]} tokens, {row[1]}: {c.found}") for row, c in tested])

        def below(bounds: Mapping[Value, float]) -> Callable[[Cells], Claim]:
            return lambda row: Claim("", float(row[peak] or 0) < bounds[row[0]], f"{row[peak]:.2f}×")

        def faster(title: str) -> Callable[[Cells], Claim]:
            return lambda row: at_most("", point(grid, row, title), 1.0)

        whole = [row for row in grid.rows if row[1] == WHOLE]
        cut = [row for row in grid.rows if row[1] not in (NAIVE, WHOLE)]
        least = {row[0]: float(row[peak] or 0) for row in whole}  # of each length, without segments
        alone = "Segments by themselves improve throughput (here: time over the completion's at once)"
        equal = f"Segments change nothing of what is learnt (here: the loss, within {EQUAL:g} of it)"
        same = each(equal, cut, lambda row: Claim("", float(row[differs] or 0) <= EQUAL, f"{row[differs] or 0:.1e}"))
        return [
            each("Without streams of the prompt, peak memory is lower (here: over naive)", whole,
                 below(dict.fromkeys(least, 1.0))),
            each("Segments reduce peak memory further (here: over naive)", cut, below(least)),
            each("Segment attention improves throughput (here: time over naive)", cut, faster("time over naive")),
            each(alone, cut, faster("time over the completion's")),
            same if all(row[differs] is not None for row in cut) else Claim(equal, None, "tested in float32 only"),
        ]  # fmt: skip


def _rows_of(length: int, target: Target, text: PackedText, steps: int, bench: Bench) -> list[Cells]:
    """Return the rows of a length, from an earlier session where that measured them: lengths are not compared."""
    file = bench.folder / f"rows-{length}.json"
    if file.exists():
        return [tuple(row) for row in user_files.decoder(list[list[str | float | int | None]])(file.read_bytes())]
    rows = _segment_rows(length, _forms(target, text, steps, bench), machine_of(target).exact)
    storage.write_text(file, json.dumps(rows))
    return rows


def _forms(target: Target, text: PackedText, steps: int, bench: Bench) -> dict[str, StepCost]:
    """Measure all forms on rows of one length, by name."""
    length = text.rows.shape[1]
    drafter = f"ss[mode=shared,gamma={GAMMA}%s]"
    cut = {WHOLE: drafter % ""} | {f"segments of {length // n}": drafter % f",segment={length // n}" for n in PIECES}
    budget = Budget(WARMUPS + steps + 1, rows_per_step=1, anchors_per_row=ANCHORS, ahead=GAMMA, warmup=WARMUPS)
    every = replace(text, packed=replace(text.packed, mask=text.packed.documents >= 0))
    bench.log(f"rows of {length} tokens")
    trainers = [
        train_variants(bench, target, {NAIVE: drafter % ""}, every, budget, f"naive-{length}", "meter"),
        train_variants(bench, target, cut, text, budget, f"completion-{length}", "meter"),
    ]
    naive, others = measure(trainers, steps, bench)
    return {NAIVE: naive[NAIVE]} | {name: others[name] for name in cut}


def _segment_rows(length: int, found: dict[str, StepCost], exact: bool) -> list[Cells]:
    """Return a row for each form. exact: in float32; elsewhere sums in another order differ by more than EQUAL."""
    naive, whole = found[NAIVE], found[WHOLE]
    rows: list[Cells] = []
    for name, cost in found.items():
        over_naive = share(cost.seconds, naive.seconds) if name != NAIVE else (None, None)
        over_whole = share(cost.seconds, whole.seconds) if name not in (NAIVE, WHOLE) else (None, None)
        gap = max(abs(one - other) / other for one, other in zip(cost.loss, whole.loss, strict=True))
        differs = None if name in (NAIVE, WHOLE) or not exact else gap
        peaks = cost.peak / MIB, cost.peak / naive.peak
        rows.append((length, name, *peaks, float(np.mean(cost.seconds)), *over_naive, *over_whole, differs))
    return rows


PROMPT, COMPLETION, SEGMENT, STREAMS = 4, 8, 6, 2  # of the drawn example
Kind = Literal["absent", "masked", "main", "stream"]
KINDS: tuple[Kind, ...] = ("absent", "masked", "main", "stream")
SIGNS: dict[Kind, str] = {"absent": " ", "masked": "·", "main": "■", "stream": "●"}
TINTS = ("#ffffff", "#e3e6ea", COLOURS[0], COLOURS[1])
SIGNS_NOTE = "■ main row that is seen, ● stream that is seen, · masked, blank: not in memory in that segment"


class Place(NamedTuple):
    """A row or a key: the main row at a position (stream 0), or the stream-th of its streams."""

    position: int
    stream: int

    @property
    def name(self) -> str:
        """Return 'main 3' or 'stream 3.1'."""
        return f"stream {self.position}.{self.stream}" if self.stream else f"main {self.position}"

    @property
    def group(self) -> str:
        """Return the name of its column in the table."""
        return f"streams of segment {self.position // SEGMENT + 1}" if self.stream else "main rows"


def pattern(attends: bool = True) -> tuple[list[Place], list[list[Kind]]]:
    """Return the attention mask of a row of PROMPT and COMPLETION tokens: positions, and kinds[row][key] in order.

    Main rows come first, then streams. attends: main rows see their streams (eq. 3).
    """
    seen = {pair: kind for start in range(0, PROMPT + COMPLETION, SEGMENT) for pair, kind in _segment(start, attends)}
    places = sorted({row for row, _ in seen}, key=lambda place: (place.stream > 0, place))
    return places, [[seen.get((row, key), "absent") for key in places] for row in places]


def _segment(start: int, attends: bool) -> Iterator[tuple[tuple[Place, Place], Kind]]:
    """Yield ((row, key), kind) of everything that is in memory while one segment is computed."""
    length = min(SEGMENT, PROMPT + COMPLETION - start)
    predicting = range(PROMPT - 1, PROMPT + COMPLETION - 1)  # positions before a token of the completion
    carry = [i for i in range(length) if start + i in predicting]
    carriers = torch.tensor([carry])
    mask = segment_visibility(length, start, carriers, torch.ones_like(carriers, dtype=torch.bool), STREAMS, attends)[0]
    mains = [Place(i, 0) for i in range(start + length)]
    streams = [Place(start + i, j) for i in carry for j in range(1, STREAMS + 1)]
    for row, sees in zip([*mains[start:], *streams], mask.tolist(), strict=True):
        for key, seen in zip([*mains, *streams], sees, strict=True):
            yield (row, key), ("stream" if key.stream else "main") if seen else "masked"


def pattern_plot(places: Sequence[Place], kinds: Sequence[Sequence[Kind]]) -> Plot:
    """Draw the pattern: a row a line, a key a column; and list it in signs."""
    shape = f"a prompt of {PROMPT}, a completion of {COMPLETION}, segments of {SEGMENT}, {STREAMS} streams"
    note = "Blue: a main row that is seen; orange: a stream that is seen; grey: masked; white: not in memory then."
    groups = {group: list(own) for group, own in groupby(range(len(places)), key=lambda i: places[i].group)}
    rows = [
        (place.name, *("".join(SIGNS[own[i]] for i in group) for group in groups.values()))
        for place, own in zip(places, kinds, strict=True)
    ]
    forms = {"row": "text", **dict.fromkeys(groups, "text")}
    grid = table("pattern", forms, rows, f"Who sees whom: {SIGNS_NOTE}")
    names, n = [place.name for place in places], len(TINTS)
    scale = [[edge, tint] for i, tint in enumerate(TINTS) for edge in (i / n, (i + 1) / n)]
    drawn = charts.heat_map(
        [[KINDS.index(kind) for kind in own] for own in kinds], names, names,
        zmin=-0.5, zmax=n - 0.5, colorscale=scale, showscale=False, xgap=1, ygap=1,
    )  # fmt: skip
    return plot("pattern", f"who sees whom: {shape}", grid, drawn, note)


# -- appendix J: a step of each drafter ---------------------------------------------------------------------------

MEDUSA, LOSSLESS, LOSSLESS_NAIVE = "Medusa", "SS-Lossless", "SS-Lossless, naive"
LEARNT_SEGMENT, AHEAD = 128, 5  # AHEAD: labels a position, as many as the drafter that looks farthest has
DRAFTERS = {  # with the defaults of `ssbench train`, which are as published
    MEDUSA: "medusa",
    "Hydra++": "hydra",
    "Eagle": "eagle",
    LOSSLESS: f"ss[gamma={GAMMA},segment={LEARNT_SEGMENT}]",
    LOSSLESS_NAIVE: f"ss[gamma={GAMMA}]",
    "SS-Shared": f"ss[mode=shared,gamma={GAMMA},segment={LEARNT_SEGMENT}]",
}
PAPERS = "Vicuna-7B"  # the base of the published hours
COUNTED = (MEDUSA, "Hydra++", LOSSLESS, LOSSLESS_NAIVE)  # the FLOPs of the others depend on the text
LENGTH, ROWS, STEPS = 512, 2, 8
MOST = 4 / 3  # of Medusa's time: the paper calls 4 hours comparable with 3 to 4
STATEMENT = f"Training streams takes about as long as training Medusa's heads (here: at most {MOST:.2f} times, %s)"
COST_NOTES = (
    "with the base: the step and the base's pass over the rows, which all but SS-Shared need; SS-Shared runs a base of "
    "its own. Over Medusa's: these seconds over those of a step of Medusa's heads",
    f"segments of {LEARNT_SEGMENT} positions, which are computed a second time in the backward pass; naive: all at "
    "once",
    "every drafter learns at every answer position of the rows, with the losses and shapes that `ssbench train` has by "
    "default; a step is loss, gradients and optimizer",
    "peak: peak tensor memory of the drafter's part of a step above its initial value",
    "FLOPs: of a row, by torch's counter on the meta device. The more positions learn, the less the base's pass "
    "weighs. Not counted: Eagle and SS-Shared, whose steps depend on the text and not on the number of positions alone",
    f"published: {PAPERS} on ShareGPT, about 4 hours with segments, 3 to 4 hours for Medusa's heads, comparable: "
    f"here at most {MOST:.2f} times Medusa's. Hours depend on the number of steps as well, which is taken to be equal",
)


TRAINED = (0.5, 0.75, 1.0)  # fractions of positions with a training loss, for counting
LABELS = 8  # of a position: more than any drafter reads


@dataclass(frozen=True, slots=True)
class EveryAnswer(PackedText):
    """Text of which every answer position that two tokens follow is an anchor."""

    def batch(self, step: int, budget: Budget, device: torch.device) -> Batch:
        """Return the batch of a step, with as many anchors a row as its fullest row has."""
        batch = PackedText.batch(self, step, replace(budget, anchors_per_row=self.rows.shape[1]), device)
        most = int((batch.anchors.labels[..., 1] != -100).sum(1).max())  # they come first
        return replace(batch, anchors=Anchors(batch.anchors.at[:, :most], batch.anchors.labels[:, :most]))


class AppendixJ(TrainingExperiment):
    """EMNLP appendix J: cost of a training step of streams, of Medusa's heads and of other drafters."""

    name, source = "appendix-j", "EMNLP appendix J"
    title = "training cost: a step of each drafter on the same batches"
    uses = ("model", "limit", "device", "dtype", "seed")
    rows = dict.fromkeys(DRAFTERS, "")

    def make(self, bench: Bench) -> Result:
        target, steps = bench.target(), timed_steps(bench.request, STEPS)
        plain = lab_text(target, "train", TALKS, bench.request.seed, LENGTH)
        text = EveryAnswer(plain.packed, plain.seed, plain.plain)
        budget = Budget(WARMUPS + steps + 1, rows_per_step=ROWS, ahead=AHEAD, warmup=WARMUPS)
        trainer = train_variants(bench, target, DRAFTERS, text, budget, "steps", "meter")
        (found,) = measure([trainer], steps, bench)
        base = np.array(found[BASE].seconds)
        own = {t.name: np.array(found[t.name].seconds) for t in trainer.trainers}
        whole = {t.name: own[t.name] + base * t.needs_base for t in trainer.trainers}
        rows: list[Cells] = [(BASE, None, float(base.mean()), None, None, None, found[BASE].peak / MIB)]
        for t in trainer.trainers:
            over, around = share(whole[t.name], whole[MEDUSA])
            means = float(own[t.name].mean()), float(whole[t.name].mean())
            around = None if t.name == MEDUSA else around
            rows.append((t.name, t.n_learning, *means, over, around, found[t.name].peak / MIB))
        forms = {
            "drafter": "text", "parameters that learn": "count", "s a step": "number 3", "with the base": "number 3",
            "over Medusa's": "times", "95 % interval": "text", "peak, MiB": "number 0",
        }  # fmt: skip
        grid = table("steps", forms, rows, f"{self.source}: a training step of each drafter")
        series = {
            BASE: [(name, float((whole[name] - own[name]).mean())) for name in own],
            "the drafter": [(name, float(seconds.mean())) for name, seconds in own.items()],
        }
        figure = plot("steps", self.title, grid, charts.bars(series, y="s a step"), barmode="stack")
        about = f"{machine_note(target)}; {steps} timed steps of {ROWS} rows of {LENGTH} tokens, after {WARMUPS} others"
        return Result((grid, _flops_grid(bench)), (figure,), notes=(about, *COST_NOTES))

    def claims(self, result: Result) -> Sequence[Claim]:
        """Test app. J: comparable with the time for Medusa's heads. Counted, it is open where the shares disagree."""
        steps, counted = result.grids
        of = {row[0]: point(steps, row, "over Medusa's") for row in steps.rows}
        at = counted.titles.index("over Medusa's")
        ratios = [(row[1], float(row[at] or 0)) for row in counted.rows if row[0] == LOSSLESS]
        within = {value <= MOST for _, value in ratios}
        found = ", ".join(
            f"{format_speedup(value)} where {learnt:.0%} of the positions learn" for learnt, value in ratios
        )
        return [
            at_most(STATEMENT % "a step on this model", of.get(LOSSLESS, NOWHERE), MOST),
            Claim(STATEMENT % f"FLOPs of a step at {PAPERS}", within.pop() if len(within) == 1 else None, found),
        ]


def counted_step(trainee: DrafterTrainer, learnt: float, target: Target) -> tuple[int, int]:
    """Count the FLOPs of a row's step with losses at a fraction of its positions: the drafter's, and the base's pass.

    The drafter and its loss are those that train; only weights and text are missing. FLOPs are those of forward and
    backward passes, with what segments compute a second time.
    """
    ids = torch.zeros(1, LENGTH, dtype=torch.long, device=META)
    labels = torch.zeros(1, LENGTH, LABELS, dtype=torch.long, device=META)
    anchors = int(learnt * LENGTH)
    batch = Batch(ids, labels, Anchors(ids[:, :anchors], labels[:, :anchors]))
    states = base_states(target, ids, trainee.aux_hidden_state_layers, trainee.kv_from)
    base = flops(lambda: base_states(target, ids, trainee.aux_hidden_state_layers, trainee.kv_from))
    with META:  # for what a loss makes without naming a device
        return flops(lambda: trainee.loss(states, batch)[0].backward(), learning=True), base


def _flops_grid(bench: Bench) -> Grid:
    """Count the same steps at the papers' base. All of COUNTED need its states."""
    target = meta_target(PAPERS)
    with META:
        trainees = new_trainees({name: DRAFTERS[name] for name in COUNTED}, target, bench)
    rows: list[tuple[Value, ...]] = []
    for learnt in TRAINED:
        medusa = 0
        for trainee in trainees:  # the first is Medusa's
            own, base = counted_step(trainee, learnt, target)
            medusa = medusa or own + base
            rows.append((trainee.name, learnt, own / 1e12, (own + base) / 1e12, (own + base) / medusa))
    forms = {
        "drafter": "text", "positions that learn": "percent 0", "TFLOPs a step": "number", "with the base": "number",
        "over Medusa's": "times",
    }  # fmt: skip
    return table("flops", forms, rows, f"FLOPs of a training step at {PAPERS}, a row of {LENGTH} tokens")
