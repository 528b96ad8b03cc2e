"""Costs of training: segment attention (figure 16, appendix I), and a step of each drafter (appendix J)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Literal

import numpy as np
import torch

from specbench_ss import storage, user_files
from specbench_ss.engine.target import Target
from specbench_ss.methods.ss.layers import segment_visibility
from specbench_ss.reports.paper.claims import NOWHERE, all_of, at_most, number_or_none, place_of, point
from specbench_ss.reports.paper.experiment import ACL, TrainingExperiment, source, table
from specbench_ss.reports.paper.figures import COLOURS, Axis, Points, Text, bars, heat_map
from specbench_ss.reports.paper.lab_text import lab_text
from specbench_ss.reports.paper.meta_drafters import META, flops, meta_target
from specbench_ss.reports.paper.training import (
    BASE,
    MIB,
    WARMUPS,
    MeteredTrainer,
    StepCost,
    machine_note,
    machine_of,
    measure,
    new_trainees,
    share,
    timed_steps,
)
from specbench_ss.results.report import Bench, Claim, Grid, Plot, Result, Value
from specbench_ss.results.text import interval, times
from specbench_ss.training.batch import Anchors, Batch, base_states
from specbench_ss.training.data import special_ids
from specbench_ss.training.loop import Budget, DrafterText
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
    "peak: what tensors hold at most in a step, over what they held before it, the optimizer's step included",
    "loss differs by: the largest difference from the completion's at once on the same batch, as a share of it, each "
    "form after updates of its own. The naive form has another loss, since it learns the prompts too",
    "published: the figure is a picture of the pattern; appendix I gives no numbers",
)


class Figure16(TrainingExperiment):
    """Figure 16 and ACL appendix I: what segment attention saves of a training step of shared mode, and what it costs.

    Naive: the streams of all positions are alive at once. Every form begins with the same weights and learns from the
    same rows; the forms take their steps in turns, in one process.
    """

    name, source = "figure-16", source(ACL, "figure", 16)
    title = "segment attention: memory and time of a training step of shared mode"
    uses = ("model", "limit", "device", "dtype", "seed")
    rows = ("training steps",)

    def make(self, bench: Bench) -> Result:
        """Take steps of all forms in turns at each length, and draw the pattern."""
        target, steps = bench.target(), timed_steps(bench.request, SEGMENT_STEPS)
        rows: list[Cells] = []
        notes = [f"{machine_note(target)}; {steps} timed steps of a row each after {WARMUPS} others, gamma {GAMMA}"]
        for length in LENGTHS:
            if length <= target.context_length:
                text = lab_text(target, "train", TALKS, bench.request.seed, length)
                rows += _once(bench, length, partial(_forms, target, text, steps, bench), machine_of(target).exact)
                learnt = float(np.mean([text.answer_mask(row).mean() for row in text.rows]))
                notes.append(f"rows of {length} tokens: {learnt:.0%} of the tokens belong to a completion")
        grid = table("segments", FORMS, rows, f"{self.source}: a training step of shared mode")
        plots = (_over_naive(grid, "peak over naive"), _over_naive(grid, "time over naive"), pattern_plot(pattern()))
        return Result((grid,), plots, notes=(*notes, *SEGMENT_NOTES))

    def claims(self, result: Result) -> Sequence[Claim]:
        """App. I and the caption. Peaks are counted from tensors' sizes, so single values decide."""
        grid = result.grids[0]
        peak, differs = place_of(grid, "peak over naive"), place_of(grid, "loss differs by")
        whole = [row for row in grid.rows if row[1] == WHOLE]
        cut = [row for row in grid.rows if row[1] not in (NAIVE, WHOLE)]
        least = {row[0]: float(row[peak] or 0) for row in whole}  # of each length, without segments
        smaller = [(row, row[peak], float(row[peak] or 0) < least[row[0]]) for row in cut]
        unneeded = [(row, row[peak], float(row[peak] or 0) < 1) for row in whole]
        same = [(row, row[differs], float(row[differs] or 0) <= EQUAL) for row in cut]
        equal = f"Segments change nothing of what is learnt (here: the loss, within {EQUAL:g} of it)"
        exact = all(row[differs] is not None for row in cut)
        alone = "Segments by themselves improve throughput (here: time over the completion's at once)"
        return [
            _all("Without streams of the prompt, peak memory is lower (here: over naive)", unneeded),
            _all("Segments reduce peak memory further (here: over naive)", smaller),
            _faster("Segment attention improves throughput (here: time over naive)", grid, cut, "time over naive"),
            _faster(alone, grid, cut, "time over the completion's"),
            _all(equal, same, "{:.1e}") if exact else Claim(equal, None, "held in float32 alone"),
        ]


