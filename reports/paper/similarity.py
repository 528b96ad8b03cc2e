"""Figure 5: how close stream states and Medusa's head states come to the true states of the tokens they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specbench_ss import registry
from specbench_ss.engine.target import Target
from specbench_ss.methods.medusa.decoding import Medusa
from specbench_ss.methods.ss.decoding import SpeculativeStreaming
from specbench_ss.methods.ss.streams import Streams
from specbench_ss.methods.ss.training import StreamsTrainee
from specbench_ss.options import REFERENCE, MethodSpec
from specbench_ss.reports.paper.claims import all_of, number_or_none, rising
from specbench_ss.reports.paper.figures import ACL, axes, lines, machine, source
from specbench_ss.reports.paper.missing_parts import config_for, nothing_runs, of_method
from specbench_ss.reports.paper.prompts import first_turn, questions
from specbench_ss.results.report import Bench, Claim, Column, Experiment, Grid, Part, Plot, Request, Result, Value
from specbench_ss.runs.config import RunConfig
from specbench_ss.training.trainee import BaseStates, base_states

CATEGORIES = ("sql", "dialogue_summary", "meaning_representation")
LIMIT = 8
NOTES = (
    "layer: what enters it; the last one is the state after the final norm. Medusa's heads have states only there",
    "current: the main state before the draft, held against the state so many tokens ahead",
    "published: the paper draws its values and prints none",
)
Sums = dict[tuple[str, int, int], list[float]]  # (whose, stream, layer) -> cosines, each a mean over an answer


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
    trainee = StreamsTrainee(target, streams.config)
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


class Figure5(Experiment):
    """The experiment `figure-5`."""

    name = "figure-5"
    title = "cosine similarity of stream and Medusa states with the true states, by layer"
    source = source(ACL, "figure", 5)

    def parts(self, request: Request) -> Sequence[Part]:
        """Return a row for the streams and one for the heads."""
        return [Part(f"{m} on {request.model}", of_method(m, request)) for m in ("ss", "medusa")]

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

    def run(self, bench: Bench) -> Result:
        """Answer, run the answers through the model once more, and compare states."""
        parts = self.parts(bench.request)
        if parts[0].missing:
            raise nothing_runs(self.name, parts)
        config = self.configs(bench.request)["answers"]
        run = bench.measure(config, "answers")
        target = bench.target()
        streams = _loaded(SpeculativeStreaming, bench.request, target).streams
        medusa = None if parts[1].missing else _loaded(Medusa, bench.request, target)
        answers = {r.question_id: r.token_ids or [] for r in run.rows if r.ok and r.turn == 0}
        asked = [q for c in CATEGORIES for q in questions(bench.request, "apps", c, config.limit or 0)]
        sums: Sums = {}
        with torch.inference_mode():
            for question in asked:
                if question.id in answers:
                    _add(sums, target, streams, medusa, first_turn(target, question), answers[question.id])
        grid = _grid(sums, self.source)
        label = "Line chart: mean cosine similarity with the true state, by layer, for each stream and Medusa head."
        plot = Plot("figure", self.title, label, lines(_series(sums)), axes("layer", "cosine similarity"), grid)
        about = f"ours: {machine(run)}; {len(answers)} of the model's own answers"
        return Result((grid,), (plot,), notes=(about, *NOTES))


def _loaded(kind: type[Any], request: Request, target: Target) -> Any:
    """Return the method with the settings of the request."""
    spec: MethodSpec = config_for(_only(request, kind.name), [kind.name]).methods[1]
    return registry.load_method(spec, target)


def _only(request: Request, method: str) -> Request:
    """Return the request with the settings of one method."""
    from dataclasses import replace

    return replace(request, settings=tuple(s for s in request.settings if s.startswith(f"{method}.")))


def _add(
    sums: Sums, target: Target, streams: Streams, medusa: Medusa | None, prompt: list[int], answer: list[int]
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
                sums.setdefault((whose, j, n - back), []).append(value)


def _grid(sums: Sums, where: str) -> Grid:
    layers = sorted({layer for _, _, layer in sums})
    columns = (Column("state", "text"), Column("tokens ahead", "count"), *(Column(f"layer {n}") for n in layers))
    rows: list[tuple[Value, ...]] = []
    for whose, j in sorted({(whose, j) for whose, j, _ in sums}):
        found = [sums.get((whose, j, layer), []) for layer in layers]
        rows.append((whose, j, *(sum(v) / len(v) if v else None for v in found)))
    return Grid("similarity", columns, tuple(rows), f"{where}: cosine, mean over answers")


def _series(sums: Sums) -> dict[str, list[tuple[float, float | None]]]:
    series: dict[str, list[tuple[float, float | None]]] = {}
    for (whose, j, layer), values in sorted(sums.items()):
        series.setdefault(f"{whose}, {j} ahead", []).append((layer, sum(values) / len(values)))
    return series
