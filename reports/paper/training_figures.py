"""Figures of variants that are trained here: MSA layers (11, 12 a), and true future tokens (4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specbench_ss.engine.kv_cache import PrefixCache
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.fine_tuned import lora_parameters, with_lora
from specbench_ss.methods.ss.train import StreamsTrainer
from specbench_ss.models.checkpoint import belongs_to
from specbench_ss.options import MethodSpec
from specbench_ss.reports import charts
from specbench_ss.reports.paper.claims import all_of, number_or_none, rising
from specbench_ss.reports.paper.experiment import MEASURED, TrainingExperiment, health, machine, spec_for, table
from specbench_ss.reports.paper.figures import PERCENT, lines, plot, series_of
from specbench_ss.reports.paper.training import VariantsExperiment, lab_text, train_variants
from specbench_ss.results.analysis import Results
from specbench_ss.results.report import Bench, Claim, Experiment, Request, Result, Value
from specbench_ss.runs.config import RunConfig
from specbench_ss.training.batch import Anchors, BaseStates, Batch, base_states, future_labels
from specbench_ss.training.loop import Budget, PackedText
from specbench_ss.training.losses import head_loss, head_sums
from specbench_ss.training.masks import additive
from specbench_ss.training.trainer import DrafterTrainer

# -- figures 11 and 12 (a): multi-stream-attention (MSA) layers ---------------------------------------------------

GAMMA, ADAPTER_RANK, LR, EMBEDDING_LR = 4, 128, 1.5e-2, 0.1  # the lab's: docs/log.md
LAYERS_BUDGET = Budget(steps=240, rows_per_step=4, anchors_per_row=64, ahead=GAMMA, warmup=20)
TALKS, VALIDATION_TALKS, VALIDATION_BATCHES = 3000, 200, 12
ADVICE = {"k": 3, "n_draft": 8, "n_keep": 16}
EMBEDDINGS, ROTATION = "stream embeddings", "value rotation"
LAYERS, GUESSES = "MSA layers", [f"stream {j}" for j in range(1, GAMMA + 1)]  # columns


@dataclass(frozen=True, slots=True)
class Shape:
    """Lossless streams of one shape. series: the kind of streams. layers: the number of MSA layers, N_s."""

    series: str
    layers: int

    @property
    def options(self) -> dict[str, str]:
        """Return the options in which shapes differ."""
        return {"n_msa_layers": str(self.layers), "stream_init": "rotation" if self.series == ROTATION else "embedding"}

    @property
    def name(self) -> str:
        """Return the name for its folder and in progress lines."""
        return f"{self.options['stream_init']}-{self.layers}"

    @property
    def drafter(self) -> str:
        """Return it as `ssbench train together --drafters` takes it."""
        common = {"gamma": GAMMA, "adapter_rank": ADAPTER_RANK, "lr": LR, "embedding_lr": EMBEDDING_LR}
        return f"ss[{','.join(f'{name}={value}' for name, value in {**self.options, **common}.items())}]"

    def spec(self, given: MethodSpec, **more: str) -> MethodSpec:
        """Return `ss` with the user's options and these streams. Pruning is off, since the lab's tree is small."""
        return MethodSpec("ss", {**self.options, "prune": "off", **given.options, **more})


@torch.inference_mode()
def accuracies(target: Target, trainees: Sequence[StreamsTrainer], text: PackedText) -> list[list[float]]:
    """Return the top-1 accuracy on validation text, teacher-forced, [trainees][gamma].

    The base runs once a batch.
    """
    layers = sorted({layer for t in trainees for layer in t.aux_hidden_state_layers})
    lowest = min(t.first_msa_layer for t in trainees)
    right = torch.zeros(len(trainees), GAMMA)
    known = torch.zeros(GAMMA)
    for i in range(VALIDATION_BATCHES):
        batch = text.batch(i, LAYERS_BUDGET, target.device)
        labels = batch.anchors.labels[..., 1 : GAMMA + 1]
        known += (labels != -100).sum((0, 1)).cpu()
        states = base_states(target, batch.ids, layers, lowest)
        for row, trainee in zip(right, trainees, strict=True):
            row += head_sums(trainee.stream_logits(states, batch.anchors.at), labels)[1].cpu()
    shares: list[list[float]] = (right / known.clamp_min(1)).tolist()
    return shares


class StreamsByLayers(VariantsExperiment):
    """Streams of several shapes: their accuracy, and the gain of a decoding pass with them."""

    uses = Experiment.uses
    variants: ClassVar[tuple[Shape, ...]]
    notes: ClassVar[tuple[str, ...]]

    def configs(self, request: Request) -> dict[str, RunConfig]:
        """Return the run with all methods. The streams' folders are known only once they are trained."""
        given = spec_for(request, "ss")
        return {"run": self.run_of(request, [v.spec(given) for v in self.variants])}

    def train(self, bench: Bench) -> list[tuple[MethodSpec, dict[str, Value]]]:
        """Train all together, and measure the accuracy of each stream on validation text."""
        target, seed, given = bench.target(), bench.request.seed, spec_for(bench.request, "ss")
        variants = [v for v in self.variants if v.layers <= target.n_layers]
        drafters, text = {v.name: v.drafter for v in variants}, lab_text(target, "train", TALKS, seed)
        trainees: Any = train_variants(bench, target, drafters, text, LAYERS_BUDGET, "streams").trainers
        shares = accuracies(target, trainees, lab_text(target, "eval", VALIDATION_TALKS, seed))
        trained = []
        for variant, trainee, guesses in zip(variants, trainees, shares, strict=True):
            folder = bench.folder / "streams" / variant.name
            trainee.save(folder, {**belongs_to(target), "advice": ADVICE})
            cells: dict[str, Value] = {"streams": variant.series, LAYERS: variant.layers}
            cells |= zip(GUESSES, guesses, strict=True)
            trained.append((variant.spec(given, weights=str(folder)), cells))
        return trained

    def show(self, rows: Sequence[dict[str, Value]], run: Results) -> Result:
        """Show accuracies and τ against the number of layers."""
        forms = {"streams": "text", LAYERS: "count", **dict.fromkeys(GUESSES, "percent 1"), "τ": "number"}
        grid = table("layers", forms | MEASURED, rows, f"{self.source}: {self.title}")
        named = {"by": "streams", "x_title": f"{LAYERS}, N_s"}
        figures = (
            lines("tau", f"tokens per step against {LAYERS}", grid, LAYERS, {"": "τ"}, "τ", **named),
            lines("accuracy", f"right guesses of each stream against {LAYERS}", grid, LAYERS, GUESSES,
                  "top-1 accuracy, validation text", **named, **PERCENT),
        )  # fmt: skip
        about_run = f"ours: {machine(run)}; streams of {LAYERS_BUDGET.steps} steps on the same batches"
        return Result((grid,), figures, notes=(about_run, *health(run), *self.notes))