def _once(bench: Bench, length: int, forms: Callable[[], dict[str, StepCost]], exact: bool) -> list[Cells]:
    """Return the rows of a length, from an earlier session where that measured them: lengths are not compared."""
    file = bench.folder / f"rows-{length}.json"
    if file.exists():
        return [tuple(row) for row in user_files.decoder(list[list[str | float | int | None]])(file.read_bytes())]
    rows = _segment_rows(length, forms(), exact)
    with storage.replacing(file) as kept:
        kept.write(json.dumps(rows).encode())
    return rows


def _forms(target: Target, text: DrafterText, steps: int, bench: Bench) -> dict[str, StepCost]:
    """Measure all forms on rows of one length, by name."""
    length, pad = text.rows.shape[1], special_ids(target.tokenizer)["pad"]
    cut = {WHOLE: ""} | {f"segments of {length // n}": f",segment={length // n}" for n in PIECES}
    budget = Budget(WARMUPS + steps + 1, rows_per_step=1, anchors_per_row=ANCHORS, ahead=GAMMA, warmup=WARMUPS)

    def trainer(forms: dict[str, str], text: DrafterText, folder: str) -> MeteredTrainer:
        drafters = {name: f"ss[mode=shared,gamma={GAMMA}{more}]" for name, more in forms.items()}
        made = new_trainees(drafters, target, bench)
        return MeteredTrainer(target, made, text, budget, bench.folder / f"{folder}-{length}", machine_of(target))

    every = replace(text, answer_mask=lambda row: np.asarray(row != pad))
    bench.log(f"rows of {length} tokens")
    naive, others = measure([trainer({NAIVE: ""}, every, "naive"), trainer(cut, text, "completion")], steps, bench)
    return {NAIVE: naive[NAIVE]} | {name: others[name] for name in cut}


def _segment_rows(length: int, found: dict[str, StepCost], exact: bool) -> list[Cells]:
    """Return a row for each form. exact: in float32; elsewhere sums in another order differ by more than EQUAL."""
    naive, whole = found[NAIVE], found[WHOLE]
    rows: list[Cells] = []
    for name, cost in found.items():
        over_naive = _share(cost, naive) if name != NAIVE else (None, None)
        over_whole = _share(cost, whole) if name not in (NAIVE, WHOLE) else (None, None)
        gap = float((abs(cost.loss - whole.loss) / whole.loss).max())
        differs = None if name in (NAIVE, WHOLE) or not exact else gap
        peaks = cost.peak / MIB, cost.peak / naive.peak
        rows.append((length, name, *peaks, float(cost.seconds.mean()), *over_naive, *over_whole, differs))
    return rows


def _share(cost: StepCost, other: StepCost) -> tuple[float, str | None]:
    """Return the time over another form's, and its interval."""
    over, around = share(cost.seconds, other.seconds)
    return over, interval(around) or None


def _over_naive(grid: Grid, title: str) -> Plot:
    """Draw a column as bars, a group for each form and a series for each length."""
    at = place_of(grid, title)
    lengths = dict.fromkeys(row[0] for row in grid.rows)
    series: dict[str, Points] = {
        f"{n} tokens": [(str(row[1]), number_or_none(row[at])) for row in grid.rows if row[0] == n] for n in lengths
    }
    name = title.split()[0]
    about = f"{name} of a training step over the naive form's"
    return bars(Text(name, about, f"Bar chart: {about}, by form."), series, grid, Axis(title, form="times"))


def _form(row: Sequence[Value]) -> str:
    return f"{row[0]} tokens, {row[1]}"


def _faster(says: str, grid: Grid, rows: Sequence[Sequence[Value]], title: str) -> Claim:
    """Test that every one of the rows takes less time."""
    claims = [(row, at_most("", point(grid, row, title), 1.0)) for row in rows]
    return all_of(says, [replace(claim, found=f"{_form(row)}: {claim.found}") for row, claim in claims])


