"""Figure 4: how much better the next token is known to a model trained to see the gamma true tokens after it (eq. 7).

The row that predicts x_{i+1} must learn nothing of x_{i+1} itself, neither from a later token's state nor from an
earlier row's that has seen it. So each predicted position has rows of its own: row 0 holds x_i again, peek j the true
x_{i+1+j} at its position. Peeks see the frozen base's keys up to i and the peeks up to themselves; row 0 sees the
base's keys before i, itself and its peeks. That is the layout of streams under eq. 3, with the truth in the streams'
place, in every layer; LoRA teaches these rows, and what they look back at stays the base's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specbench_ss.engine.kv_cache import StreamCache
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.lora import lora_parameters, with_lora
from specbench_ss.reports.paper.claims import number_or_none, rising
from specbench_ss.reports.paper.figures import ACL, axes, lines, source
from specbench_ss.reports.paper.lab_text import lab_text
from specbench_ss.reports.paper.missing_parts import nothing_runs, training_text
from specbench_ss.results.report import Bench, Claim, Column, Experiment, Grid, Part, Plot, Request, Result, Value
from specbench_ss.training.batches import Anchors, Batch, additive, future_labels
from specbench_ss.training.losses import head_loss
from specbench_ss.training.side_by_side import Budget, DrafterText, TogetherTrainer
from specbench_ss.training.trainee import BaseStates, Trainee, base_states

GAMMAS = (0, 1, 2, 4)
LORA_RANK, LORA_LR = 16, 2e-3
BUDGET = Budget(steps=240, rows_per_step=8, anchors_per_row=16, ahead=max(GAMMAS), warmup=20)
TRAIN_TALKS, HELD_OUT_TALKS = 3000, 60
NOTES = (
    "each token is predicted from the true text before it (teacher forcing); an answer is right if all its tokens are",
    "training uses the tokens of which the base is least sure, since it is sure of most; all tokens are scored",
    "the future tokens are known here, in training and in scoring; in decoding they are not",
    "the paper says that the attention mask was changed, but not how. A mask that only shows positions i+2.. to "
    "position i would show it x_{i+1} too, one layer up, in their states; here a prediction sees no state that "
    "knows its token. Where no future token is left to see, the end token is next, so a look ahead reveals it",
    "published: Phi-3's generation metrics; the paper draws its values and prints none",
)


class PeekingTrainee(Trainee):
    """LoRA in every layer, trained on the next token. gamma 0 has no look ahead and serves for comparison."""

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
        x = target.run(x, 0, target.n_layers, StreamCache(states.kv), mask, target.rotary(places))
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
    """Return which rows the 1 + gamma rows of each position see, bool [B, a(1+gamma), T + a(1+gamma)].

    The base's rows come first, then these. at: int64 [B, a]. known: bool [B, a, gamma], True for peeks that are there;
    one that is not is seen by itself alone.
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
    """Results on held-out text: nats per token, share of right tokens, share of answers with every token right."""

    loss: float
    right: float
    answers: float
    tokens: int


@torch.inference_mode()
def held_out(target: Target, trainees: Sequence[PeekingTrainee], text: DrafterText) -> list[Found]:
    """Score every answer token of every row, one row at a time. The base runs once a row."""
    losses: list[list[Tensor]] = [[] for _ in trainees]
    hits: list[list[Tensor]] = [[] for _ in trainees]
    whole: list[list[bool]] = [[] for _ in trainees]
    for row in text.rows:
        ids, answer = row.astype(np.int64)[None], text.answer_mask(row)[None]
        labels = torch.from_numpy(future_labels(ids, answer, text.end, max(t.gamma for t in trainees)))[0]
        at = (labels[:, 0] != -100).nonzero()[:, 0]
        if not len(at):
            continue
        truth, breaks = labels[at, 0], _breaks(at, labels[at, 0], text.end)
        here, ahead = torch.from_numpy(ids).to(target.device), labels[None, at, 1:].to(target.device)
        states = base_states(target, here, (), 0)
        for i, trainee in enumerate(trainees):
            found = trainee.logits(states, here, at[None].to(here.device), ahead[..., : trainee.gamma])[0].float().cpu()
            losses[i].append(F.cross_entropy(found, truth, reduction="none"))
            hits[i].append(found.argmax(-1) == truth)
            whole[i] += [bool(part.all()) for part in hits[i][-1].tensor_split(breaks)]
    return [_found(torch.cat(a), torch.cat(b), c) for a, b, c in zip(losses, hits, whole, strict=True)]