class Figure11(StreamsByLayers):
    """The experiment `figure-11`."""

    name, source = "figure-11", "EMNLP figure 11"
    title = "number of MSA layers, lossless streams"
    variants = tuple(Shape(EMBEDDINGS, n) for n in (1, 2, 4, 6, 8))
    rows = {f"{v.series}, N_s = {v.layers}": "" for v in variants}
    settings = {"suite": "apps", "categories": ("sql", "dialogue_summary"), "limit": 6}
    notes = (
        "published: a task's score (SQL exact match, dialogue ROUGE-LSum) of OPT-1.3B in shared mode, over N_s; "
        "the values are drawn, not printed. 2 to 8 layers are called a good trade-off; 4 are used (app. E.2)",
        "lossless streams leave the answers as they are, so what grows with N_s here is how well streams guess",
    )

    def claims(self, result: Result) -> Sequence[Claim]:
        """Test app. E.2; of single trainings, so without intervals. The trade-off with FLOPs is not tested."""
        by_layers = [(f"N_s = {row[LAYERS]}", number_or_none(row["τ"])) for row in result.grids[0].records()]
        return [rising("More MSA layers are better (here: τ in place of the task's score)", by_layers)]


class Figure12a(StreamsByLayers):
    """The experiment `figure-12a`."""

    name, source = "figure-12a", "EMNLP figure 12 (a)"
    title = "value rotation against stream embeddings, lossless streams"
    variants = tuple(Shape(series, n) for series in (EMBEDDINGS, ROTATION) for n in (2, 4, 8))
    rows = {f"{v.series}, N_s = {v.layers}": "" for v in variants}
    settings = {"suite": "apps", "categories": ("dialogue_summary",), "limit": 8}
    notes = (
        "published: dialogue ROUGE-LSum of OPT-1.3B in shared mode, over N_s; the values are drawn, not printed. "
        "Rotation tends to score lower; with N_s = 16 it scores higher than embeddings with N_s = 4 (app. E.4)",
        "lossless streams leave the answers as they are: what differs here is how well streams guess",
        "our streams also stand at positions of their own (i + j), so rotated ones differ by more than their values",
    )

    def claims(self, result: Result) -> Sequence[Claim]:
        """Test app. E.4; of single trainings, so without intervals."""
        rows = result.grids[0].records()
        tau = {(row["streams"], row[LAYERS]): number_or_none(row["τ"]) for row in rows}
        shared = [n for series, n in tau if series == ROTATION and (EMBEDDINGS, n) in tau]
        pairs = [
            rising("", [(f"rotation, N_s = {n}", tau[ROTATION, n]), ("embeddings", tau[EMBEDDINGS, n])]) for n in shared
        ]
        rotated = [(f"N_s = {n}", tau[ROTATION, n]) for n in shared]
        score = "(here: τ in place of the task's score)"
        return [
            all_of(f"Rotation tends to be worse than stream embeddings {score}", pairs),
            rising(f"Rotation too gains by MSA layers {score}", rotated),
        ]


