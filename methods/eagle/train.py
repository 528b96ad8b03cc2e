"""`ssbench train eagle` and `eagle3`: one decoder layer over the base's features (EAGLE sec. 4.2, EAGLE-3 sec. 3.2).

Slot t reads the feature of position t and the token x_{t+1}, and predicts x_{t+2}; level 1 reads that output and
x_{t+2} instead, and predicts x_{t+3}; and so on. Losses are at the anchors, as for heads and streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal
from zlib import crc32

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt, Le
from torch import Tensor

from specbench_ss.engine.kv_cache import PrefixCache
from specbench_ss.engine.target import FINAL, Target
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.drafter_network import input_levels
from specbench_ss.methods._shared.feature_trainer import FeatureTrainer
from specbench_ss.methods.eagle.checkpoint import config_of, published_name
from specbench_ss.methods.eagle.drafter import new_eagle, new_eagle3
from specbench_ss.models.checkpoint import write_checkpoint
from specbench_ss.options import Bounded, option
from specbench_ss.training.batch import BaseStates, Batch
from specbench_ss.training.losses import TOP, LossKind, head_sums, loss_option, mean_loss
from specbench_ss.training.masks import text_visibility

NOISE_LENGTH = 512  # the published noise is for rows of this length; longer rows get less
PUBLISHED_DEPTH = 5  # of the static tree: levels for which accuracies are measured


class UnrolledTrainer(FeatureTrainer):
    """Trainer of a one-layer drafter that is unrolled over whole rows."""

    def unrolled(self, features: list[Tensor], batch: Batch, levels: int) -> Iterator[Tensor]:
        """Yield output states [B, A, h] at the anchors, level after level; level j of anchor t predicts x_{t+2+j}.

        As in decoding, level j of an anchor attends to the true features up to its own, and to its own levels 1 to j.
        """
        at, t = batch.anchors.at, batch.ids.shape[1]
        slots = torch.arange(t, device=at.device).expand(len(at), -1)
        positions, cache = batch.positions, PrefixCache({0: None}, mains=t)
        out = self.run_slots(batch, slots, positions, self.module.fuse(features), cache, 0, causal_mask(batch))
        state = out.gather(1, at[..., None].expand(-1, -1, out.shape[-1]))
        yield state
        positions, mask = positions.gather(1, at), text_visibility(at, t, batch.documents)
        own_level = torch.eye(at.shape[1], dtype=torch.bool, device=at.device).expand(len(at), -1, -1)
        for j in range(1, levels):
            cache, mask = PrefixCache(cache.kept, mains=at.shape[1]), torch.cat((mask, own_level), -1)
            state = self.run_slots(batch, at, positions + j, state, cache, j, mask[:, None])
            yield state

    def run_slots(
        self, batch: Batch, at: Tensor, positions: Tensor, state: Tensor, cache: Any, level: int, mask: Tensor | None
    ) -> Tensor:
        """Return the outputs of slots at [B, r] with their states [B, r, h] and the tokens `level` after their next.

        mask: bool [B, 1, r, keys]; None = causal.
        """
        following = (at + 1 + level).clamp_max(batch.ids.shape[1] - 1)
        tokens = self.module.embed(batch.ids.gather(1, following), self.target)
        out: Tensor = self.module(tokens, state, cache, mask, self.rotary(positions, state.dtype))
        return out

    def unrolled_loss(self, states: BaseStates, batch: Batch, weights: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of the levels' losses, each a mean over the anchors with a token at that level."""
        labels, unrolled = self.labels(batch), self.unrolled(self.features(states), batch, self.ahead)
        sums = [self.sums(states, batch, out, labels[..., j], j) for j, out in enumerate(unrolled)]
        total = torch.stack([a for a, _ in sums]), torch.stack([b for _, b in sums])
        return mean_loss(total, self.labels(batch.global_batch), weights)

    @torch.no_grad()
    def accuracies(self, states: BaseStates, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return top-k accuracy counts of each level: (hits [ahead, top], positions [ahead])."""
        top, labels = min(TOP, self.module.draft_vocab or self.target.vocab_size), self.labels(batch)
        hits = []
        for j, state in enumerate(self.unrolled(self.features(states), batch, self.ahead)):
            best = self.module.logits(state, self.target).topk(top).indices
            predictions = self.module.vocabulary(self.target.vocab_size).token_ids(best)
            hits.append((predictions == labels[..., j, None]).sum((0, 1)))
        return torch.stack(hits), (labels != -100).sum((0, 1))


def causal_mask(batch: Batch) -> Tensor | None:
    """Return the mask of whole rows, bool [B, 1, T, T]; None = causal, for rows of one text."""
    if batch.documents is None:
        return None
    b, t = batch.ids.shape
    return text_visibility(torch.arange(t, device=batch.ids.device).expand(b, -1), t, batch.documents)[:, None]


@dataclass(frozen=True, slots=True)
class EagleTrainOptions(Bounded):
    """Options of `ssbench train eagle`."""

    owner: ClassVar[str] = "eagle"
    feature_weight: Annotated[float, Ge(0)] = option(1.0, "Weight of the smooth L1 loss between features.")
    token_weight: Annotated[float, Ge(0)] = option(0.1, "Weight of the loss of the token.")
    noise: Annotated[float, Ge(0)] = option(0.2, "Width of the uniform noise on features, for rows of 512 tokens.")
    loss: LossKind = loss_option("kl")

    def check_together(self) -> None:
        """Raise UserError if all loss weights are 0."""
        if not self.feature_weight + self.token_weight:
            raise UserError("eagle: feature_weight and token_weight are both 0; set one above 0")


class EagleTrainer(UnrolledTrainer):
    """Trainer of EAGLE's drafter: smooth L1 between features, and cross-entropy of the token (EAGLE sec. 4.2).

    Only the next feature is trained. levels: number of levels with measured accuracies, from which `eagle` builds its
    tree.
    """

    name = "eagle"
    summary = "EAGLE's drafter on the frozen base, for eagle and eagle2"
    method = "eagle"
    ranked = True
    Options = EagleTrainOptions
    lr = 3e-4

    def __init__(
        self, target: Target, options: Any = None, lr: float | None = None, levels: int = PUBLISHED_DEPTH
    ) -> None:
        super().__init__(target, options, lr)
        drafter, self.config = new_eagle(target)
        self.use(drafter, (FINAL,), drafter.config, levels)

    def loss(self, states: BaseStates, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss of the next feature and its token, and accuracies (of all levels without gradients)."""
        o, at, labels = self.options, batch.anchors.at, self.labels(batch)[..., :1]
        labelled = labels[..., 0] != -100
        count = (self.labels(batch.global_batch)[..., 0] != -100).sum().clamp_min(1)
        (out,) = self.unrolled([self._noisy(states.final, batch)], batch, 1)
        drafted, true = out[labelled], states.final[labelled.nonzero()[:, 0], (at + 1)[labelled]]  # [n, h]
        feature = F.smooth_l1_loss(drafted.float(), true.float(), reduction="none").mean(-1).sum() / count
        with torch.no_grad():
            teacher = self.target.logits(true)[:, None] if o.loss != "ce" else None
        logits = self.module.logits(drafted, self.target)[:, None]
        summed, correct = head_sums(logits, labels[labelled], teacher, o.loss)
        token = summed[0] / count
        if torch.is_grad_enabled():
            accuracy = correct / count
        else:
            hits, _ = self.accuracies(states, batch)
            accuracy = hits[:, 0] / (self.labels(batch.global_batch) != -100).sum((0, 1)).clamp_min(1)
        return o.feature_weight * feature + o.token_weight * token, accuracy

    def _noisy(self, final: Tensor, batch: Batch) -> Tensor:
        """Return features with noise, which imitates errors of the drafter's outputs.

        The noise of a row is a function of its tokens and anchors; the anchors are sampled again in every epoch.
        """
        if not self.options.noise or not torch.is_grad_enabled():
            return final
        rows = torch.cat((batch.ids, batch.anchors.at), 1).cpu().numpy()
        seeds = [crc32(row.tobytes()) for row in rows]  # 32 bits: a CPU generator uses no more
        rngs = (torch.Generator(final.device).manual_seed(seed) for seed in seeds)
        noise = torch.stack([torch.rand(final.shape[1:], generator=rng, device=final.device) for rng in rngs])
        width: float = self.options.noise * NOISE_LENGTH / final.shape[1]
        return final + (noise - 0.5) * width


@dataclass(frozen=True, slots=True)
class Eagle3TrainOptions(Bounded):
    """Options of `ssbench train eagle3`."""

    owner: ClassVar[str] = "eagle3"
    levels: Annotated[int, Ge(1), Le(64)] = option(
        7, "Number of training-time-test passes, in which the drafter reads its own outputs."
    )
    draft_vocab: Annotated[int, Ge(1), Le(1 << 24)] = option(
        32000, "Size of the draft vocabulary (the most frequent tokens of the text)."
    )
    decay: Annotated[float, Gt(0)] = option(0.8, "Weight of a level's loss relative to the level before it.")
    loss: LossKind = loss_option("kl")
    format: Literal["published", "speculators"] = option(
        "published", "Layout of the folder: as EAGLE-3 was published, or speculators' (for vLLM)."
    )


class Eagle3Trainer(UnrolledTrainer):
    """Trainer of EAGLE-3's drafter by training-time test: level j has the loss weight decay^j (EAGLE-3 sec. 3.2).

    The draft vocabulary is the most frequent tokens of answers. The LM head is initialized from the target's.
    """

    name = "eagle3"
    summary = "EAGLE-3's drafter on the frozen base: features of three levels, training-time test"
    method = "eagle3"
    Options = Eagle3TrainOptions
    lr = 3e-4

    def __init__(self, target: Target, options: Any = None, lr: float | None = None) -> None:
        super().__init__(target, options, lr)
        layers = input_levels(target.n_layers) if self.options.format == "speculators" else ()
        drafter, self.config, layers = new_eagle3(target, self.options.draft_vocab, layers)
        self.use(drafter, layers, drafter.config, self.options.levels)

    def loss(self, states: BaseStates, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the sum of the levels' losses with the weights decay^j."""
        return self.unrolled_loss(states, batch, [self.options.decay**j for j in range(self.ahead)])

    def save(self, folder: Path, about: dict[str, Any]) -> None:
        """Write the folder in one of the published layouts, with the layers that the drafter reads."""
        if self.options.format == "published":
            super().save(folder, about)
            return
        config = config_of(self.module, self.layers, self.ahead, self.target)
        write_checkpoint(folder, self.module, {**config, **about}, called=published_name)
