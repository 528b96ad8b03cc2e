"""Figures 11 and 12 (a): streams in more or fewer multi-stream-attention (MSA) layers, trained on the same batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from specbench_ss.engine.target import Target
from specbench_ss.methods.ss.stream_config import StreamConfig
from specbench_ss.methods.ss.training import StreamsTrainee
from specbench_ss.models.checkpoint import belongs_to, write_checkpoint
from specbench_ss.options import REFERENCE, MethodSpec
from specbench_ss.reports.paper.claims import all_of, number_or_none, place_of, rising
from specbench_ss.reports.paper.figures import ACL, axes, health, lines, machine, source
from specbench_ss.reports.paper.lab_text import lab_text
from specbench_ss.reports.paper.missing_parts import config_for, nothing_runs, training_text
from specbench_ss.results.report import Bench, Claim, Column, Experiment, Grid, Part, Plot, Request, Result, Value
from specbench_ss.results.summary import OVERALL, SummaryRow, summarise
from specbench_ss.results.text import interval
from specbench_ss.runs.config import RunConfig
from specbench_ss.runs.records import Run
from specbench_ss.training.losses import head_sums
from specbench_ss.training.side_by_side import Budget, DrafterText, TogetherTrainer
from specbench_ss.training.trainee import base_states

GAMMA, ADAPTER_RANK, LR, EMBEDDING_LR = 4, 128, 1.5e-2, 0.1  # the lab's: docs/log.md
BUDGET = Budget(steps=240, rows_per_step=4, anchors_per_row=64, ahead=GAMMA, warmup=20)
TRAIN_TALKS, HELD_OUT_TALKS, HELD_OUT_BATCHES = 3000, 200, 12
ADVICE = {"k": 3, "n_draft": 8, "n_keep": 16}
EMBEDDINGS, ROTATION = "stream embeddings", "value rotation"


@dataclass(frozen=True, slots=True)
class Variant:
    """Streams of one shape. series: the kind of streams. layers: the number of MSA layers, N_s."""

    series: str
    layers: int

    @property
    def config(self) -> StreamConfig:
        """Return the configuration of these lossless streams; variants differ only in their own two fields."""
        shape = StreamConfig(GAMMA, self.layers, ADAPTER_RANK)
        return replace(shape, stream_init="rotation") if self.series == ROTATION else shape

    @property
    def name(self) -> str:
        """Return the name for its folder and in progress lines."""
        return f"{self.config.stream_init}-{self.layers}"

    def spec(self, given: MethodSpec, **more: str) -> MethodSpec:
        """Return `ss` with the user's options and these streams. Pruning is off, since the lab's tree is small."""
        own = {"n_msa_layers": str(self.layers), "stream_init": self.config.stream_init, "prune": "off"}
        return MethodSpec("ss", own | given.options | more)


def trainee_of(variant: Variant, target: Target, seed: int) -> StreamsTrainee:
    """Return an untrained trainee. Variants of one shape begin with the same weights."""
    torch.manual_seed(seed)
    return StreamsTrainee(target, variant.config, LR, EMBEDDING_LR, name=variant.name)


@torch.inference_mode()
def accuracies(target: Target, trainees: Sequence[StreamsTrainee], text: DrafterText) -> list[list[float]]:
    """Return the share of right top-1 guesses on held-out text, teacher-forced, [trainees][gamma].

    The base runs once a batch.
    """
    taps = sorted({layer for t in trainees for layer in t.taps})
    lowest = min(t.lo for t in trainees)
    right = torch.zeros(len(trainees), GAMMA)
    known = torch.zeros(GAMMA)
    for i in range(HELD_OUT_BATCHES):
        batch = text.batch(i, BUDGET, target.device)
        labels = batch.anchors.labels[..., 1 : GAMMA + 1]
        known += (labels != -100).sum((0, 1)).cpu()
        states = base_states(target, batch.ids, taps, lowest)
        for row, trainee in zip(right, trainees, strict=True):
            row += head_sums(trainee.stream_logits(states, batch.anchors.at), labels)[1].cpu()
    shares: list[list[float]] = (right / known.clamp_min(1)).tolist()
    return shares


class StreamsByLayers(Experiment):
    """Streams of several shapes: how well each guesses, and what a decoding pass gains with them."""

    trains = True
    variants: ClassVar[tuple[Variant, ...]]
    categories: ClassVar[tuple[str, ...]]
    limit: ClassVar[int]
    notes: ClassVar[tuple[str, ...]]

    def parts(self, request: Request) -> Sequence[Part]:
        """Return a row for each shape."""
        return [Part(f"{v.series}, N_s = {v.layers}", training_text(request)) for v in self.variants]

    def configs(self, request: Request) -> dict[str, RunConfig]:
        """Return the run with all methods. The streams' folders are known only once they are trained."""
        config, given = self._config(request)
        return {"run": replace(config, methods=(*config.methods, *(v.spec(given) for v in self.variants)))}

    def _config(self, request: Request) -> tuple[RunConfig, MethodSpec]:
        """Return the run without streams, and `ss` with the user's options."""
        config = config_for(request, ["ss"], suite="apps", categories=self.categories, limit=self.limit)
        given = next(spec for spec in config.methods if spec.name == "ss")
        return replace(config, methods=(MethodSpec(REFERENCE),)), given

    def run(self, bench: Bench) -> Result:
        """Train all side by side, measure guesses on held-out text, then decode."""
        parts = self.parts(bench.request)
        if any(part.missing for part in parts):
            raise nothing_runs(self.name, parts)
        target, seed = bench.target(), bench.request.seed
        variants = [v for v in self.variants if v.layers <= target.n_layers]
        trainees = [trainee_of(v, target, seed) for v in variants]
        text = lab_text(target, "train", TRAIN_TALKS, seed)
        TogetherTrainer(target, trainees, text, BUDGET, bench.folder / "streams").train(bench.log, save_every=20)
        shares = accuracies(target, trainees, lab_text(target, "eval", HELD_OUT_TALKS, seed))
        config, given = self._config(bench.request)
        specs = []
        for variant, trainee in zip(variants, trainees, strict=True):
            about = {**belongs_to(target), "advice": ADVICE}
            folder = bench.folder / "streams" / variant.name
            write_checkpoint(folder, trainee.module, about | {"streams": variant.config.as_dict()})
            specs.append(variant.spec(given, weights=str(folder)))
        run = bench.measure(replace(config, methods=(*config.methods, *specs)), "run")
        measured = {row.method: row for row in summarise(run) if row.category == OVERALL}
        rows = [_row(v, s, measured[m.label]) for v, s, m in zip(variants, shares, specs, strict=True)]
        return self._show(rows, run)

    def _show(self, rows: list[tuple[Value, ...]], run: Run) -> Result:
        columns = (
            Column("streams", "text"),
            Column("MSA layers", "count"),
            *(Column(f"stream {j}", "percent", 1) for j in range(1, GAMMA + 1)),
            Column("tau"),
            Column("speedup", "times"),
            Column("95 % interval", "text"),
            Column("step time over ar's", "times"),
            Column("prompts", "count"),
        )
        grid = Grid("layers", columns, tuple(rows), f"{self.source}: {self.title}")
        plots = (
            self._plot("tau", "tokens per pass against MSA layers", "tau", {"": GAMMA + 2}, grid),
            self._plot(
                "accuracy",
                "right guesses of each stream against MSA layers",
                "share right, held-out text",
                {f"stream {j}": 1 + j for j in range(1, GAMMA + 1)},
                grid,
                tickformat=".0%",
            ),
        )
        about = f"ours: {machine(run)}; streams of {BUDGET.steps} steps on the same batches"
        return Result((grid,), plots, notes=(about, *health(run), *self.notes))

    def _plot(self, name: str, title: str, y: str, columns: dict[str, int], grid: Grid, **more: Any) -> Plot:
        """Plot a line for each series and column of the grid. columns: {name: index}."""
        drawn: dict[str, list[tuple[float, Any]]] = {}
        for row in grid.rows:
            for what, column in columns.items():
                drawn.setdefault(", ".join(filter(None, (str(row[0]), what))), []).append((float(row[1]), row[column]))  # type: ignore[arg-type]
        label = f"Line chart: {title}, for {', '.join(drawn)}."
        return Plot(name, title, label, lines(drawn), axes("MSA layers, N_s", y, **more), grid)


