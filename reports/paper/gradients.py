"""Figure 6: how much gradient the stream losses send into the base's MLP blocks, layer by layer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from specbench_ss.engine.kv_cache import StreamCache
from specbench_ss.engine.target import Target
from specbench_ss.methods.ss.decoding import SpeculativeStreaming
from specbench_ss.methods.ss.options import SSOptions
from specbench_ss.methods.ss.shared_training import SharedTrainee
from specbench_ss.methods.ss.stream_config import StreamConfig
from specbench_ss.methods.ss.training import StreamsTrainee
from specbench_ss.reports.paper.figures import ACL, axes, lines, source
from specbench_ss.reports.paper.lab_text import lab_text
from specbench_ss.reports.paper.missing_parts import nothing_runs, of_method, training_text
from specbench_ss.results.report import Bench, Claim, Column, Experiment, Grid, Part, Plot, Request, Result, Value
from specbench_ss.training.batches import Batch
from specbench_ss.training.side_by_side import Budget, DrafterText, TogetherTrainer
from specbench_ss.training.trainee import BaseStates

BATCHES = 8
STEPS = 60  # of the shared training
BUDGET = Budget(steps=STEPS, rows_per_step=4, anchors_per_row=32, warmup=10)
SHARED = StreamConfig(mode="shared", adapter_rank=0, lora_rank=32)  # streams in the layers' own MLPs, 2024's attention
_MLP = re.compile(r"\.(?:layers|h)\.(\d+)\.(?:.*\.)?(?:mlp|fc1|fc2)\b(?!.*lora_)")
EARLY = 0.1  # of the largest gradient: what an early layer's is called strong from
NOTES = (
    "lossless losses are means over sampled anchors, shared ones over all answer positions: only compare shapes",
    "gradients on the base's MLP weights. Lossless mode freezes the base, so there it is the gradient it would get",
    "lossless: the last layer gets no gradient, since streams pass beside its MLP and no later key uses its output",
    f"shared: LoRA of rank {SHARED.lora_rank}, main rows see no streams (2024 eq. 1), so that the losses separate; "
    f"{STEPS} steps, where the paper looks at step 5000",
    "published: the paper draws its values and prints none",
)
Loss = Callable[[Batch], Tensor]


def states_with_gradient(target: Target, ids: Tensor, lo: int) -> BaseStates:
    """Run the base over ids [B, T] as `base_states` does, but as part of the graph; layer inputs from lo - 1 on."""
    t = ids.shape[1]
    positions = torch.arange(t, device=ids.device)[None]
    cache = StreamCache(dict.fromkeys(range(target.n_layers)), mains=t)
    tapped: dict[int, Tensor] = {}
    x = target.embed(ids, positions)
    x = target.run(x, 0, target.n_layers, cache, None, target.rotary(positions, t), range(target.n_layers), tapped)
    return BaseStates(target.family.norm(x), tapped, {i: cache.kept[i] for i in range(lo, target.n_layers)})


def lossless_loss(target: Target, trainee: StreamsTrainee) -> Loss:
    """Return the loss of the streams' terms of eq. 6, with alpha_j = 1."""
    trainee.prune_weight = 0.0
    return lambda batch: trainee.loss(states_with_gradient(target, batch.ids, trainee.lo), batch)[0]


def shared_loss(trainee: SharedTrainee) -> Loss:
    """Return the same loss for shared mode: eq. 6 with alpha_j = 1 minus eq. 6 with alpha_j = 0.

    Raises ValueError where main rows see their streams (eq. 3): there the two differ in more than the streams' terms.
    """
    if trainee.config.main_attends_streams:
        raise ValueError("the losses of main rows and streams do not separate where main rows see streams")
    trainee.prune_weight = 0.0

    def eq_6(batch: Batch, alpha: float) -> Tensor:
        trainee.alpha_j = alpha
        return trainee.loss(BaseStates(torch.empty(0), {}, {}), batch)[0]

    return lambda batch: eq_6(batch, 1.0) - eq_6(batch, 0.0)


@contextmanager
def learning_mlps(model: nn.Module) -> Iterator[Sequence[tuple[int, Tensor]]]:
    """Yield (layer, weight) of the MLPs, which ask for gradients while the context lasts."""
    found = [(int(m[1]), p) for name, p in model.named_parameters() if (m := _MLP.search(name))]
    for _, p in found:
        p.requires_grad_(True)
    try:
        yield found
    finally:
        for _, p in found:
            p.requires_grad_(False)


