"""Figures of states inside the layers: similarity with the true states (5), gradients of the stream losses (6)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specbench_ss import registry
from specbench_ss.engine.target import Target
from specbench_ss.methods.medusa.decode import Medusa
from specbench_ss.methods.ss.config import SSOptions, StreamConfig
from specbench_ss.methods.ss.decode import SpeculativeStreaming
from specbench_ss.methods.ss.layers import Streams
from specbench_ss.methods.ss.train import SharedTrainer, StreamsTrainer
from specbench_ss.options import REFERENCE
from specbench_ss.reports import charts
from specbench_ss.reports.paper.claims import all_of, number_or_none, rising
from specbench_ss.reports.paper.experiment import (
    PaperExperiment,
    TrainingExperiment,
    config_for,
    machine,
    missing_for,
    questions,
    rows_of,
    spec_for,
    table,
)
from specbench_ss.reports.paper.figures import LOG, lines, plot
from specbench_ss.reports.paper.training import How, lab_text, train_variants
from specbench_ss.results.report import Bench, Claim, Request, Result
from specbench_ss.runs.config import RunConfig
from specbench_ss.training.batch import BaseStates, Batch, KeysFrom, base_states, run_rows
from specbench_ss.training.loop import Budget, PackedText

# -- figure 5: similarity with the true states --------------------------------------------------------------------

CATEGORIES = ("sql", "dialogue_summary", "meaning_representation")
LIMIT = 8
SIMILARITY_NOTES = (
    "layer: what enters it; the last one is the state after the final norm. Medusa's heads have states only there",
    "current: the main state before the draft, compared with the state so many tokens ahead",
    "published: the paper draws its values and prints none",
)


def stream_states(target: Target, streams: Streams, states: BaseStates, at: Tensor) -> list[Tensor]:
    """Return the states of the streams at positions `at` [a], [a, gamma, h] each.

    The first are as inserted, then those after each MSA layer; the last one is normed, as the LM head reads it.
    """
    seen: list[Tensor] = []

    def kept(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any, **kwargs: Any) -> Tensor:
            seen.append(method(*args, **kwargs))
            return seen[-1]

        return call

    watched = copy(streams)
    watched.insert, watched.pass_layer = kept(streams.insert), kept(streams.pass_layer)  # type: ignore[method-assign]
    trainee = StreamsTrainer(target, streams.config)
    trainee.module = watched
    trainee.stream_logits(states, at[None])
    return [x[0].unflatten(0, (-1, streams.config.gamma)) for x in (*seen[:-1], target.family.norm(seen[-1]))]


def similarity(made: Sequence[Tensor], true: Sequence[Tensor], at: Tensor) -> list[list[float]]:
    """Return the mean cosine, [layers][gamma], of states [a, gamma, h] for the token j ahead with the true ones.

    made: for each layer. true: [1, T, h] for each layer, of which the last ones count. at: int64 [a], positions.
    """
    found = []
    for own, states in zip(made, true[len(true) - len(made) :], strict=True):
        ahead = at[:, None] + torch.arange(1, own.shape[1] + 1, device=at.device)  # [a, gamma]
        found.append(F.cosine_similarity(own, states[0][ahead], -1).mean(0).tolist())
    return found


class Figure5(PaperExperiment):
    """Figure 5: similarity of stream states and of Medusa's with the true states of the tokens that they predict."""

    name, source = "figure-5", "EMNLP figure 5"
    title = "cosine similarity of stream and Medusa states with the true states, by layer"

    rows = {f"{method} on {{model}}": method for method in ("ss", "medusa")}

    def able(self, request: Request) -> bool:
        """Return True if the streams can run; the heads may be missing."""
        return not missing_for("ss", request)

    def configs(self, request: Request) -> dict[str, RunConfig]:
        """Return the run that makes the model's own answers, on which the states are compared."""
        plain = _only(request, REFERENCE)
        return {"answers": config_for(plain, [REFERENCE], suite="apps", categories=CATEGORIES, limit=LIMIT)}

    def claims(self, result: Result) -> Sequence[Claim]:
        """Test the caption: states align with those of the true tokens from layer to layer, in contrast to Medusa's."""
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
        config, request = self.configs(bench.request)["answers"], bench.request
        run = bench.measure(config, "answers")
        target = bench.target()
        streams = _loaded(SpeculativeStreaming, request, target).drafter
        medusa = None if missing_for("medusa", request) else _loaded(Medusa, request, target)
        answers = {r.question_id: r.token_ids or [] for r in run.run.rows if r.ok and r.turn == 0}
        found: list[tuple[str, int, int, float]] = []
        with torch.inference_mode():
            for question in (q for c in CATEGORIES for q in questions(request, "apps", c, config.limit or 0)):
                if question.id in answers:
                    prompt = target.encode_chat(question.messages())
                    found += _cosines(target, streams, medusa, prompt, answers[question.id])
        columns = ["state", "ahead", "layer", "cosine"]
        means = pd.DataFrame(found, columns=columns).groupby(columns[:-1])["cosine"].mean().unstack()
        series = {f"{whose}, {j} ahead": list(row.dropna().items()) for (whose, j), row in means.iterrows()}
        rows = rows_of(means.reset_index())
        layers = list(means.columns)
        forms = {"state": "text", "tokens ahead": "count", **{f"layer {n}": "number" for n in layers}}
        grid = table("similarity", forms, rows, f"{self.source}: cosine, mean over answers")
        figure = plot("figure", self.title, grid, charts.lines(series, "layer", "cosine similarity"))
        about = f"ours: {machine(run)}; {len(answers)} of the model's own answers"
        return Result((grid,), (figure,), notes=(about, *SIMILARITY_NOTES))


