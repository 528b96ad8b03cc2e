"""Figures of states inside the layers: similarity with the true states (5), gradients of the stream losses (6)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specbench_ss import registry
from specbench_ss.engine.kv_cache import StreamCache
from specbench_ss.engine.target import Target
from specbench_ss.methods.medusa.decode import Medusa
from specbench_ss.methods.ss.config import SSOptions, StreamConfig
from specbench_ss.methods.ss.decode import SpeculativeStreaming
from specbench_ss.methods.ss.layers import Streams
from specbench_ss.methods.ss.train import SharedTrainer, StreamsTrainer
from specbench_ss.options import REFERENCE
from specbench_ss.reports.paper.claims import all_of, number_or_none, rising
from specbench_ss.reports.paper.experiment import (
    ACL,
    PaperExperiment,
    TrainingExperiment,
    config_for,
    first_turn,
    machine,
    missing_for,
    questions,
    records,
    source,
    table,
)
from specbench_ss.reports.paper.figures import Axis, Points, Text, lines
from specbench_ss.reports.paper.lab_text import lab_text
from specbench_ss.reports.paper.training import train_variants
from specbench_ss.results.report import Bench, Claim, Grid, Part, Request, Result
from specbench_ss.runs.config import RunConfig
from specbench_ss.training.batch import BaseStates, Batch, base_states
from specbench_ss.training.loop import Budget, DrafterText

# -- figure 5: similarity with the true states --------------------------------------------------------------------

CATEGORIES = ("sql", "dialogue_summary", "meaning_representation")
LIMIT = 8
SIMILARITY_NOTES = (
    "layer: what enters it; the last one is the state after the final norm. Medusa's heads have states only there",
    "current: the main state before the draft, held against the state so many tokens ahead",
    "published: the paper draws its values and prints none",
)
Cosines = dict[tuple[str, int, int], list[float]]  # (whose, stream, layer) -> cosines, each a mean over an answer


class WatchedStreams(Streams):
    """Streams that keep their states: seen[0] as inserted, then one after each MSA layer, [B, a*gamma, h]."""

    def __init__(self, streams: Streams) -> None:
        super().__init__(streams.config, streams.embedding.shape[1])
        self.to(streams.embedding.device, streams.embedding.dtype).load_state_dict(streams.state_dict())
        self.seen: list[Tensor] = []

    def insert(self, *args: Any, **kwargs: Any) -> Tensor:
        """Insert streams as usual and keep their states."""
        self.seen = [super().insert(*args, **kwargs)]
        return self.seen[0]

    def pass_layer(self, *args: Any, **kwargs: Any) -> Tensor:
        """Pass a layer as usual and keep the states."""
        self.seen.append(super().pass_layer(*args, **kwargs))
        return self.seen[-1]


def stream_similarity(target: Target, streams: Streams, states: BaseStates, at: Tensor) -> Tensor:
    """Return the cosine of stream j's state at position i with the main state at i + j, [layers, gamma].

    It is a mean over `at` [a]. Layers lo..N-1 are the inputs of those layers; the last one is the state after the final
    norm, as the LM head reads it.
    """
    trainee = StreamsTrainer(target, streams.config)
    watched = trainee.module = WatchedStreams(streams)
    trainee.stream_logits(states, at[None])
    g, lo = streams.config.gamma, trainee.lo
    ahead = at[:, None] + torch.arange(1, g + 1, device=at.device)  # [a, gamma]
    seen = [*watched.seen[:-1], target.family.norm(watched.seen[-1])]
    true = [*(states.taps[layer] for layer in range(lo, target.n_layers)), states.final]
    pairs = zip(seen, true, strict=True)
    return torch.stack([F.cosine_similarity(s[0].unflatten(0, (-1, g)), t[0][ahead], -1).mean(0) for s, t in pairs])


def ahead_similarity(states: Sequence[Tensor], at: Tensor, gamma: int) -> Tensor:
    """Return the cosine of the main state at i with that at i + j, [layers, gamma]: what doing nothing would give."""
    ahead = at[:, None] + torch.arange(1, gamma + 1, device=at.device)
    return torch.stack([F.cosine_similarity(t[0][at][:, None], t[0][ahead], -1).mean(0) for t in states])


def medusa_similarity(medusa: Medusa, states: BaseStates, at: Tensor) -> Tensor:
    """Return the cosine of head j's state with the final state at i + j, [heads]."""
    made = medusa.heads.states(states.final[0][at])  # [heads, a, h]
    ahead = at + torch.arange(1, len(made) + 1, device=at.device)[:, None]  # [heads, a]
    return F.cosine_similarity(made, states.final[0][ahead], -1).mean(1)