def _row(variant: Variant, shares: list[float], row: SummaryRow) -> tuple[Value, ...]:
    cost = None if not row.step_ratio else 1 / row.step_ratio
    around = interval(row.speedup_interval) or None
    return (variant.series, variant.layers, *shares, row.tau, row.speedup, around, cost, row.n_prompts)


class Figure11(StreamsByLayers):
    """The experiment `figure-11`."""

    name, source = "figure-11", source(ACL, "figure", 11)
    title = "number of MSA layers, lossless streams"
    variants = tuple(Variant(EMBEDDINGS, n) for n in (1, 2, 4, 6, 8))
    categories, limit = ("sql", "dialogue_summary"), 6
    notes = (
        "published: a task's score (SQL exact match, dialogue ROUGE-LSum) of OPT-1.3B in shared mode, over N_s; "
        "the values are drawn, not printed. 2 to 8 layers are called a good trade-off; 4 are used (app. E.2)",
        "lossless streams leave the answers as they are, so what grows with N_s here is how well streams guess",
    )

    def claims(self, result: Result) -> Sequence[Claim]:
        """App. E.2; of single trainings, so without intervals. The trade-off with FLOPs is not held."""
        tau = place_of(result.grids[0], "tau")
        by_layers = [(f"N_s = {row[1]}", number_or_none(row[tau])) for row in result.grids[0].rows]
        return [rising("More MSA layers are better (here: tau in place of the task's score)", by_layers)]


