"""Figure 6: how much gradient the stream losses send into the base's MLP blocks, layer by layer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specbench_ss.experiment import Bench, Column, Experiment, Grid, Part, Plot, Request, Result, Value
from specbench_ss.methods.ss import SpeculativeStreaming
from specbench_ss.methods.ss.options import SSOptions
from specbench_ss.methods.ss.paper.base import ACL, axes, lines, source
from specbench_ss.methods.ss.paper.lab_text import lab_text
from specbench_ss.methods.ss.paper.needs import nothing_runs, of_method, training_text
from specbench_ss.methods.ss.streams import Streams
from specbench_ss.methods.ss.training import StreamsTrainee
from specbench_ss.methods.together import Budget, TogetherTrainer
from specbench_ss.methods.training import Anchors, BaseStates, Batch
from specbench_ss.target import Target

BATCHES = 8
BUDGET = Budget(steps=1, rows_per_step=4, anchors_per_row=32)
_MLP = re.compile(r"\.(?:layers|h)\.(\d+)\.(?:.*\.)?(?:mlp|fc1|fc2)\b")
NOTES = (
    "lossless streams: the base is frozen in training; this is the gradient that it would get. The paper's figure is "
    "of shared mode, where the base follows it",
    "the last layer gets none from the streams: they pass it beside its MLP, and no later key is made of its output",
    "published: the paper draws its values and prints none",
)


class _Kept:
    """A cache of one pass that keeps what it is given, gradients included."""

    is_compileable = False

    def __init__(self) -> None:
        self.kv: dict[int, tuple[Tensor, Tensor]] = {}

    def get_seq_length(self, layer: int = 0) -> int:
        """Nothing came before."""
        return 0

    def update(self, k: Tensor, v: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """k, v [B, kv_heads, T, head_dim]."""
        self.kv[layer] = (k, v)
        return k, v


def states_with_gradient(target: Target, ids: Tensor, lo: int) -> BaseStates:
    """The base over ids [B, T] as `base_states` has it, but part of the graph."""
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    cache: Any = _Kept()
    tapped: dict[int, Tensor] = {}
    rotary = target.rotary(positions, ids.shape[1])
    x = target.run(target.embed(ids, positions), 0, target.n_layers, cache, None, rotary, (lo,), tapped)
    return BaseStates(target.family.norm(x), tapped, {i: cache.kv[i] for i in range(lo, target.n_layers)})


@contextmanager
def learning_mlps(target: Target) -> Iterator[dict[int, list[Tensor]]]:
    """MLP weights by layer, which ask for gradients while the context lasts."""
    found: dict[int, list[Tensor]] = {}
    for name, p in target.model.named_parameters():
        if match := _MLP.search(name):
            found.setdefault(int(match[1]), []).append(p.requires_grad_(True))
    try:
        yield found
    finally:
        target.model.requires_grad_(False)


def gradient_norms(target: Target, streams: Streams, batches: Sequence[Batch]) -> tuple[list[float], list[float]]:
    """Norm of the gradient on each layer's MLP weights, of the stream losses' sum and of the next-token loss."""
    trainee = StreamsTrainee(target, streams.config)
    trainee.module = streams
    totals = [torch.zeros(target.n_layers), torch.zeros(target.n_layers)]
    with learning_mlps(target) as mlps, torch.enable_grad():
        for batch in batches:
            states = states_with_gradient(target, batch.ids, trainee.lo)
            for total, loss in zip(totals, _losses(target, trainee, states, batch.anchors), strict=True):
                total += _norms(loss, mlps)
    return (totals[0] / len(batches)).tolist(), (totals[1] / len(batches)).tolist()


def _losses(target: Target, trainee: StreamsTrainee, states: BaseStates, anchors: Anchors) -> tuple[Tensor, Tensor]:
    """Eq. 6's sums with alpha = 1: of the streams, and of the next token at the same positions; means over tokens."""
    g = trainee.config.gamma
    drafted = trainee.stream_logits(states, anchors.at)  # [B, A, gamma, V]
    ahead = anchors.labels[..., 1 : g + 1]
    streams = torch.stack(
        [F.cross_entropy(drafted[..., j, :].flatten(0, 1), ahead[..., j].flatten()) for j in range(g)]
    )
    following = target.logits(states.at(states.final, anchors)).flatten(0, 1)
    return streams.sum(), F.cross_entropy(following, anchors.labels[..., 0].flatten())


def _norms(loss: Tensor, mlps: dict[int, list[Tensor]]) -> Tensor:
    """[layers]; a weight that the loss does not depend on has no gradient."""
    layers = sorted(mlps)
    wanted = [(layer, p) for layer in layers for p in mlps[layer]]
    found = torch.autograd.grad(loss, [p for _, p in wanted], retain_graph=True, allow_unused=True)
    squares = torch.zeros(len(layers))
    for (layer, _), gradient in zip(wanted, found, strict=True):
        if gradient is not None:
            squares[layer] += float(gradient.pow(2).sum())
    return squares.sqrt()


class Figure6(Experiment):
    """`figure-6`."""

    name = "figure-6"
    title = "gradient norms that stream losses send into each MLP block, at the start and trained"
    source = source(ACL, "figure", 6)

    def parts(self, request: Request) -> Sequence[Part]:
        """Streams at the start and trained; shared mode."""
        text = training_text(request)
        shared = of_method("ss-shared", request) or "gradients of shared training, which this experiment does not take"
        return [
            Part("lossless streams at the start", text),
            Part("lossless streams, trained", text or of_method("ss", request)),
            Part("shared mode", shared),
        ]

    def run(self, bench: Bench) -> Result:
        """Gradients of the same batches for fresh and for trained streams."""
        parts = self.parts(bench.request)
        if parts[1].missing:
            raise nothing_runs(self.name, parts)
        target = bench.target()
        text = lab_text(target, "train", 200, bench.request.seed)
        batches = [text.batch(i, BUDGET, target.device) for i in range(BATCHES)]
        trained = SpeculativeStreaming.load(target, SSOptions()).streams
        torch.manual_seed(bench.request.seed)
        fresh = StreamsTrainee(target, trained.config)
        TogetherTrainer(target, [fresh], text, BUDGET, bench.folder / "start")  # brings P_j to the scale of the states
        series: dict[str, list[float]] = {}
        for name, streams in (("at the start", fresh.module), ("trained", trained)):
            series[f"streams, {name}"], series["next token"] = gradient_norms(target, streams, batches)
        columns = (Column("layer", "count"), *(Column(name, "number", 4) for name in series))
        rows: list[tuple[Value, ...]] = [(i, *values) for i, values in enumerate(zip(*series.values(), strict=True))]
        grid = Grid("gradients", columns, tuple(rows), f"{self.source}: norm of the gradient on a layer's MLP weights")
        drawn = {name: [(float(i), v) for i, v in enumerate(values)] for name, values in series.items()}
        label = "Line chart: gradient norm by layer, of stream losses at the start and trained, and of the next token."
        plot = Plot("figure", self.title, label, lines(drawn), axes("layer", "gradient norm", type="log"), grid)
        about = (
            f"ours: {bench.request.model}; mean over {BATCHES} batches of {BUDGET.rows_per_step} rows, training text"
        )
        return Result((grid,), (plot,), notes=(about, *NOTES))