class Figure5(PaperExperiment):
    """Figure 5: similarity of stream states and of Medusa's with the true states of the tokens that they predict."""

    name, source = "figure-5", source(ACL, "figure", 5)
    title = "cosine similarity of stream and Medusa states with the true states, by layer"

    def parts(self, request: Request) -> Sequence[Part]:
        """Return a row for the streams and one for the heads."""
        return [Part(f"{m} on {request.model}", missing_for(m, request)) for m in ("ss", "medusa")]

    def able(self, request: Request) -> bool:
        """Return whether the streams can run; the heads may be missing."""
        return not missing_for("ss", request)

    def configs(self, request: Request) -> dict[str, RunConfig]:
        """Return the run that makes the model's own answers, on which the states are compared."""
        plain = _only(request, REFERENCE)
        return {"answers": config_for(plain, [REFERENCE], suite="apps", categories=CATEGORIES, limit=LIMIT)}

    def claims(self, result: Result) -> Sequence[Claim]:
        """Caption: states align with those of the true tokens from layer to layer, in contrast to Medusa's."""
        rows = {
            (row[0], row[1]): [number_or_none(v) for v in row[2:] if v is not None] or [None]
            for row in result.grids[0].rows
        }
        streams = {j: values for (whose, j), values in rows.items() if whose == "stream"}
        heads = {j: values[-1] for (whose, j), values in rows.items() if whose == "Medusa head"}
        closer = [
            rising("", [(f"{j} ahead, inserted", values[0]), ("final", values[-1])]) for j, values in streams.items()
        ]
        ahead = [
            rising("", [(f"{j} ahead, Medusa", heads[j]), ("stream", streams[j][-1])]) for j in heads if j in streams
        ]
        return [
            all_of("Streams come closer to the true states on their way", closer),
            all_of("Their final states are closer than Medusa's", ahead),
        ]

    def make(self, bench: Bench) -> Result:
        """Answer, run the answers through the model once more, and compare states."""
        config, request = self.configs(bench.request)["answers"], bench.request
        run = bench.measure(config, "answers")
        target = bench.target()
        streams = _loaded(SpeculativeStreaming, request, target).streams
        medusa = None if missing_for("medusa", request) else _loaded(Medusa, request, target)
        answers = {r.question_id: r.token_ids or [] for r in run.rows if r.ok and r.turn == 0}
        cosines: Cosines = {}
        with torch.inference_mode():
            for question in (q for c in CATEGORIES for q in questions(request, "apps", c, config.limit or 0)):
                if question.id in answers:
                    _add(cosines, target, streams, medusa, first_turn(target, question), answers[question.id])
        means = {key: sum(values) / len(values) for key, values in sorted(cosines.items())}
        series: dict[str, list[tuple[float, float | None]]] = {}
        for (whose, j, layer), value in means.items():
            series.setdefault(f"{whose}, {j} ahead", []).append((layer, value))
        label = "Line chart: mean cosine similarity with the true state, by layer, for each stream and Medusa head."
        text, grid = Text("figure", self.title, label), _similarity_grid(means, self.source)
        plot = lines(text, series, grid, Axis("layer"), Axis("cosine similarity"))
        about = f"ours: {machine(run)}; {len(answers)} of the model's own answers"
        return Result((grid,), (plot,), notes=(about, *SIMILARITY_NOTES))


def _loaded(kind: type[Any], request: Request, target: Target) -> Any:
    """Return the method with the settings of the request."""
    spec = config_for(_only(request, kind.name), [kind.name]).methods[1]
    return registry.load_method(spec, target)


def _only(request: Request, method: str) -> Request:
    """Return the request with the settings of one method."""
    return replace(request, settings=tuple(s for s in request.settings if s.startswith(f"{method}.")))


def _add(
    cosines: Cosines, target: Target, streams: Streams, medusa: Medusa | None, prompt: list[int], answer: list[int]
) -> None:
    """Add the cosines of one answer, at every position that gamma more tokens of the answer follow."""
    g, n = streams.config.gamma, target.n_layers
    lo = n - streams.config.n_msa_layers
    first, last = len(prompt) - 1, len(prompt) + len(answer) - 1 - g
    if last <= first:
        return
    ids = torch.tensor([[*prompt, *answer]], device=target.device)
    states = base_states(target, ids, range(lo, n), lo)
    at = torch.arange(first, last, device=target.device)
    mains = [*(states.taps[layer] for layer in range(lo, n)), states.final]
    found = {"stream": stream_similarity(target, streams, states, at), "current": ahead_similarity(mains, at, g)}
    if medusa is not None:
        found["Medusa head"] = medusa_similarity(medusa, states, at)[None]
    for whose, values in found.items():
        for back, row in enumerate(reversed(values.tolist())):
            for j, value in enumerate(row, start=1):
                cosines.setdefault((whose, j, n - back), []).append(value)


def _similarity_grid(means: dict[tuple[str, int, int], float], where: str) -> Grid:
    layers = sorted({layer for _, _, layer in means})
    pairs = sorted({(whose, j) for whose, j, _ in means})
    rows = [(whose, j, *(means.get((whose, j, layer)) for layer in layers)) for whose, j in pairs]
    forms = {"state": "text", "tokens ahead": "count", **{f"layer {n}": "number" for n in layers}}
    return table("similarity", forms, rows, f"{where}: cosine, mean over answers")