class Figure12a(StreamsByLayers):
    """The experiment `figure-12a`."""

    name, source = "figure-12a", source(ACL, "figure", 12) + " (a)"
    title = "value rotation against stream embeddings, lossless streams"
    variants = tuple(Variant(series, n) for series in (EMBEDDINGS, ROTATION) for n in (2, 4, 8))
    categories, limit = ("dialogue_summary",), 8
    notes = (
        "published: dialogue ROUGE-LSum of OPT-1.3B in shared mode, over N_s; the values are drawn, not printed. "
        "Rotation tends to score lower; with N_s = 16 it scores higher than embeddings with N_s = 4 (app. E.4)",
        "lossless streams leave the answers as they are: what differs here is how well streams guess",
        "our streams also stand at positions of their own (i + j), so rotated ones differ by more than their values",
    )

    def claims(self, result: Result) -> Sequence[Claim]:
        """App. E.4; of single trainings, so without intervals."""
        grid, place = result.grids[0], place_of(result.grids[0], "tau")
        tau = {(row[0], row[1]): number_or_none(row[place]) for row in grid.rows}
        shared = [n for series, n in tau if series == ROTATION and (EMBEDDINGS, n) in tau]
        pairs = [
            rising("", [(f"rotation, N_s = {n}", tau[ROTATION, n]), ("embeddings", tau[EMBEDDINGS, n])]) for n in shared
        ]
        rotated = [(f"N_s = {n}", tau[ROTATION, n]) for n in shared]
        score = "(here: tau in place of the task's score)"
        return [
            all_of(f"Rotation tends to be worse than stream embeddings {score}", pairs),
            rising(f"Rotation too gains by MSA layers {score}", rotated),
        ]
