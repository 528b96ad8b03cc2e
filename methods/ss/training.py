"""Training lossless streams and the pruning map on a frozen base (ACL eq. 6 with alpha_0 = 0, alpha_j = 1).

Segment attention (appendix I): prompt positions carry no streams; anchors are taken in segments, the streams of a
segment see the main keys before them and their own position's streams, and only one segment is alive at a time: each is
computed again in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from specbench_ss.engine.kv_cache import StreamCache
from specbench_ss.engine.target import Target
from specbench_ss.methods.ss.layout import Layout, own_streams, steps_ahead, stream_positions
from specbench_ss.methods.ss.stream_config import StreamConfig
from specbench_ss.methods.ss.streams import Streams, run_masked
from specbench_ss.training.batches import Batch, Documents, additive
from specbench_ss.training.losses import head_loss, head_sums, mean_loss
from specbench_ss.training.targets import Targets, told_targets
from specbench_ss.training.trainee import BaseStates, Trainee


class StreamsTrainee(Trainee):
    """P_j, the stream adapters and, on their own next-token loss, the pruning map o_theta.

    segment: anchors a row whose streams are alive at once; 0 = all of them (the naive form). targets: what streams
    learn; published is the text.
    """

    def __init__(
        self,
        target: Target,
        config: StreamConfig,
        lr: float = 5e-4,
        embedding_lr: float = 5e-2,
        segment: int = 0,
        prune_weight: float = 0.5,
        name: str = "ss",
        targets: Targets = "tokens",
    ) -> None:
        self.name, self.target, self.config = name, target, config
        target.check_taken_apart("ss")
        self.lo = config.check_layers(target.n_layers)
        self.prune_layer = self.lo if config.prune_layer < 0 else config.prune_layer
        self.taps = tuple(sorted({self.lo, self.prune_layer}))
        self.kv_from = self.lo
        self.lr, self.embedding_lr, self.segment, self.prune_weight = lr, embedding_lr, segment, prune_weight
        self.targets = targets
        self.module: Streams = Streams(config, target.hidden_size)

    def about(self) -> dict[str, Any]:
        """The streams and the weight of the pruning map's loss. Segments only change the rounding."""
        return {**self.config.as_dict(), "prune_weight": self.prune_weight, **told_targets(self.targets, "tokens")}

    def parameter_groups(self) -> list[dict[str, Any]]:
        """P_j is added to the residual stream, whose scale is its natural unit; so is its learning rate's."""
        return stream_groups(self.module, self.lr, self.embedding_lr)

    def prepare(self, states: BaseStates, batch: Batch) -> None:
        """P_j starts at the scale of the residual stream."""
        start_embedding(self.module, states.taps[self.lo])

    def loss(self, states: BaseStates, batch: Batch) -> tuple[Tensor, Tensor]:
        """Stream losses over all segments, plus the pruning map's next-token loss."""
        g, anchors = self.config.gamma, batch.anchors
        labels = anchors.labels[..., 1 : g + 1]
        step = self.segment or labels.shape[1]
        pieces = [slice(i, i + step) for i in range(0, labels.shape[1], step)]
        known = self.module.heard(anchors.labels[..., :g], anchors.at)
        parts = [self._segment(states, anchors.at[:, piece], labels[:, piece], known[:, piece]) for piece in pieces]
        sums = torch.stack([a for a, _ in parts]).sum(0), torch.stack([b for _, b in parts]).sum(0)
        total, right = mean_loss(sums, batch.whole.anchors.labels[..., 1 : g + 1], [1.0] * g)
        low = states.at(states.taps[self.prune_layer], anchors)
        loss: Tensor = total + self.prune_weight * prune_loss(self.target, self.module, low, batch)
        return loss, right

    def _segment(self, states: BaseStates, at: Tensor, labels: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of a segment's loss and right guesses; its streams and logits are not kept for the backward pass."""

        def run(at: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            return head_sums(self.stream_logits(states, at, known), labels, self._teacher(states, at))

        if not self.segment:
            return run(at, labels)
        sums: tuple[Tensor, Tensor] = checkpoint(run, at, labels, use_reentrant=False)
        return sums

    def _teacher(self, states: BaseStates, at: Tensor) -> Tensor | None:
        """The base's logits [B, a, gamma, V] for the streams' tokens, where its distribution is learnt."""
        if self.targets == "tokens":
            return None
        with torch.no_grad():
            return self.target.logits(states.ahead(at, self.config.gamma))

    def stream_logits(self, states: BaseStates, at: Tensor, known: Tensor | None = None) -> Tensor:
        """Streams at positions `at` [B, a] of one segment -> logits [B, a, gamma, V].

        known int64 [B, a, gamma]: the tokens after each position, for streams that learn them.
        """
        target, g = self.target, self.config.gamma
        low = states.taps[self.lo]
        x = self.module.insert(low.gather(1, at[..., None].expand(-1, -1, low.shape[-1])), g).to(
            low.dtype
        )  # [B, a*gamma, h]
        places = at if states.documents is None else states.documents.places.gather(1, at)
        positions = stream_positions(target, places, g, self.config.stream_position)
        masks = self._masks(at, low.shape[1], next(iter(states.kv.values()))[0].dtype, states.documents)
        cache, rotary = StreamCache(states.kv), target.rotary(positions)
        x = run_masked(target, self.module, x, Layout(0, g), cache, masks, rotary)
        x = self.module.told(target, target.family.norm(x).unflatten(1, (at.shape[1], g)), known)
        logits: Tensor = target.logits(x)
        return logits

    def _masks(self, at: Tensor, t: int, dtype: torch.dtype, documents: Documents | None) -> list[Tensor]:
        """The mask of every MSA layer; made once for each width of a sliding window."""
        windows = [block.window for block in self.target.family.blocks[self.lo :]]
        masks = {window: self._mask(at, t, dtype, window, documents) for window in dict.fromkeys(windows)}
        return [masks[window] for window in windows]

    def _mask(self, at: Tensor, t: int, dtype: torch.dtype, window: int | None, documents: Documents | None) -> Tensor:
        """Additive [B, 1, a*gamma, T + a*gamma]: main keys up to the anchor, own streams up to oneself.

        Main keys of the anchor's own text only; with a sliding window only what is less than `window` places before the
        stream's own.
        """
        g, a = self.config.gamma, at.shape[1]
        keys = torch.arange(t, device=at.device)
        main = keys <= at[..., None]
        if documents is not None:
            main = main & documents.same(at, t)
        main = main.repeat_interleave(g, 1)  # [B, a*gamma, T]
        own = own_streams(a, g, at.device).expand(at.shape[0], -1, -1)
        if window is not None:
            ahead = steps_ahead(g, self.config.stream_position, at.device)
            places = (at[..., None] + ahead).flatten(1)  # [B, a*gamma]
            main = main & (places[..., None] - keys < window)
            own = own & (places[..., None] - places[:, None] < window)
        return additive(torch.cat((main, own), 2), dtype)


def stream_groups(module: Streams, lr: float, embedding_lr: float) -> list[dict[str, Any]]:
    """Optimizer groups: P_j apart from the others."""
    groups = [{"params": [p for n, p in module.named_parameters() if n != "embedding"], "lr": lr}]
    if module.config.stream_init == "embedding":
        groups.append({"params": [module.embedding], "lr": embedding_lr})
    return groups


@torch.no_grad()
def start_embedding(module: Streams, low: Tensor) -> None:
    """P_j starts random at half the scale of the residual stream low [B, T, h], or streams would look alike for long.

    The scale is that of the middle position: the first one is a hundred times larger in many models, since attention
    rests on it where it has nothing to look at.
    """
    if module.config.stream_init == "embedding":
        scale = 0.5 * low.float().pow(2).mean(-1).sqrt().median()
        p = module.embedding
        p.copy_(p / p.pow(2).mean(-1, keepdim=True).sqrt() * scale)


def prune_loss(target: Target, module: Streams, low: Tensor, batch: Batch) -> Tensor:
    """Next-token loss of the early exit (sec. 2.3), from the anchors' states low [B, A, h] at the pruning layer."""
    logits = target.logits(target.family.norm(module.early_exit(low.detach())))[..., None, :]
    return head_loss(logits, batch.anchors.labels[..., :1], [1.0], batch.whole.anchors.labels[..., :1])[0]
