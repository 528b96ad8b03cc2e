"""Training lossless streams and the pruning map on a frozen base (ACL eq. 6 with alpha_0 = 0, alpha_j = 1).

Segment attention (appendix I): prompt positions carry no streams; anchors are taken in segments, the streams of a
segment see the main keys before them and their own position's streams, and only one segment is in a product at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specbench_ss.cache import StreamCache
from specbench_ss.methods.ss.config import StreamConfig
from specbench_ss.methods.ss.streams import Layout, Streams, own_streams, run_masked
from specbench_ss.methods.training import Anchors, BaseStates, Trainee, head_loss
from specbench_ss.target import Target


class StreamsTrainee(Trainee):
    """P_j, the stream adapters and, on their own next-token loss, the pruning map o_theta."""

    def __init__(
        self,
        target: Target,
        config: StreamConfig,
        lr: float = 5e-4,
        embedding_lr: float = 5e-2,
        segment: int = 32,
        prune_weight: float = 0.5,
        name: str = "ss",
    ) -> None:
        self.name, self.target, self.config = name, target, config
        self.lo = target.n_layers - config.n_msa_layers
        self.prune_layer = self.lo if config.prune_layer < 0 else config.prune_layer
        self.taps = tuple(sorted({self.lo, self.prune_layer}))
        self.kv_from = self.lo
        self.embedding_lr = embedding_lr
        self.lr, self.segment, self.prune_weight = lr, segment, prune_weight
        self.module: Streams = Streams(config, target.hidden_size)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """P_j is added to the residual stream, whose scale is its natural unit; so is its learning rate's."""
        others = [p for n, p in self.module.named_parameters() if n != "embedding"]
        return [{"params": others, "lr": self.lr}, {"params": [self.module.embedding], "lr": self.embedding_lr}]

    @torch.no_grad()
    def prepare(self, states: BaseStates) -> None:
        """P_j starts random at half the scale of the residual stream, or streams would look alike for long."""
        scale = 0.5 * states.taps[self.lo].float().pow(2).mean().sqrt()
        p = self.module.embedding
        p.copy_(p / p.pow(2).mean(-1, keepdim=True).sqrt() * scale)

    def loss(self, states: BaseStates, anchors: Anchors) -> tuple[Tensor, Tensor]:
        """Stream losses over all segments, plus the pruning map's next-token loss."""
        parts = [
            self.stream_logits(states, anchors.at[:, i : i + self.segment])
            for i in range(0, anchors.at.shape[1], self.segment)
        ]
        logits = torch.cat(parts, 1)  # [B, A, gamma, V]
        g = self.config.gamma
        total, right = head_loss(logits, anchors.labels[..., 1 : g + 1], [1.0] * g)
        loss: Tensor = total + self.prune_weight * self._prune_loss(states, anchors)
        return loss, right

    def stream_logits(self, states: BaseStates, at: Tensor) -> Tensor:
        """Streams at positions `at` [B, a] of one segment -> logits [B, a, gamma, V]."""
        target, g = self.target, self.config.gamma
        b, a = at.shape
        low = states.taps[self.lo]
        x = self.module.insert(low.gather(1, at[..., None].expand(-1, -1, low.shape[-1])), g)  # [B, a*gamma, h]
        ahead = torch.arange(1, g + 1, device=at.device)
        positions = (at[..., None] + ahead).clamp_max(target.context_length - 1).flatten(1)  # [B, a*gamma]
        masks = self._masks(at, low.shape[1], next(iter(states.kv.values()))[0].dtype)
        x = run_masked(target, self.module, x, Layout(0, g), StreamCache(states.kv), masks, target.rotary(positions))
        logits: Tensor = target.logits(target.family.norm(x)).unflatten(1, (a, g))
        return logits

    def _masks(self, at: Tensor, t: int, dtype: torch.dtype) -> list[Tensor]:
        """The mask of every MSA layer; made once for each width of a sliding window."""
        windows = [block.window for block in self.target.family.blocks[self.lo :]]
        masks = {window: self._mask(at, t, dtype, window) for window in dict.fromkeys(windows)}
        return [masks[window] for window in windows]

    def _mask(self, at: Tensor, t: int, dtype: torch.dtype, window: int | None) -> Tensor:
        """Additive [B, 1, a*gamma, T + a*gamma]: main keys up to the anchor, own streams up to oneself.

        With a sliding window only what is less than `window` places before the stream's own, anchor + j.
        """
        g, a = self.config.gamma, at.shape[1]
        keys = torch.arange(t, device=at.device)
        main = (keys <= at[..., None]).repeat_interleave(g, 1)  # [B, a*gamma, T]
        own = own_streams(a, g, at.device).expand(at.shape[0], -1, -1)
        if window is not None:
            places = (at[..., None] + torch.arange(1, g + 1, device=at.device)).flatten(1)  # [B, a*gamma]
            main = main & (places[..., None] - keys < window)
            own = own & (places[..., None] - places[:, None] < window)
        see = torch.cat((main, own), 2)
        mask = torch.zeros(see.shape, device=at.device, dtype=dtype)
        return mask.masked_fill_(~see, torch.finfo(dtype).min)[:, None]

    def _prune_loss(self, states: BaseStates, anchors: Anchors) -> Tensor:
        """Next-token loss of the early-exit logits at the pruning layer (sec. 2.3)."""
        x = self.module.early_exit(states.at(states.taps[self.prune_layer], anchors))
        logits = self.target.logits(self.target.family.norm(x))[..., None, :]
        return head_loss(logits, anchors.labels[..., :1], [1.0])[0]