def _all(says: str, held: Sequence[tuple[Sequence[Value], Value, bool]], form: str = "{:.2f}×") -> Claim:
    """Test single values of rows, (row, value, holds); open where there is none."""
    found = "; ".join(f"{_form(row)}: {form.format(value)}" for row, value, _ in held)
    return Claim(says, all(holds for *_, holds in held) if held else None, found or "not measured here")


PROMPT, COMPLETION, SEGMENT, STREAMS = 4, 8, 6, 2  # of the drawn example
Kind = Literal["absent", "masked", "main", "stream"]
KINDS: tuple[Kind, ...] = ("absent", "masked", "main", "stream")
SIGNS: dict[Kind, str] = {"absent": " ", "masked": "·", "main": "■", "stream": "●"}
TINTS = ("#ffffff", "#e3e6ea", COLOURS[0], COLOURS[1])
SIGNS_NOTE = "■ main row that is seen, ● stream that is seen, · masked, blank: not in memory in that segment"


@dataclass(frozen=True, slots=True)
class PatternRow:
    """A row or a key: a main row at a position, or the stream-th of its streams. part: number of the segment."""

    position: int
    stream: int
    part: int

    @property
    def name(self) -> str:
        """Return 'main 3' or 'stream 3.1'."""
        return f"stream {self.position}.{self.stream}" if self.stream else f"main {self.position}"


@dataclass(frozen=True, slots=True)
class Pattern:
    """Attention of rows to keys, kinds[row][key], in the order of `places`: main rows, then streams by segment."""

    places: list[PatternRow]
    kinds: list[list[Kind]]


def pattern(attends: bool = True) -> Pattern:
    """Return the pattern of a row of PROMPT and COMPLETION tokens. attends: main rows see their streams (eq. 3)."""
    seen = {pair: kind for start in range(0, PROMPT + COMPLETION, SEGMENT) for pair, kind in _segment(start, attends)}
    places = sorted({row for row, _ in seen}, key=lambda p: (p.stream > 0, p.position, p.stream))
    return Pattern(places, [[seen.get((row, key), "absent") for key in places] for row in places])