# -- figure 6: gradients ------------------------------------------------------------------------------------------

BATCHES = 8
STEPS = 60  # of the shared training
GRADIENT_BUDGET = Budget(steps=STEPS, rows_per_step=4, anchors_per_row=32, warmup=10)
SHARED = StreamConfig(mode="shared", adapter_rank=0, lora_rank=32)  # streams in the layers' own MLPs, 2024's attention
_MLP = re.compile(r"\.(?:layers|h)\.(\d+)\.(?:.*\.)?(?:mlp|fc1|fc2)\b(?!.*lora_)")
EARLY = 0.1  # of the largest gradient: an early layer's is called strong from here on
GRADIENT_NOTES = (
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


def lossless_loss(target: Target, trainee: StreamsTrainer) -> Loss:
    """Return the loss of the streams' terms of eq. 6, with alpha_j = 1."""
    trainee.prune_weight = 0.0
    return lambda batch: trainee.loss(states_with_gradient(target, batch.ids, trainee.lo), batch)[0]


def shared_loss(trainee: SharedTrainer) -> Loss:
    """Return the same loss for shared mode: eq. 6 with alpha_j = 1 minus eq. 6 with alpha_j = 0.

    Raises ValueError where main rows see their streams (eq. 3): there the two differ in more than the streams' terms.
    """
    if trainee.shape.main_attends_streams:
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


class Figure6(TrainingExperiment):
    """Figure 6: gradient that the stream losses send into the base's MLP blocks, layer by layer."""

    name, source = "figure-6", source(ACL, "figure", 6)
    title = "gradient norms that stream losses send into each MLP block, at the start and trained"
    uses = ("model", "device", "dtype", "seed")
    rows = ("shared mode, at the start and trained", "lossless streams, at the start", "lossless streams, trained")

    def parts(self, request: Request) -> Sequence[Part]:
        """Return a row for each mode, at the start and trained."""
        *others, trained = super().parts(request)
        return [*others, replace(trained, missing=trained.missing or missing_for("ss", request))]

    def make(self, bench: Bench) -> Result:
        """Compute gradients of the same batches for fresh and for trained streams."""
        target = bench.target()
        text = lab_text(target, "train", 200, bench.request.seed)
        batches = [text.batch(i, GRADIENT_BUDGET, target.device) for i in range(BATCHES)]
        series = {
            name: gradient_norms(model, target.n_layers, loss, batches)
            for name, model, loss in _states_of_training(bench, target, text)
        }
        forms = {"layer": "count", **dict.fromkeys(series, "number 4")}
        rows = [(i, *values) for i, values in enumerate(zip(*series.values(), strict=True))]
        grid = table("gradients", forms, rows, f"{self.source}: norm of the stream losses' gradient")
        drawn: dict[str, Points] = {
            name: [(float(i), v or None) for i, v in enumerate(values)] for name, values in series.items()
        }
        label = f"Line chart: gradient norm by layer: {', '.join(series)}."
        plot = lines(Text("figure", self.title, label), drawn, grid, Axis("layer"), Axis("gradient norm", log=True))
        rows_a_step = GRADIENT_BUDGET.rows_per_step
        about = f"ours: {bench.request.model}; mean over {BATCHES} batches of {rows_a_step} rows, training text"
        return Result((grid,), (plot,), notes=(about, *GRADIENT_NOTES))

    def claims(self, result: Result) -> Sequence[Claim]:
        """Caption: at the start, strong gradients reach early and mid-level layers too."""
        norms = [float(row["shared, at the start"] or 0.0) for row in records(result.grids[0])]
        early, most = min(norms[: max(1, len(norms) // 2)]), max(norms)
        found = (
            f"least of the first half of the layers {early:.3g}, largest of all {most:.3g}; {EARLY:.0%} of the largest "
            "is called strong here"
        )
        says = "At the start of shared training, early layers get strong gradients too"
        return [Claim(says, early >= EARLY * most, found, sure=False)]


def _states_of_training(bench: Bench, target: Target, text: DrafterText) -> Iterator[tuple[str, nn.Module, Loss]]:
    """Yield the series: name, model whose MLPs get the gradient, and loss."""
    trained = SpeculativeStreaming.load(target, SSOptions()).streams
    for name, folder, steps in (
        ("shared, at the start", "shared-start", False),
        (f"shared, {STEPS} steps", "shared-trained", True),
    ):
        torch.manual_seed(bench.request.seed)
        shared = SharedTrainer(target, SHARED, lr=2e-3, stream_lr=2e-3)
        train_variants(bench, target, [shared], text, GRADIENT_BUDGET, folder, steps)
        yield name, shared.tuned.model, shared_loss(shared)
    lossless = StreamsTrainer(target, trained.config)
    train_variants(bench, target, [lossless], text, GRADIENT_BUDGET, "lossless-start", steps=False)
    yield "lossless, at the start", target.model, lossless_loss(target, lossless)
    lossless = StreamsTrainer(target, trained.config)
    lossless.module = trained
    yield "lossless, trained", target.model, lossless_loss(target, lossless)
