"""`ssbench train eagle` and `eagle3`: one decoder layer over the base's features (EAGLE sec. 4.2, EAGLE-3 sec. 3.2).

Slot t reads the feature of position t and the token x_{t+1}, and says what x_{t+2} is; level 1 reads that output and
x_{t+2} in its place, and says what x_{t+3} is; and so on. Losses are at the anchors, as those of heads and streams
are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal
from zlib import crc32

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from specbench_ss.engine.kv_cache import StreamCache
from specbench_ss.engine.target import FINAL, Target
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.draft_vocabulary import choose_words, frequent_words, guesses_of
from specbench_ss.methods._shared.drafter_network import Rotary
from specbench_ss.methods.eagle.drafter import new_eagle, new_eagle3
from specbench_ss.options import Bounded
from specbench_ss.training.losses import Targets, head_sums, mean_loss, targets_option, told_targets
from specbench_ss.training.session import TOP, DrafterTrainer, measured_accuracies
from specbench_ss.training.trainee import BaseStates, Batch, Trainee

if TYPE_CHECKING:
    from specbench_ss.training.distributed import Trained


NOISE_LENGTH = 512  # the published noise is for rows of this length, and less in longer ones


class FeatureTrainee(Trainee):
    """A drafter unrolled over whole rows. config: what its folder's config.json says of it."""

    module: Any  # a Drafter
    config: dict[str, Any]

    def __init__(self, target: Target, levels: int, layers: tuple[int, ...] = (FINAL,)) -> None:
        self.target, self.levels, self.layers = target, levels, layers
        self.taps = tuple(layer for layer in layers if layer != FINAL)
        self.rotary = Rotary(self.module.shape.llama(self.config), target.device)

    def features(self, states: BaseStates) -> list[Tensor]:
        """[B, T, h_t] a level."""
        return [states.final if layer == FINAL else states.taps[layer] for layer in self.layers]

    def unrolled(self, features: list[Tensor], batch: Batch, levels: int) -> Iterator[Tensor]:
        """Output states [B, A, h] at the anchors, level after level; level j of anchor t says what x_{t+2+j} is.

        As in decoding, level j of an anchor sees the true features up to its own, and its own levels 1 to j.
        """
        at, t = batch.anchors.at, batch.ids.shape[1]
        every = torch.arange(t, device=at.device).expand(len(at), -1)
        places = every if batch.documents is None else batch.documents.places
        cache = StreamCache({0: None}, mains=t)
        out = self._pass(batch, every, places, self.module.fuse(features), cache, 0)
        state = out.gather(1, at[..., None].expand(-1, -1, out.shape[-1]))
        yield state
        places = places.gather(1, at)
        for j in range(1, levels):
            cache = StreamCache(cache.kept, mains=at.shape[1])
            state = self._pass(batch, at, places, state, cache, j)
            yield state

    def _pass(self, batch: Batch, at: Tensor, places: Tensor, state: Tensor, cache: StreamCache, level: int) -> Tensor:
        """Rows at [B, r] with their states [B, r, h], `level` tokens further on."""
        ahead = (at + 1 + level).clamp_max(batch.ids.shape[1] - 1)
        tokens = self.module.embed(batch.ids.gather(1, ahead), self.target)
        out: Tensor = self.module(
            tokens, state, cache, _visible(batch, at, level), self.rotary(places + level, state.dtype)
        )
        return out

    def labels(self, batch: Batch) -> Tensor:
        """int64 [B, A, levels]: x_{t+2+j}, -100 where the answer has ended by then."""
        return batch.anchors.labels[..., 1 : 1 + self.levels]

    @torch.no_grad()
    def accuracies(self, states: BaseStates, batch: Batch) -> tuple[Tensor, Tensor]:
        """How often the r-th guess of level j is right: (hits [levels, top], positions [levels])."""
        top, labels = min(TOP, self.module.draft_vocab or self.target.vocab_size), self.labels(batch)
        hits = []
        for j, state in enumerate(self.unrolled(self.features(states), batch, self.levels)):
            guesses = self.module.token_ids(self.module.logits(state, self.target).topk(top).indices)
            hits.append((guesses == labels[..., j, None]).sum((0, 1)))
        return torch.stack(hits), (labels != -100).sum((0, 1))