def _found(losses: Tensor, hits: Tensor, whole: list[bool]) -> Found:
    return Found(float(losses.mean()), float(hits.float().mean()), sum(whole) / len(whole), len(hits))


def _breaks(at: Tensor, truth: Tensor, end: int) -> list[int]:
    """Return where in the answer positions at [n], with next tokens truth [n], the second and later answers begin."""
    new = (at[1:] != at[:-1] + 1) | (truth[:-1] == end)
    return [int(i) + 1 for i in new.nonzero()[:, 0]]


class Figure4(Experiment):
    """The experiment `figure-4`."""

    name = "figure-4"
    title = "the next token, known to a model that sees the gamma true tokens after it"
    source = source(ACL, "figure", 4)
    uses = ("model", "device", "dtype", "seed")

    def parts(self, request: Request) -> Sequence[Part]:
        """Return a row for each gamma, each of which trains a model."""
        return [Part(f"gamma = {g}", training_text(request)) for g in GAMMAS]

    def claims(self, result: Result) -> Sequence[Claim]:
        """Caption: seeing true future tokens improves generation substantially."""
        seen = [row for row in result.grids[0].rows if row[0] != "base"]
        shares = [(f"gamma = {row[1]}", number_or_none(row[2])) for row in (seen[0], seen[-1])]
        return [rising("Seeing true future tokens improves generation (here: right tokens)", shares, "{:.1%}")]

    def run(self, bench: Bench) -> Result:
        """Train all side by side on the same batches, then score held-out text."""
        parts = self.parts(bench.request)
        if any(part.missing for part in parts):
            raise nothing_runs(self.name, parts)
        target, seed = bench.target(), bench.request.seed
        text, other = (
            lab_text(target, split, n, seed) for split, n in (("train", TRAIN_TALKS), ("eval", HELD_OUT_TALKS))
        )
        torch.manual_seed(seed)
        trainees = [PeekingTrainee(target, gamma) for gamma in GAMMAS]
        (base,) = held_out(target, [PeekingTrainee(target, 0)], other)  # LoRA starts as nothing
        TogetherTrainer(target, trainees, text, BUDGET, bench.folder / "peeking").train(bench.log, save_every=20)
        found = zip(GAMMAS, held_out(target, trainees, other), strict=True)
        return self._show(base, list(found), bench.request)

    def _show(self, base: Found, found: Sequence[tuple[int, Found]], request: Request) -> Result:
        columns = (
            Column("model", "text"),
            Column("gamma", "count"),
            Column("right tokens", "percent", 1),
            Column("right answers", "percent", 1),
            Column("nats per token", "number", 4),
            Column("tokens", "count"),
        )
        trained = [(f"{BUDGET.steps} steps", g, f) for g, f in found]
        rows: list[tuple[Value, ...]] = [
            (name, gamma, f.right, f.answers, f.loss, f.tokens) for name, gamma, f in [("base", 0, base), *trained]
        ]
        grid = Grid("peeking", columns, tuple(rows), f"{self.source}: {self.title}")
        drawn = {
            "right tokens": [(float(g), f.right) for g, f in found],
            "right answers": [(float(g), f.answers) for g, f in found],
        }
        label = "Line chart: share of right tokens and of right answers, by the number of future tokens seen."
        layout = axes("true future tokens seen, gamma", "share right", tickformat=".0%")
        plot = Plot("figure", self.title, label, lines(drawn), layout, grid)
        about = f"ours: {request.model}; LoRA of rank {LORA_RANK} in every layer, {BUDGET.steps} steps, held-out text"
        return Result((grid,), (plot,), notes=(about, *NOTES))