def gradient_norms(model: nn.Module, layers: int, loss: Loss, batches: Sequence[Batch]) -> list[float]:
    """Return the norm of the gradient on each layer's MLP weights, its mean over batches."""
    total = torch.zeros(layers)
    with learning_mlps(model) as mlps, torch.enable_grad():
        for batch in batches:
            found = torch.autograd.grad(loss(batch), [p for _, p in mlps], allow_unused=True)
            squares = torch.zeros(layers)
            for (layer, _), gradient in zip(mlps, found, strict=True):
                if gradient is not None:  # None: the loss does not depend on it
                    squares[layer] += float(gradient.pow(2).sum())
            total += squares.sqrt()
    return [float(norm) for norm in total / len(batches)]


class Figure6(Experiment):
    """The experiment `figure-6`."""

    name = "figure-6"
    title = "gradient norms that stream losses send into each MLP block, at the start and trained"
    source = source(ACL, "figure", 6)
    uses = ("model", "device", "dtype", "seed")

    def parts(self, request: Request) -> Sequence[Part]:
        """Return a row for each mode, at the start and trained."""
        text = training_text(request)
        return [
            Part("shared mode, at the start and trained", text),
            Part("lossless streams, at the start", text),
            Part("lossless streams, trained", text or of_method("ss", request)),
        ]

    def run(self, bench: Bench) -> Result:
        """Compute gradients of the same batches for fresh and for trained streams."""
        parts = self.parts(bench.request)
        if parts[2].missing:
            raise nothing_runs(self.name, parts)
        target = bench.target()
        text = lab_text(target, "train", 200, bench.request.seed)
        batches = [text.batch(i, BUDGET, target.device) for i in range(BATCHES)]
        series = {
            name: gradient_norms(model, target.n_layers, loss, batches)
            for name, model, loss in _states_of_training(bench, target, text)
        }
        return self._show(series, bench)

    def claims(self, result: Result) -> Sequence[Claim]:
        """Caption: at the start, strong gradients reach early and mid-level layers too."""
        grid = result.grids[0]
        at = [column.title for column in grid.columns].index("shared, at the start")
        norms = [float(row[at] or 0.0) for row in grid.rows]
        early, most = min(norms[: max(1, len(norms) // 2)]), max(norms)
        found = (
            f"least of the first half of the layers {early:.3g}, largest of all {most:.3g}; {EARLY:.0%} of the largest "
            "is called strong here"
        )
        says = "At the start of shared training, early layers get strong gradients too"
        return [Claim(says, early >= EARLY * most, found, sure=False)]

    def _show(self, series: dict[str, list[float]], bench: Bench) -> Result:
        columns = (Column("layer", "count"), *(Column(name, "number", 4) for name in series))
        rows: list[tuple[Value, ...]] = [(i, *values) for i, values in enumerate(zip(*series.values(), strict=True))]
        grid = Grid("gradients", columns, tuple(rows), f"{self.source}: norm of the stream losses' gradient")
        drawn = {name: [(float(i), v or None) for i, v in enumerate(values)] for name, values in series.items()}
        label = f"Line chart: gradient norm by layer: {', '.join(series)}."
        plot = Plot("figure", self.title, label, lines(drawn), axes("layer", "gradient norm", type="log"), grid)
        about = (
            f"ours: {bench.request.model}; mean over {BATCHES} batches of {BUDGET.rows_per_step} rows, training text"
        )
        return Result((grid,), (plot,), notes=(about, *NOTES))


def _states_of_training(bench: Bench, target: Target, text: DrafterText) -> Iterator[tuple[str, nn.Module, Loss]]:
    """Yield what is drawn: its name, the model whose MLPs get the gradient, and the loss."""
    trained = SpeculativeStreaming.load(target, SSOptions()).streams
    shared = _shared(target, bench, text, "start")
    yield "shared, at the start", shared.tuned.model, shared_loss(shared)
    shared = _shared(target, bench, text, "trained")
    yield f"shared, {STEPS} steps", shared.tuned.model, shared_loss(shared)
    lossless = StreamsTrainee(target, trained.config)
    TogetherTrainer(target, [lossless], text, BUDGET, bench.folder / "lossless-start")  # P_j at the scale of the states
    yield "lossless, at the start", target.model, lossless_loss(target, lossless)
    lossless = StreamsTrainee(target, trained.config)
    lossless.module = trained
    yield "lossless, trained", target.model, lossless_loss(target, lossless)


def _shared(target: Target, bench: Bench, text: DrafterText, stage: str) -> SharedTrainee:
    """Return a shared trainee, fresh from the seed, and trained unless the stage is the start."""
    torch.manual_seed(bench.request.seed)
    trainee = SharedTrainee(target, SHARED, lr=2e-3, stream_lr=2e-3)
    trainer = TogetherTrainer(target, [trainee], text, BUDGET, bench.folder / f"shared-{stage}")
    if stage != "start":
        trainer.train(bench.log)
    return trainee
