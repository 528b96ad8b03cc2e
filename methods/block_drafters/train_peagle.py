"""`ssbench train peagle`: all depths in one pass (P-EAGLE sec. 3).

Slot t reads the feature of position t and the token x_{t+1}, and says what x_{t+2} is. Depth d of anchor t reads what
stands in for both, and says what x_{t+2+d} is; it sees the true slots up to t and its own anchor's depths up to d.
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

from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.draft_vocabulary import guess_sums, take_words
from specbench_ss.methods._shared.drafter_network import Rotary
from specbench_ss.methods.block_drafters.peagle import DEPTHS, MOST_DEPTHS, Drafter
from specbench_ss.options import Bounded
from specbench_ss.training.losses import Targets, targets_option
from specbench_ss.training.session import DrafterTrainer
from specbench_ss.training.trainee import BaseStates, Batch, Trainee

if TYPE_CHECKING:
    from specbench_ss.training.distributed import Trained


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


@dataclass(frozen=True, slots=True)
class PEagleTraining(Bounded):
    """Options of `ssbench train peagle`. Raises UserError for values beyond their bounds."""

    owner: ClassVar[str] = "peagle"
    layers: Annotated[int, Ge(1)] = field(default=1, metadata={"help": "Number of decoder layers of the drafter."})
    depths: Annotated[int, Ge(1), Le(MOST_DEPTHS)] = field(
        default=DEPTHS, metadata={"help": "How many tokens it drafts in one pass."}
    )
    keep: Annotated[float, Gt(0), Le(1)] = field(
        default=0.7, metadata={"help": "Depth d is trained at max(keep^d, keep_least) of the anchors."}
    )
    keep_least: Annotated[float, Gt(0), Le(1)] = field(
        default=0.2, metadata={"help": "The smallest share of the anchors that a depth keeps."}
    )
    targets: Targets = targets_option("distribution", later=False)
    draft_vocab: Annotated[int, Ge(0)] = field(
        default=32000, metadata={"help": "How many words it can draft: the most frequent ones of the text. 0: all."}
    )
    embedding: Literal["own", "target"] = field(
        default="own",
        metadata={"help": "own: an embedding that is trained and saved, as published. target: the base's, unchanged."},
    )
    mask_token_id: Annotated[int, Ge(-1)] = field(
        default=-1,
        metadata={
            "help": "Token that stands at drafted places. -1: the tokenizer's mask token, or else the last token whose "
            "embedding is not zero."
        },
    )
    format: Literal["eagle3", "speculators"] = field(
        default="eagle3",
        metadata={"help": "Layout of the folder: as EAGLE-3's drafters have it, or as speculators does, for vLLM."},
    )


class PEagleTrainer(DrafterTrainer):
    """The drafter of `peagle`."""

    name = "peagle"
    summary = "P-EAGLE's drafter of all depths at once on the frozen base"
    method = "peagle"
    lr = 3e-4
    Options = PEagleTraining

    @property
    def ahead(self) -> int:
        """A token a depth."""
        return int(self.options.depths)

    def build(self, target: Target, lr: float) -> Trainee:
        """Fresh layers."""
        from specbench_ss.methods._shared.draft_vocabulary import check_mask_token
        from specbench_ss.methods.block_drafters.peagle import new_drafter

        target.check_square(self.name)
        o = self.options
        mask = None if o.mask_token_id < 0 else o.mask_token_id
        if mask is not None:
            try:
                check_mask_token(mask, target)
            except UserError as error:
                raise UserError(f"{self.name}: {error}") from None
        drafter = new_drafter(target, o.depths, o.layers, o.draft_vocab, mask, o.embedding == "own")
        return PEagleTrainee(target, drafter, lr, o.keep, o.keep_least, o.targets == "distribution")

    def save(self, training: Trained, folder: Path, about: dict[str, Any]) -> None:
        """In one of the published layouts."""
        from specbench_ss.methods.block_drafters.peagle import config_of, speculators_config_of
        from specbench_ss.models.checkpoint import write_checkpoint

        trainee = training.trainee
        assert isinstance(trainee, PEagleTrainee)
        config = speculators_config_of if self.options.format == "speculators" else config_of
        write_checkpoint(folder, trainee.module, {**config(trainee.module, training.target), **about})