def _loaded(kind: type[Any], request: Request, target: Target) -> Any:
    """Return the method with the settings of the request."""
    return registry.load_method(spec_for(_only(request, kind.name), kind.name), target)


def _only(request: Request, method: str) -> Request:
    """Return the request with the settings of one method."""
    return replace(request, settings=tuple(s for s in request.settings if s.startswith(f"{method}.")))


def _cosines(
    target: Target, streams: Streams, medusa: Medusa | None, prompt: list[int], answer: list[int]
) -> Iterator[tuple[str, int, int, float]]:
    """Yield (whose, tokens ahead, layer, mean cosine) of an answer, where gamma more of its tokens follow."""
    g, n = streams.config.gamma, target.n_layers
    lo = n - streams.config.n_msa_layers
    first, last = len(prompt) - 1, len(prompt) + len(answer) - 1 - g
    if last <= first:
        return
    states = base_states(target, torch.tensor([[*prompt, *answer]], device=target.device), range(lo, n), lo)
    at = torch.arange(first, last, device=target.device)
    true = [*(states.hidden_states[layer] for layer in range(lo, n)), states.final]
    made = {"stream": stream_states(target, streams, states, at)}
    made["current"] = [layer[0][at][:, None].expand(-1, g, -1) for layer in true]  # what doing nothing would give
    if medusa is not None:
        made["Medusa head"] = [medusa.drafter.states(states.final[0][at]).transpose(0, 1)]
    for whose, own in made.items():
        for layer, cosines in enumerate(similarity(own, true, at), start=n + 1 - len(own)):
            yield from ((whose, j, layer, value) for j, value in enumerate(cosines, start=1))


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
    "lossless: the last layer gets no gradient, since streams bypass its MLP and no later key uses its output",
    f"shared: LoRA of rank {SHARED.lora_rank}, main rows see no streams (2024 eq. 1), so that the losses separate; "
    f"{STEPS} steps, where the paper looks at step 5000",
    "published: the paper draws its values and prints none",
)
Loss = Callable[[Batch], Tensor]


def states_with_gradient(target: Target, ids: Tensor, lo: int) -> BaseStates:
    """Run the base over ids [B, T] as `base_states` does, but as part of the graph; layer inputs from lo - 1 on."""
    cache = KeysFrom(target.n_layers, lo)
    x, aux_states = run_rows(target, ids, target.n_layers, cache, None, range(target.n_layers))
    return BaseStates(target.family.norm(x), aux_states, cache.kept)


def lossless_loss(target: Target, trainee: StreamsTrainer) -> Loss:
    """Return the loss of the streams' terms of eq. 6, with alpha_j = 1."""
    trainee.prune_weight = 0.0
    return lambda batch: trainee.loss(states_with_gradient(target, batch.ids, trainee.first_msa_layer), batch)[0]