def _segment(start: int, attends: bool) -> Iterator[tuple[tuple[PatternRow, PatternRow], Kind]]:
    """Yield ((row, key), kind) of everything that is in memory while one segment is computed."""
    length = min(SEGMENT, PROMPT + COMPLETION - start)
    predicting = range(PROMPT - 1, PROMPT + COMPLETION - 1)  # positions before a token of the completion
    carry = [i for i in range(length) if start + i in predicting]
    carriers = torch.tensor([carry])
    mask = segment_visibility(length, start, carriers, torch.ones_like(carriers, dtype=torch.bool), STREAMS, attends)[0]
    mains = [PatternRow(i, 0, i // SEGMENT) for i in range(start + length)]
    streams = [PatternRow(start + i, j, start // SEGMENT) for i in carry for j in range(1, STREAMS + 1)]
    for row, sees in zip([*mains[start:], *streams], mask.tolist(), strict=True):
        for key, seen in zip([*mains, *streams], sees, strict=True):
            yield (row, key), ("stream" if key.stream else "main") if seen else "masked"


def pattern_plot(found: Pattern) -> Plot:
    """Draw the pattern: a row a line, a key a column; and list it in signs."""
    shape = f"a prompt of {PROMPT}, a completion of {COMPLETION}, segments of {SEGMENT}, {STREAMS} streams"
    title = f"who sees whom: {shape}"
    label = "Heat map: main rows see main rows before them, and streams see what their main row sees and each other."
    note = "Blue: a main row that is seen; orange: a stream that is seen; grey: masked; white: not in memory then."
    groups = [list(group) for _, group in groupby(range(len(found.places)), key=lambda i: _group(found.places[i]))]
    rows = [
        (place.name, *("".join(SIGNS[kinds[i]] for i in group) for group in groups))
        for place, kinds in zip(found.places, found.kinds, strict=True)
    ]
    forms = {"row": "text", **{_group(found.places[group[0]]): "text" for group in groups}}
    grid = table("pattern", forms, rows, f"Who sees whom: {SIGNS_NOTE}")
    heights = [[KINDS.index(kind) for kind in row] for row in found.kinds]
    return heat_map(Text("pattern", title, label, note), [place.name for place in found.places], heights, TINTS, grid)


def _group(place: PatternRow) -> str:
    return f"streams of segment {place.part + 1}" if place.stream else "main rows"


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
SAYS = f"Training streams takes about as long as training Medusa's heads (here: at most {MOST:.2f} times, %s)"
COST_NOTES = (
    "with the base: the step and the base's pass over the rows, which all but SS-Shared need; SS-Shared runs a base of "
    "its own. Over Medusa's: these seconds over those of a step of Medusa's heads",
    f"segments of {LEARNT_SEGMENT} positions, which are computed a second time in the backward pass; naive: all at "
    "once",
    "every drafter learns at every answer position of the rows, with the losses and shapes that `ssbench train` has by "
    "default; a step is loss, gradients and optimizer",
    "peak: what tensors hold at most in the drafter's part of a step, over what they held before it",
    "FLOPs: of a row, by torch's counter on the meta device. The more positions learn, the less the base's pass "
    "weighs. Not counted: Eagle and SS-Shared, whose steps depend on the text and not on the number of positions alone",
    f"published: {PAPERS} on ShareGPT, about 4 hours with segments, 3 to 4 hours for Medusa's heads, comparable: "
    f"here at most {MOST:.2f} times Medusa's. Hours depend on the number of steps as well, which is taken to be equal",
)


LEARNT = (0.5, 0.75, 1.0)  # shares of the positions that drafters learn at, for counting
LABELS = 8  # of a position: more than any drafter reads


@dataclass(frozen=True, slots=True)
class EveryAnswer(DrafterText):
    """Text of which every answer position that two tokens follow is an anchor."""

    def batch(self, step: int, budget: Budget, device: torch.device) -> Batch:
        """Return the batch of a step, with as many anchors a row as its fullest row has."""
        batch = DrafterText.batch(self, step, replace(budget, anchors_per_row=self.rows.shape[1]), device)
        most = int((batch.anchors.labels[..., 1] != -100).sum(1).max())  # they come first
        return replace(batch, anchors=Anchors(batch.anchors.at[:, :most], batch.anchors.labels[:, :most]))


class AppendixJ(TrainingExperiment):
    """ACL appendix J: cost of a training step of streams, of Medusa's heads and of other drafters."""

    name, source = "appendix-j", source(ACL, "appendix", "J")
    title = "training cost: a step of each drafter on the same batches"
    uses = ("model", "limit", "device", "dtype", "seed")
    rows = tuple(DRAFTERS)

    def make(self, bench: Bench) -> Result:
        """Let all learn from the same batches in turns."""
        target, steps = bench.target(), timed_steps(bench.request, STEPS)
        trainees = new_trainees(DRAFTERS, target, bench)
        plain = lab_text(target, "train", TALKS, bench.request.seed, LENGTH)
        text = EveryAnswer(plain.rows, plain.answer_mask, plain.end, plain.seed)
        budget = Budget(WARMUPS + steps + 1, rows_per_step=ROWS, ahead=AHEAD, warmup=WARMUPS)
        trainer = MeteredTrainer(target, trainees, text, budget, bench.folder / "steps", machine_of(target))
        (found,) = measure([trainer], steps, bench)
        forms = {
            "drafter": "text", "parameters that learn": "count", "s a step": "number 3", "with the base": "number 3",
            "over Medusa's": "times", "95 % interval": "text", "peak, MiB": "number 0",
        }  # fmt: skip
        grid = table("steps", forms, _cost_rows(trainees, found), f"{self.source}: a training step of each drafter")
        about = f"{machine_note(target)}; {steps} timed steps of {ROWS} rows of {LENGTH} tokens, after {WARMUPS} others"
        return Result((grid, _flops_grid(bench)), (_seconds_plot(grid),), notes=(about, *COST_NOTES))

    def claims(self, result: Result) -> Sequence[Claim]:
        """App. J: comparable with the time for Medusa's heads. Counted, it is open where the shares disagree."""
        steps, counted = result.grids
        of = {row[0]: point(steps, row, "over Medusa's") for row in steps.rows}
        at = place_of(counted, "over Medusa's")
        ratios = [(row[1], float(row[at] or 0)) for row in counted.rows if row[0] == LOSSLESS]
        within = {value <= MOST for _, value in ratios}
        found = ", ".join(f"{times(value)} where {learnt:.0%} of the positions learn" for learnt, value in ratios)
        return [
            at_most(SAYS % "a step on this model", of.get(LOSSLESS, NOWHERE), MOST),
            Claim(SAYS % f"FLOPs of a step at {PAPERS}", within.pop() if len(within) == 1 else None, found),
        ]


def _cost_rows(trainees: Sequence[DrafterTrainer], found: dict[str, StepCost]) -> list[tuple[Value, ...]]:
    base = found[BASE]
    whole = {t.name: found[t.name].seconds + base.seconds * t.needs_base for t in trainees}
    rows: list[tuple[Value, ...]] = [(BASE, None, float(base.seconds.mean()), None, None, None, base.peak / MIB)]
    for t in trainees:
        over, around = share(whole[t.name], whole[MEDUSA])
        learnt = sum(p.numel() for p in t.module.parameters() if p.requires_grad)
        means = float(found[t.name].seconds.mean()), float(whole[t.name].mean())
        between = None if t.name == MEDUSA else interval(around) or None
        rows.append((t.name, learnt, *means, over, between, found[t.name].peak / MIB))
    return rows


def _seconds_plot(grid: Grid) -> Plot:
    """Draw the seconds of a step, those of the base's pass apart."""
    rows = [(str(row[0]), number_or_none(row[2]), number_or_none(row[3])) for row in grid.rows[1:]]
    series: dict[str, Points] = {
        BASE: [(name, (whole or 0) - (own or 0)) for name, own, whole in rows],
        "the drafter": [(name, own) for name, own, _ in rows],
    }
    label = "Bar chart: seconds of a training step of each drafter, and of the base's pass that it needs."
    return bars(Text("steps", AppendixJ.title, label), series, grid, Axis("s a step"), stacked=True)


@dataclass(frozen=True, slots=True)
class StepFlops:
    """FLOPs of a row's step where a share of its positions is learnt: of the drafter's part, and of the base's pass."""

    drafter: str
    share: float
    own: int
    base: int


def counted_steps(model: str, drafters: Mapping[str, str], bench: Bench) -> Iterator[StepFlops]:
    """Count a step of each drafter, {name: as `new_trainees` takes it}, at each share of LEARNT. All need the base.

    The drafters and their losses are those that train; only weights and text are missing. FLOPs are those of forward
    and backward passes, with what segments compute a second time.
    """
    target = meta_target(model)
    with META:
        trainees = new_trainees(dict(drafters), target, bench)
    for learnt in LEARNT:
        for trainee in trainees:
            yield _counted(trainee, learnt, target)


def _counted(trainee: DrafterTrainer, learnt: float, target: Target) -> StepFlops:
    ids = torch.zeros(1, LENGTH, dtype=torch.long, device=META)
    labels = torch.zeros(1, LENGTH, LABELS, dtype=torch.long, device=META)
    anchors = int(learnt * LENGTH)
    batch = Batch(ids, labels, Anchors(ids[:, :anchors], labels[:, :anchors]))
    states = base_states(target, ids, trainee.taps, trainee.kv_from)
    base = flops(lambda: base_states(target, ids, trainee.taps, trainee.kv_from))
    with META:  # for what a loss makes without naming a device
        own = flops(lambda: trainee.loss(states, batch)[0].backward(), learning=True)
    return StepFlops(trainee.name, learnt, own, base)


def _flops_grid(bench: Bench) -> Grid:
    """Count the same steps at the papers' base."""
    found = list(counted_steps(PAPERS, {name: DRAFTERS[name] for name in COUNTED}, bench))
    medusa = {step.share: step.own + step.base for step in found if step.drafter == MEDUSA}
    forms = {
        "drafter": "text", "positions that learn": "percent 0", "TFLOPs a step": "number", "with the base": "number",
        "over Medusa's": "times",
    }  # fmt: skip
    rows = [
        (s.drafter, s.share, s.own / 1e12, (s.own + s.base) / 1e12, (s.own + s.base) / medusa[s.share]) for s in found
    ]
    return table("flops", forms, rows, f"FLOPs of a training step at {PAPERS}, a row of {LENGTH} tokens")
