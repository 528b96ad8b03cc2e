"""Training P-EAGLE's drafter on a frozen base: all depths in one pass, of which deep ones are dropped (sec. 3).

Slot t reads the feature of position t and the token x_{t+1}, and says what x_{t+2} is. Depth d of anchor t reads what
stands in for both, and says what x_{t+2+d} is; it sees the true slots up to t and its own anchor's depths up to d.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from specbench_ss.engine.target import Target
from specbench_ss.methods._shared.draft_vocabulary import guess_sums, take_words
from specbench_ss.methods._shared.rotary import Rotary
from specbench_ss.methods.peagle.drafter import Drafter
from specbench_ss.training.batches import Batch
from specbench_ss.training.trainee import BaseStates, Trainee


class PEagleTrainee(Trainee):
    """A drafter, and how it learns. keep, floor: depth d keeps max(keep^d, floor) of the anchors.

    soft: cross-entropy from the target's distribution, whose gradient is that of the KL divergence, instead of from the
    text's token.
    """

    name = "peagle"
    module: Drafter

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        lr: float = 1e-3,
        keep: float = 0.7,
        floor: float = 0.2,
        soft: bool = True,
    ) -> None:
        self.target, self.module, self.lr, self.soft = target, drafter, lr, soft
        self.shares = [max(keep**d, floor) for d in range(drafter.shape.depths)]
        self.taps = tuple(dict.fromkeys(drafter.shape.layers))
        self.rotary = Rotary(drafter.config, target.device)
        assert drafter.lm_head is not None
        drafter.lm_head.requires_grad_(False)  # the target's, or a part of it

    def about(self) -> dict[str, Any]:
        """The depths, what is kept of them and the losses."""
        shape = self.module.shape
        return {
            "draft layers": len(self.module.layers), "shares": self.shares, "soft": self.soft,
            "own embedding": bool(shape.vocab), "draft vocabulary": shape.draft_vocab, "mask token": shape.mask_token,
        }  # fmt: skip

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Without the LM head."""
        return [{"params": [p for p in self.module.parameters() if p.requires_grad], "lr": self.lr}]

    def scan(self, batches: Iterable[Batch]) -> None:
        """Choose the draft vocabulary, where it is not the whole one."""
        if "d2t" in self.module.state_dict():
            take_words(self.module, batches, self.target)

    # -- the pass -----------------------------------------------------------------------------------------------

    def states(self, states: BaseStates, batch: Batch) -> list[Tensor]:
        """Normed states [B, n_d, h] of every depth d, at the first n_d anchors of each row."""
        drafter, at, t = self.module, batch.anchors.at, batch.ids.shape[1]
        counts = [math.ceil(share * at.shape[1]) for share in self.shares]
        deep = torch.tensor(counts[1:], dtype=torch.long, device=at.device)
        depth = torch.arange(1, len(counts), device=at.device).repeat_interleave(deep)  # [R], of rows behind true slots
        anchor = torch.cat([at[:, :0], *(at[:, :n] for n in counts[1:])], 1)  # [B, R]
        fused = drafter.fuse([states.taps[layer] for layer in drafter.shape.layers])  # [B, T, h]
        unknown = drafter.unknown().expand(len(at), len(depth), -1)
        following = torch.cat((batch.ids[:, 1:], batch.ids[:, -1:]), 1)
        tokens = torch.cat((following, torch.full_like(anchor, drafter.shape.mask_token)), 1)
        places = torch.cat((batch.positions, batch.positions.gather(1, anchor) + depth), 1)
        masks = self._masks(batch, anchor, depth)
        embedded = drafter.embed(tokens, self.target)
        out = drafter(embedded, torch.cat((fused, unknown), 1), None, masks, self.rotary(places, fused.dtype))
        true, *others = out.split((t, *counts[1:]), 1)
        return [true.gather(1, at[..., None].expand(-1, -1, out.shape[-1])), *others]

    def _masks(self, batch: Batch, anchor: Tensor, depth: Tensor) -> list[Tensor]:
        """Bool [B, 1, T + R, T + R], one a layer: true slots up to a row's anchor, and its anchor's earlier depths."""
        b, t = batch.ids.shape
        at = torch.cat((torch.arange(t, device=anchor.device).expand(b, -1), anchor), 1)  # [B, T + R]
        deep = torch.cat((depth.new_zeros(t), depth))
        keys = torch.arange(t, device=anchor.device)
        own = (at[:, :, None] == anchor[:, None]) & (deep[:, None] >= depth)  # [B, T + R, R]
        made: dict[int | None, Tensor] = {}
        for window in set(self.module.shape.windows):
            true = keys <= at[..., None]  # [B, T + R, T]
            if window is not None:
                true &= keys > (at + deep)[..., None] - window
            if batch.documents is not None:
                true &= batch.documents.same(at, t)
            made[window] = torch.cat((true, own), -1)[:, None]
        return [made[window] for window in self.module.shape.windows]

    # -- the loss -----------------------------------------------------------------------------------------------

    def labels(self, batch: Batch) -> Tensor:
        """int64 [B, A, depths]: x_{t+2+d}, -100 where the answer has ended by then or the place is dropped.

        Anchors are in random order, those of no use last: the first ones are a random choice.
        """
        labels = batch.anchors.labels[..., 1 : 1 + len(self.shares)]
        good = (labels[..., :1] != -100).sum(1, keepdim=True)  # [B, 1, 1]
        rank = torch.arange(labels.shape[1], device=labels.device)[:, None]
        kept = (good * labels.new_tensor(self.shares, dtype=torch.float64)).ceil()  # [B, 1, depths]
        return labels.masked_fill(rank >= kept, -100)

    def loss(self, states: BaseStates, batch: Batch) -> tuple[Tensor, Tensor]:
        """Mean over all places that are kept, of whatever depth."""
        labels, sums = self.labels(batch), []
        for d, state in enumerate(self.states(states, batch)):
            told = labels[:, : state.shape[1], d]
            known = told != -100
            at = (batch.anchors.at[:, : state.shape[1]] + 1 + d)[known]
            true = states.final[known.nonzero()[:, 0], at]  # [n, h], whose distribution the token was taken from
            # logits of a depth are many: computed again in the backward pass rather than kept
            rows = state[known], true, told[known]
            sums.append(checkpoint(guess_sums, self.module, self.target, *rows, self.soft, use_reentrant=False))
        count = (self.labels(batch.whole) != -100).sum((0, 1))  # [depths]
        right = torch.stack([hits for _, hits in sums]) / count.clamp_min(1)
        return torch.stack([loss for loss, _ in sums]).sum() / count.sum().clamp_min(1), right