def _visible(batch: Batch, at: Tensor, level: int) -> Tensor | None:
    """Bool [B, 1, r, T + level * r] of rows at [B, r]; None = causal, which whole rows of one text are."""
    t, r = batch.ids.shape[1], at.shape[1]
    if batch.documents is None and not level:
        return None
    true = torch.arange(t, device=at.device) <= at[..., None]  # [B, r, T]
    if batch.documents is not None:
        true = true & batch.documents.same(at, t)
    own = torch.eye(r, dtype=torch.bool, device=at.device).expand(len(at), -1, -1)
    return torch.cat((true, *[own] * level), -1)[:, None]


def _ahead(final: Tensor, at: Tensor, by: int) -> Tensor:
    """final [B, T, h] at positions at + by, [B, A, h]."""
    at = (at + by).clamp_max(final.shape[1] - 1)
    return final.gather(1, at[..., None].expand(-1, -1, final.shape[-1]))


class EagleTrainee(FeatureTrainee):
    """Smooth L1 between features, and cross-entropy of the token (EAGLE sec. 4.2, from the target's distribution).

    levels: how far accuracies are looked at; what is learnt is the next feature alone. noise: width of the uniform
    noise on features, at rows of 512 tokens.
    """

    name = "eagle"

    def __init__(
        self,
        target: Target,
        lr: float = 1e-3,
        levels: int = 5,
        feature_weight: float = 1.0,
        token_weight: float = 0.1,
        noise: float = 0.2,
        targets: Targets = "distribution",
    ) -> None:
        self.module, self.config = new_eagle(target)
        self.targets = targets
        self.lr, self.feature_weight, self.token_weight, self.noise = lr, feature_weight, token_weight, noise
        super().__init__(target, levels)

    def about(self) -> dict[str, Any]:
        """The weights of the losses and the noise."""
        weights = {"feature weight": self.feature_weight, "token weight": self.token_weight, "noise": self.noise}
        return weights | told_targets(self.targets, "distribution")

    def loss(self, states: BaseStates, batch: Batch) -> tuple[Tensor, Tensor]:
        """Of the next feature and the token read off it; without gradients, shares of all levels are looked at too."""
        at, labels = batch.anchors.at, self.labels(batch)[..., :1]
        known = labels[..., 0] != -100
        count = (self.labels(batch.whole)[..., 0] != -100).sum().clamp_min(1)
        (out,) = self.unrolled([self._noisy(states.final, batch)], batch, 1)
        drafted, true = out[known], _ahead(states.final, at, 1)[known]  # [n, h]
        feature = F.smooth_l1_loss(drafted.float(), true.float(), reduction="none").mean(-1).sum() / count
        with torch.no_grad():
            teacher = self.target.logits(true)[:, None] if self.targets == "distribution" else None
        summed, right = head_sums(self.module.logits(drafted, self.target)[:, None], labels[known], teacher)
        token = summed[0] / count
        if torch.is_grad_enabled():
            shares = right / count
        else:
            hits, _ = self.accuracies(states, batch)
            shares = hits[:, 0] / (self.labels(batch.whole) != -100).sum((0, 1)).clamp_min(1)
        return self.feature_weight * feature + self.token_weight * token, shares

    def _noisy(self, final: Tensor, batch: Batch) -> Tensor:
        """Features with noise, as the drafter's own outputs will have errors.

        Of each row a function of its tokens and of its anchors, which are drawn anew whenever the row comes again.
        """
        if not self.noise or not torch.is_grad_enabled():
            return final
        rows = torch.cat((batch.ids, batch.anchors.at), 1).cpu().numpy()
        seeds = [crc32(row.tobytes()) for row in rows]  # of 32 bits: a generator on a CPU looks at no more
        rngs = (torch.Generator(final.device).manual_seed(seed) for seed in seeds)
        noise = torch.stack([torch.rand(final.shape[1:], generator=rng, device=final.device) for rng in rngs])
        return final + (noise - 0.5) * (self.noise * NOISE_LENGTH / final.shape[1])


