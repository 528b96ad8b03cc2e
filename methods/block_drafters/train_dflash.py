"""`ssbench train dflash`: blocks at random anchors of the answers (DFlash sec. 4.2).

The block of anchor t has its root at x_{t+1}; it sees the features up to position t, and all of its own places. The
place k behind the root says what x_{t+1+k} is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from specbench_ss.engine.kv_cache import StreamCache
from specbench_ss.engine.target import FINAL, Target
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.draft_vocabulary import guess_sums, take_words
from specbench_ss.methods._shared.drafter_network import Rotary
from specbench_ss.methods.block_drafters.dflash import MOST_BLOCK, Drafter
from specbench_ss.options import Bounded
from specbench_ss.training.losses import Targets, mean_loss, targets_option
from specbench_ss.training.session import DrafterTrainer
from specbench_ss.training.trainee import BaseStates, Batch, Trainee

if TYPE_CHECKING:
    from specbench_ss.training.distributed import Trained


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


@dataclass(frozen=True, slots=True)
class DFlashTraining(Bounded):
    """Options of `ssbench train dflash`. Raises UserError for values beyond their bounds."""

    owner: ClassVar[str] = "dflash"
    layers: Annotated[int, Ge(1)] = field(default=5, metadata={"help": "Number of decoder layers of the drafter."})
    block_size: Annotated[int, Ge(2), Le(MOST_BLOCK)] = field(
        default=8, metadata={"help": "Places of a block: the root's, and one for each token that is drafted."}
    )
    decay: Annotated[float, Gt(0)] = field(
        default=4.0, metadata={"help": "The k-th drafted token's loss has the weight exp(-(k - 1) / decay)."}
    )
    targets: Targets = targets_option("distribution", later=False)
    draft_vocab: Annotated[int, Ge(0)] = field(
        default=0, metadata={"help": "How many words it can draft: the most frequent ones of the text. 0: all."}
    )
    mask_token_id: Annotated[int, Ge(-1)] = field(
        default=-1,
        metadata={
            "help": "Token that stands at drafted places. -1: the tokenizer's mask token, or else the last token whose "
            "embedding is not zero."
        },
    )
    sample_from_anchor: bool = field(
        default=False,
        metadata={"help": "Whether the root's place drafts a token, too. vLLM does not serve such a drafter."},
    )
    format: Literal["z-lab", "speculators"] = field(
        default="z-lab",
        metadata={"help": "Layout of the folder: as z-lab publishes drafters, or as speculators does, for vLLM."},
    )


class DFlashTrainer(DrafterTrainer):
    """The drafter of `dflash`."""

    name = "dflash"
    summary = "DFlash's drafter of whole blocks on the frozen base"
    method = "dflash"
    lr = 6e-4
    Options = DFlashTraining

    @property
    def ahead(self) -> int:
        """A token a place."""
        return int(self.options.block_size) - (not self.options.sample_from_anchor)

    def build(self, target: Target, lr: float) -> Trainee:
        """Fresh layers."""
        from specbench_ss.methods.block_drafters.dflash import new_drafter

        target.check_square(self.name)
        o = self.options
        if o.mask_token_id >= target.vocab_size:
            raise UserError(
                f"dflash: mask_token_id is {o.mask_token_id}, the model has tokens 0 to {target.vocab_size - 1}"
            )
        mask = None if o.mask_token_id < 0 else o.mask_token_id
        drafter = new_drafter(target, o.layers, o.block_size, o.draft_vocab, mask, o.sample_from_anchor)
        return DFlashTrainee(target, drafter, lr, o.decay, o.targets == "distribution")

    def save(self, training: Trained, folder: Path, about: dict[str, Any]) -> None:
        """In one of the published layouts."""
        from specbench_ss.methods.block_drafters.dflash import config_of, speculators_config_of
        from specbench_ss.models.checkpoint import write_checkpoint

        trainee = training.trainee
        assert isinstance(trainee, DFlashTrainee)
        config = speculators_config_of if self.options.format == "speculators" else config_of
        write_checkpoint(folder, trainee.module, {**config(trainee.module, training.target), **about})