# -- figure 4: true tokens of the future --------------------------------------------------------------------------

GAMMAS = (0, 1, 2, 4)
LORA_RANK, LORA_LR = 16, 2e-3
PEEKING_BUDGET = Budget(steps=240, rows_per_step=8, anchors_per_row=16, ahead=max(GAMMAS), warmup=20)
SCORED_TALKS = 60
PEEKING_NOTES = (
    "each token is predicted from the true text before it (teacher forcing); an answer is right if all its tokens are",
    "training uses the tokens of which the base is least sure, since it is sure of most; all tokens are scored",
    "the future tokens are known here, in training and in scoring; in decoding they are not",
    "the paper states that the attention mask was changed, but not how. A mask that only shows positions i+2.. to "
    "position i would show it x_{i+1} too, one layer up, in their states; here a prediction sees no state that "
    "depends on its token. After the last future token the end token follows, so a look ahead reveals it",
    "published: Phi-3's generation metrics; the paper draws its values and prints none",
)


class PeekingTrainee(DrafterTrainer):
    """LoRA in every layer, trained on the next token. gamma 0 has no look ahead and serves for comparison.

    The row that predicts x_{i+1} must learn nothing of x_{i+1} itself, neither from a later token's state nor from an
    earlier row's that has seen it. So each predicted position has its own rows: row 0 holds x_i again, peek j the true
    x_{i+1+j} at its position. Peeks see the frozen base's keys up to i and the peeks up to themselves; row 0 sees the
    base's keys before i, itself and its peeks. That is the layout of streams under eq. 3, with the truth in the
    streams' place, in every layer; LoRA teaches these rows, and the keys that they read stay the base's.
    """

    kv_from = 0

    def __init__(self, target: Target, gamma: int, lora_rank: int = LORA_RANK, lr: float = LORA_LR) -> None:
        self.name, self.gamma, self.lr = f"gamma-{gamma}", gamma, lr
        self.tuned = with_lora(target, lora_rank)
        if any(block.window for block in self.tuned.family.blocks):
            raise UserError("future tokens cannot be shown to layers with a sliding window")
        self.module = nn.ParameterList(lora_parameters(self.tuned.model))

    def loss(self, states: BaseStates, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the mean next-token cross-entropy (nats) where the base is least sure, and the share right [1].

        As many positions of each row are used as the batch has anchors.
        """
        with torch.no_grad():
            chosen = least_sure(self.tuned.logits(states.final), batch.labels, batch.anchors.at.shape[1])
        logits = self.logits(states, batch.ids, chosen.at, chosen.labels[..., 1 : 1 + self.gamma])
        return head_loss(logits[..., None, :], chosen.labels[..., :1], [1.0])

    def logits(self, states: BaseStates, ids: Tensor, at: Tensor, ahead: Tensor) -> Tensor:
        """Return next-token logits [B, a, V] at positions `at` [B, a] of ids [B, T].

        states: those of the base on these ids.

        ahead: int64 [B, a, gamma], the tokens x_{i+2}..x_{i+1+gamma} that are seen of the future; -100 hides one.
        """
        target = self.tuned
        own = torch.cat((ids.gather(1, at)[..., None], ahead.clamp_min(0)), 2)  # [B, a, 1 + gamma]
        steps = torch.tensor([0, *range(2, self.gamma + 2)], device=ids.device)
        places = (at[..., None] + steps).clamp_max(target.context_length - 1).flatten(1)
        x = target.embed(own.flatten(1), places)
        mask = additive(visible(ids.shape[1], at, ahead != -100), x.dtype)
        (x,) = target.run(x, 0, target.n_layers, PrefixCache(states.kv), mask, target.rotary(places))
        return target.logits(target.family.norm(x.unflatten(1, own.shape[1:])[:, :, 0]))


def least_sure(logits: Tensor, labels: Tensor, count: int) -> Anchors:
    """Return the `count` answer positions of each row with the largest entropy, since most others teach nothing.

    logits: [B, T, V]; labels: int64 [B, T, 1 + ahead]. The true tokens do not matter. A row with fewer answer positions
    gets places whose label is -100.
    """
    logs = logits.float().log_softmax(-1)
    entropy = -(logs.exp() * logs).sum(-1)  # [B, T]
    at = entropy.masked_fill(labels[..., 0] == -100, -1.0).topk(count, 1).indices
    return Anchors(at, labels.gather(1, at[..., None].expand(-1, -1, labels.shape[-1])))


def visible(t: int, at: Tensor, known: Tensor) -> Tensor:
    """Return the mask of the 1 + gamma rows of each position, bool [B, a(1+gamma), T + a(1+gamma)].

    The base's rows come first, then these. at: int64 [B, a]. known: bool [B, a, gamma], False for missing peeks, which
    only see themselves.
    """
    a, size = at.shape[1], 1 + known.shape[2]
    keys = torch.arange(t, device=at.device)
    before = (keys < at[..., None])[:, :, None]  # [B, a, 1, T]: row 0 is itself the row at i
    up_to = (keys <= at[..., None])[:, :, None].expand(-1, -1, size - 1, -1)
    past = torch.cat((before, up_to), 2).flatten(1, 2)  # [B, a * size, T]
    own = torch.ones(size, size, dtype=torch.bool, device=at.device).tril()
    own[0], own[1:, 0] = True, False
    alone = torch.eye(size, dtype=torch.bool, device=at.device)
    seen = (own & F.pad(known, (1, 0), value=True)[:, :, None]) | alone  # [B, a, size, size]
    each = torch.eye(a, dtype=torch.bool, device=at.device)[:, None, :, None]
    groups = (seen[:, :, :, None] & each).flatten(3, 4).flatten(1, 2)  # [B, a * size, a * size]
    return torch.cat((past, groups), 2)


@dataclass(frozen=True, slots=True)
class Found:
    """Results on validation text: nats per token, accuracy of tokens, share of answers with every token correct."""

    loss: float
    right: float
    answers: float
    tokens: int


@torch.inference_mode()
def validation_results(target: Target, trainees: Sequence[PeekingTrainee], text: PackedText) -> list[Found]:
    """Score every answer token of every row, one row at a time. The base runs once a row."""
    scores: list[list[tuple[Tensor, Tensor, Tensor]]] = [[] for _ in trainees]  # losses, hits, whole answers of a row
    for row, answer in zip(text.rows, text.packed.mask, strict=True):
        ids = row.astype(np.int64)[None]
        labels = torch.from_numpy(future_labels(ids, answer[None], max(t.gamma for t in trainees)))[0]
        at = (labels[:, 0] != -100).nonzero()[:, 0]
        if not len(at):
            continue
        truth, breaks = labels[at, 0], _breaks(at)
        here, ahead = torch.from_numpy(ids).to(target.device), labels[None, at, 1:].to(target.device)
        states = base_states(target, here, (), 0)
        for trainee, own in zip(trainees, scores, strict=True):
            found = trainee.logits(states, here, at[None].to(here.device), ahead[..., : trainee.gamma])[0].float().cpu()
            hits = found.argmax(-1) == truth
            whole = torch.stack([part.all() for part in hits.tensor_split(breaks)])
            own.append((F.cross_entropy(found, truth, reduction="none"), hits, whole))
    sums = ([torch.cat(part).float() for part in zip(*own, strict=True)] for own in scores)
    return [Found(float(a.mean()), float(b.mean()), float(c.mean()), len(a)) for a, b, c in sums]


def _breaks(at: Tensor) -> list[int]:
    """Return where in the answer positions at [n] the second and later answers begin."""
    return [int(i) + 1 for i in (at[1:] != at[:-1] + 1).nonzero()[:, 0]]


class Figure4(TrainingExperiment):
    """Figure 4: gain in accuracy of a model trained to see the gamma true tokens after the next one (eq. 7)."""

    name, source = "figure-4", "EMNLP figure 4"
    title = "the next token, known to a model that sees the gamma true tokens after it"
    rows = {f"gamma = {g}": "" for g in GAMMAS}

    def claims(self, result: Result) -> Sequence[Claim]:
        """Test the caption: seeing true future tokens improves generation substantially."""
        seen = [row for row in result.grids[0].rows if row[0] != "base"]
        shares = [(f"gamma = {row[1]}", number_or_none(row[2])) for row in (seen[0], seen[-1])]
        return [rising("Seeing true future tokens improves generation (here: right tokens)", shares, "{:.1%}")]

    def make(self, bench: Bench) -> Result:
        """Train all together on the same batches, then score validation text."""
        target, seed = bench.target(), bench.request.seed
        text, other = lab_text(target, "train", TALKS, seed), lab_text(target, "eval", SCORED_TALKS, seed)
        torch.manual_seed(seed)
        trainees = [PeekingTrainee(target, gamma) for gamma in GAMMAS]
        base = validation_results(target, [PeekingTrainee(target, 0)], other)  # LoRA starts as nothing
        train_variants(bench, target, trainees, text, PEEKING_BUDGET, "peeking")
        found = validation_results(target, trainees, other)
        names = ["base", *[f"{PEEKING_BUDGET.steps} steps"] * len(GAMMAS)]
        rows = [
            (name, gamma, f.right, f.answers, f.loss, f.tokens)
            for name, gamma, f in zip(names, (0, *GAMMAS), base + found, strict=True)
        ]
        forms = {
            "model": "text", "gamma": "count", "right tokens": "percent 1", "right answers": "percent 1",
            "nats per token": "number 4", "tokens": "count",
        }  # fmt: skip
        grid = table("peeking", forms, rows, f"{self.source}: {self.title}")
        series = series_of(replace(grid, rows=grid.rows[1:]), "gamma", ["right tokens", "right answers"])
        drawn = charts.lines(series, "true future tokens seen, gamma", "share right")
        about = (
            f"ours: {bench.request.model}; LoRA of rank {LORA_RANK} in every layer, {PEEKING_BUDGET.steps} steps, "
            "validation text"
        )
        figure = plot("figure", self.title, grid, drawn, **PERCENT)
        return Result((grid,), (figure,), notes=(about, *PEEKING_NOTES))
