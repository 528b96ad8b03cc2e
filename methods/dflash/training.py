"""Training DFlash's drafter on a frozen base: blocks at random anchors of the answers (DFlash sec. 4.2).

The block of anchor t has its root at x_{t+1}; it sees the features up to position t, and all of its own places. The
place k behind the root says what x_{t+1+k} is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from specbench_ss.engine.kv_cache import StreamCache
from specbench_ss.engine.target import FINAL, Target
from specbench_ss.methods._shared.draft_vocabulary import guess_sums, take_words
from specbench_ss.methods._shared.rotary import Rotary
from specbench_ss.methods.dflash.drafter import Drafter
from specbench_ss.training.batches import Batch
from specbench_ss.training.losses import mean_loss
from specbench_ss.training.trainee import BaseStates, Trainee

AT_ONCE = 32  # blocks of a row that pass together: each one's rows are keys that the others do not see


class DFlashTrainee(Trainee):
    """A drafter, and how it learns. decay: of the weights exp(-k / decay) of the k-th draft's loss.

    soft: cross-entropy from the target's distribution, whose gradient is that of the KL divergence, instead of from the
    text's token.
    """

    name = "dflash"
    module: Drafter

    def __init__(
        self, target: Target, drafter: Drafter, lr: float = 1e-3, decay: float = 4.0, soft: bool = True
    ) -> None:
        self.target, self.module, self.lr, self.decay, self.soft = target, drafter, lr, decay, soft
        self.drafts = drafter.shape.block - drafter.shape.first
        self.taps = tuple(layer for layer in drafter.shape.layers if layer != FINAL)
        self.rotary = Rotary(drafter.config, target.device)
        for head in (drafter.lm_head, drafter.embed_tokens):  # the target's, or a part of it
            if head is not None:
                head.requires_grad_(False)

    def about(self) -> dict[str, Any]:
        """The block and the losses."""
        shape = self.module.shape
        return {
            "draft layers": len(self.module.layers), "block": shape.block, "decay": self.decay, "soft": self.soft,
            "from anchor": shape.from_anchor, "draft vocabulary": shape.draft_vocab, "mask token": shape.mask_token,
        }  # fmt: skip

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Without the LM head."""
        return [{"params": [p for p in self.module.parameters() if p.requires_grad], "lr": self.lr}]

    def scan(self, batches: Iterable[Batch]) -> None:
        """Choose the draft vocabulary, where it is not the whole one."""
        take_words(self.module, batches, self.target)

    # -- the pass -----------------------------------------------------------------------------------------------

    def blocks(self, states: BaseStates, batch: Batch) -> Tensor:
        """Normed states [B, A, drafts, h] of the drafting places of every anchor's block."""
        drafter, places = self.module, batch.positions
        context = drafter.fuse([states.final if i == FINAL else states.taps[i] for i in drafter.shape.layers])
        keys, values = drafter.inject(context, self.rotary(places, context.dtype))
        given = dict(enumerate(zip(keys, values, strict=True)))
        parts = batch.anchors.at.split(AT_ONCE, 1)
        return torch.cat([self._some(batch, at, places.gather(1, at), StreamCache(given)) for at in parts], 1)

    def _some(self, batch: Batch, at: Tensor, places: Tensor, cache: StreamCache) -> Tensor:
        """The same for anchors `at` [B, A] at these places of their texts; cache: all of the row's context."""
        drafter, (b, a), size = self.module, at.shape, self.module.shape.block
        tokens = torch.full((b, a, size), drafter.shape.mask_token, device=at.device)
        tokens[..., 0] = batch.ids.gather(1, (at + 1).clamp_max(batch.ids.shape[1] - 1))
        ahead = places[..., None] + 1 + torch.arange(size, device=at.device)  # [B, A, size]
        embedded = drafter.embed(tokens.flatten(1), self.target)
        rotary = self.rotary(ahead.flatten(1), embedded.dtype)
        out = drafter(embedded, cache, self._masks(batch, at), rotary)
        blocks: Tensor = out.unflatten(1, (a, size))
        return blocks[:, :, drafter.shape.first :]

    def _masks(self, batch: Batch, at: Tensor) -> list[Tensor | None]:
        """Bool [B, 1, A * size, T + A * size], one a layer: context before the root, and places of the same block."""
        shape, (b, t) = self.module.shape, batch.ids.shape
        keys, own = torch.arange(t, device=at.device), torch.eye(at.shape[1], dtype=torch.bool, device=at.device)
        made = {}
        for sight in set(shape.sights):
            context = sight.context(at + 1, shape.block, keys)  # [B, A, size, T]
            if batch.documents is not None:
                context = context & batch.documents.same(at, t)[:, :, None]
            block = torch.kron(own, sight.block(shape.block, at.device))  # [A * size, A * size]
            made[sight] = torch.cat((context.flatten(1, 2), block.expand(b, -1, -1)), -1)[:, None]
        return [made[sight] for sight in shape.sights]

    # -- the loss -----------------------------------------------------------------------------------------------

    def labels(self, batch: Batch) -> Tensor:
        """int64 [B, A, drafts]: the tokens behind the root, -100 where the answer has ended by then."""
        return batch.anchors.labels[..., 1 : 1 + self.drafts]

    def loss(self, states: BaseStates, batch: Batch) -> tuple[Tensor, Tensor]:
        """Weighted sum of the drafts' losses, each a mean over the anchors that have a token so far ahead."""
        labels, out, sums, drafter = self.labels(batch), self.blocks(states, batch), [], self.module
        for k in range(self.drafts):
            known = labels[..., k] != -100
            at = (batch.anchors.at + 1 + k)[known]
            true = states.final[known.nonzero()[:, 0], at]  # [n, h], whose distribution the token was taken from
            # logits of a place are many: computed again in the backward pass rather than kept
            rows = out[:, :, k][known], true, labels[..., k][known]
            sums.append(checkpoint(guess_sums, drafter, self.target, *rows, self.soft, use_reentrant=False))
        total = torch.stack([a for a, _ in sums]), torch.stack([b for _, b in sums])
        return mean_loss(total, self.labels(batch.whole), [math.exp(-k / self.decay) for k in range(self.drafts)])