def shared_loss(trainee: SharedTrainer) -> Loss:
    """Return the same loss for shared mode: eq. 6 with alpha_j = 1 minus eq. 6 with alpha_j = 0.

    Where main rows see their streams (eq. 3), the two would differ in more than the streams' terms.
    """
    trainee.prune_weight = 0.0

    def eq_6(batch: Batch, alpha: float) -> Tensor:
        trainee.alpha_j = alpha
        return trainee.loss(BaseStates(torch.empty(0), {}, {}), batch)[0]

    return lambda batch: eq_6(batch, 1.0) - eq_6(batch, 0.0)


def gradient_norms(model: nn.Module, layers: int, loss: Loss, batches: Sequence[Batch]) -> list[float]:
    """Return the norm of the gradient on each layer's MLP weights, its mean over batches."""
    mlps = [(int(m[1]), p.requires_grad_(True)) for name, p in model.named_parameters() if (m := _MLP.search(name))]
    total = torch.zeros(layers)
    for batch in batches:
        found = torch.autograd.grad(loss(batch), [p for _, p in mlps], allow_unused=True)
        squares = torch.zeros(layers)
        for (layer, _), gradient in zip(mlps, found, strict=True):
            if gradient is not None:  # None: the loss does not depend on it
                squares[layer] += float(gradient.pow(2).sum())
        total += squares.sqrt()
    for _, p in mlps:
        p.requires_grad_(False)
    return [float(norm) for norm in total / len(batches)]


class Figure6(TrainingExperiment):
    """Figure 6: gradient that the stream losses send into the base's MLP blocks, layer by layer."""

    name, source = "figure-6", "EMNLP figure 6"
    title = "gradient norms that stream losses send into each MLP block, at the start and trained"
    rows = {
        "shared mode, at the start and trained": "",
        "lossless streams, at the start": "",
        "lossless streams, trained": "ss",
    }

    def make(self, bench: Bench) -> Result:
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
        figure = lines("figure", self.title, grid, "layer", list(series), "gradient norm", **LOG)
        rows_a_step = GRADIENT_BUDGET.rows_per_step
        about = f"ours: {bench.request.model}; mean over {BATCHES} batches of {rows_a_step} rows, training text"
        return Result((grid,), (figure,), notes=(about, *GRADIENT_NOTES))

    def claims(self, result: Result) -> Sequence[Claim]:
        """Test the caption: at the start, strong gradients reach early and mid-level layers too."""
        norms = [float(row["shared, at the start"] or 0.0) for row in result.grids[0].records()]
        early, most = min(norms[: max(1, len(norms) // 2)]), max(norms)
        found = (
            f"least of the first half of the layers {early:.3g}, largest of all {most:.3g}; {EARLY:.0%} of the largest "
            "is called strong here"
        )
        statement = "At the start of shared training, early layers get strong gradients too"
        return [Claim(statement, early >= EARLY * most, found, sure=False)]


def _states_of_training(bench: Bench, target: Target, text: PackedText) -> Iterator[tuple[str, nn.Module, Loss]]:
    """Yield the series: name, model whose MLPs get the gradient, and loss."""
    trained = SpeculativeStreaming.load(target, SSOptions()).drafter
    stages: tuple[tuple[str, str, How], ...] = (
        ("shared, at the start", "shared-start", "prepare"),
        (f"shared, {STEPS} steps", "shared-trained", "train"),
    )
    for name, folder, how in stages:
        torch.manual_seed(bench.request.seed)
        shared = SharedTrainer(target, SHARED, lr=2e-3, stream_lr=2e-3)
        train_variants(bench, target, [shared], text, GRADIENT_BUDGET, folder, how)
        yield name, shared.tuned.model, shared_loss(shared)
    lossless = StreamsTrainer(target, trained.config)
    train_variants(bench, target, [lossless], text, GRADIENT_BUDGET, "lossless-start", "prepare")
    yield "lossless, at the start", target.model, lossless_loss(target, lossless)
    lossless.module = trained
    yield "lossless, trained", target.model, lossless_loss(target, lossless)