class Eagle3Trainee(FeatureTrainee):
    """Training-time test: `levels` levels of its own outputs, cross-entropy over the draft vocabulary, weight 0.8^j.

    The draft vocabulary: the words that answers of the text have most. Its LM head starts as the target's rows.
    layers: whose inputs are features, empty = the published ones.
    """

    name = "eagle3"

    def __init__(
        self,
        target: Target,
        lr: float = 1e-3,
        levels: int = 7,
        draft_vocab: int = 32000,
        decay: float = 0.8,
        layers: tuple[int, ...] = (),
        targets: Targets = "distribution",
    ) -> None:
        self.module, self.config, layers = new_eagle3(target, draft_vocab, layers)
        self.targets = targets
        self.lr, self.decay = lr, decay
        super().__init__(target, levels, layers)

    def about(self) -> dict[str, Any]:
        """The draft vocabulary's size and the weights of the levels."""
        about = {"draft vocabulary": self.module.draft_vocab, "levels": self.levels, "decay": self.decay}
        return about | told_targets(self.targets, "distribution")

    @torch.no_grad()
    def scan(self, batches: Iterable[Batch]) -> None:
        """Choose the draft vocabulary."""
        words = frequent_words(batches, self.target.vocab_size, self.module.draft_vocab).to(self.target.device)
        choose_words(self.module, words)
        self.module.lm_head.weight.copy_(self.target.unembed[words])

    def loss(self, states: BaseStates, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sum of the levels' losses, each a mean over the anchors that have a token so far ahead."""
        labels, sums = self.labels(batch), []
        for j, state in enumerate(self.unrolled(self.features(states), batch, self.levels)):
            known = labels[..., j] != -100
            rows = state[known], _ahead(states.final, batch.anchors.at, 1 + j)[known], labels[..., j][known]
            # logits of a level are many: computed again in the backward pass rather than kept
            sums.append(checkpoint(self._sums, *rows, use_reentrant=False))
        total = torch.stack([a for a, _ in sums]), torch.stack([b for _, b in sums])
        return mean_loss(total, self.labels(batch.whole), [self.decay**j for j in range(self.levels)])

    def _sums(self, state: Tensor, true: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Sums over positions [n] of the cross-entropy and of right guesses.

        state [n, h] of the drafter, true [n, h] the target's at the same token.
        """
        words = self.module.token_ids(torch.arange(self.module.draft_vocab, device=labels.device))
        vocabulary = words, self.module.get_buffer("t2d")
        q = self.module.logits(state, self.target)
        return guesses_of(q, self.target, true, labels, vocabulary, self.targets == "distribution")


PUBLISHED_DEPTH = 5  # of the static tree: levels for which accuracies are measured


@dataclass(frozen=True, slots=True)
class EagleTrainOptions(Bounded):
    """Options of `ssbench train eagle`. Raises UserError for values beyond their bounds."""

    owner: ClassVar[str] = "eagle"
    feature_weight: Annotated[float, Ge(0)] = field(
        default=1.0, metadata={"help": "Weight of the smooth L1 loss between features."}
    )
    token_weight: Annotated[float, Ge(0)] = field(
        default=0.1, metadata={"help": "Weight of the cross-entropy of the token."}
    )
    noise: Annotated[float, Ge(0)] = field(
        default=0.2, metadata={"help": "Width of the uniform noise on features, for rows of 512 tokens."}
    )
    targets: Targets = targets_option("distribution")

    def check_together(self) -> None:
        """Something to learn."""
        if not self.feature_weight + self.token_weight:
            raise UserError("eagle: with feature_weight and token_weight 0 there is nothing to learn")


class EagleTrainer(DrafterTrainer):
    """The drafter of `eagle` and `eagle2`, and the accuracies of which `eagle` builds its tree."""

    name = "eagle"
    summary = "EAGLE's drafter on the frozen base, for eagle and eagle2"
    method = "eagle"
    lr = 3e-4
    Options = EagleTrainOptions

    @property
    def ahead(self) -> int:
        """Levels that are looked at; one is learnt."""
        return PUBLISHED_DEPTH

    def build(self, target: Target, lr: float) -> Trainee:
        """A fresh layer."""

        o = self.options
        return EagleTrainee(target, lr, self.ahead, o.feature_weight, o.token_weight, o.noise, o.targets)

    def measured(self, training: Trained) -> dict[str, Any]:
        """Accuracies, of which the static tree is built."""
        trainee: Any = training.trainee
        return measured_accuracies(training, trainee)

    def save(self, training: Trained, folder: Path, about: dict[str, Any]) -> None:
        """In the published layout."""
        from specbench_ss.models.checkpoint import write_checkpoint

        trainee = training.trainee
        assert isinstance(trainee, EagleTrainee)
        write_checkpoint(folder, trainee.module, {**trainee.config, **about})


@dataclass(frozen=True, slots=True)
class Eagle3TrainOptions(Bounded):
    """Options of `ssbench train eagle3`. Raises UserError for values beyond their bounds."""

    owner: ClassVar[str] = "eagle3"
    levels: Annotated[int, Ge(1)] = field(
        default=7, metadata={"help": "Number of passes in which the drafter learns from its own outputs."}
    )
    draft_vocab: Annotated[int, Ge(1)] = field(
        default=32000, metadata={"help": "How many words it can draft: the most frequent ones of the text."}
    )
    decay: Annotated[float, Gt(0)] = field(
        default=0.8, metadata={"help": "Weight of a level's loss as a multiple of the weight of the one before it."}
    )
    targets: Targets = targets_option("distribution")
    format: Literal["published", "speculators"] = field(
        default="published",
        metadata={
            "help": "Layout of the folder: as EAGLE-3 was published, or as speculators writes it, for vLLM.",
            "later": True,
        },
    )


class Eagle3Trainer(DrafterTrainer):
    """The drafter of `eagle3`, by training-time test."""

    name = "eagle3"
    summary = "EAGLE-3's drafter on the frozen base: features of three levels, training-time test"
    method = "eagle3"
    lr = 3e-4
    Options = Eagle3TrainOptions

    @property
    def ahead(self) -> int:
        """A token a level."""
        return int(self.options.levels)

    def build(self, target: Target, lr: float) -> Trainee:
        """A fresh layer."""
        from specbench_ss.methods._shared.drafter_network import input_levels

        o = self.options
        layers = input_levels(target.n_layers) if o.format == "speculators" else ()
        return Eagle3Trainee(target, lr, o.levels, o.draft_vocab, o.decay, layers, o.targets)

    def save(self, training: Trained, folder: Path, about: dict[str, Any]) -> None:
        """In one of the published layouts, and the layers that it reads."""
        from specbench_ss.methods.eagle.checkpoint import config_of, published_name
        from specbench_ss.models.checkpoint import write_checkpoint

        trainee, levels = training.trainee, self.options.levels
        assert isinstance(trainee, Eagle3Trainee)
        if self.options.format == "speculators":
            config = config_of(trainee.module, trainee.config, trainee.layers, levels, training.target)
            write_checkpoint(folder, trainee.module, {**config, **about}, called=published_name)
        else:
            write_checkpoint(folder, trainee.module, {**trainee.config, **about})
