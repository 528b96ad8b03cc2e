"""Trainers of DFlash, DSpark and P-EAGLE, whose drafters compute all draft positions in one pass.

DFlash (sec. 4.2) trains on blocks at random anchors of the answers. The block of anchor t has its root at x_{t+1}; it
attends to the features up to position t and to its own positions. Position k after the root predicts x_{t+1+k}.
DFlash2's selector is trained with it, after the text's token.

DSpark trains on the same blocks, whose root drafts too; the token before each position, which its heads read, is the
text's.

P-EAGLE (sec. 3) trains all depths in one pass. Slot t reads the feature of position t and the token x_{t+1}, and
predicts x_{t+2}. Depth d of anchor t reads the mask state and mask token and predicts x_{t+2+d}; it attends to the true
slots up to t and to its own anchor's depths up to d.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt, Le
from torch import Tensor

from specbench_ss.engine.kv_cache import PrefixCache
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.draft_vocabulary import token_problem
from specbench_ss.methods._shared.feature_trainer import FeatureTrainer
from specbench_ss.methods.block_drafters import dflash, dspark, peagle
from specbench_ss.methods.block_drafters.correction import MarkovKind
from specbench_ss.methods.block_drafters.dflash import MOST_BLOCK
from specbench_ss.methods.block_drafters.dspark import BLOCK
from specbench_ss.methods.block_drafters.peagle import DEPTHS, MOST_DEPTHS
from specbench_ss.models.checkpoint import write_checkpoint
from specbench_ss.options import Bounded, option
from specbench_ss.training.batch import BaseStates, Batch
from specbench_ss.training.losses import (
    LOSS_HELP,
    LossKind,
    checkpoint_if_large,
    distribution_losses,
    loss_option,
    mean_loss,
)
from specbench_ss.training.masks import group_visibility, text_visibility

BLOCKS_PER_PASS = 32  # of a row: their positions are keys of the same pass, hidden from the other blocks


@dataclass(frozen=True, slots=True)
class BlockTraining(Bounded):
    """Options of the trainers."""

    loss: LossKind = loss_option("kl")
    mask_token_id: Annotated[int, Ge(-1)] = option(
        -1,
        "Mask token at draft positions. -1: the tokenizer's mask token, else the last token with a nonzero embedding.",
    )


class BlockTrainer(FeatureTrainer):
    """Trainer of a block drafter; its LM head and embedding stay those of the target."""

    checkpoints: Any  # the module with `config_of` and `speculators_config_of`

    def mask_token(self, target: Target) -> int | None:
        """Return the mask token of the options. Raise UserError if the target has no such token."""
        target.require_hidden_eq_embedding(self.name)
        mask: int = self.options.mask_token_id
        if mask < 0:
            return None
        if problem := token_problem(mask, target):
            raise UserError(f"{self.name}: mask_token_id is {mask}, {problem}")
        return mask

    @classmethod
    def build(cls, target: Target, options: Any, lr: float) -> Self:
        trainer = cls(target, options, lr)
        trainer.file_config()  # before the first step
        return trainer

    def file_config(self) -> dict[str, Any]:
        """Return the config.json of the layout to write. Raise UserError if it cannot describe the drafter."""
        speculators = self.options.format == "speculators"
        config_of = self.checkpoints.speculators_config_of if speculators else self.checkpoints.config_of
        try:
            config: dict[str, Any] = config_of(self.module, self.target)
        except UserError as error:
            if not speculators:
                raise
            raise UserError(f"{error}; use --format {self.Options().format}") from None
        return config

    def save(self, folder: Path, about: dict[str, Any]) -> None:
        """Write the folder in one of the published layouts."""
        write_checkpoint(folder, self.module, {**self.file_config(), **about})


@dataclass(frozen=True, slots=True)
class DFlashTraining(BlockTraining):
    """Options of `ssbench train dflash`."""

    owner: ClassVar[str] = "dflash"
    layers: Annotated[int, Ge(1), Le(128)] = option(5, "Number of decoder layers of the drafter.")
    block_size: Annotated[int, Ge(2), Le(MOST_BLOCK)] = option(
        8, "Positions of a block: the root and one per drafted token."
    )
    decay: Annotated[float, Gt(0)] = option(4.0, "The k-th drafted token's loss has the weight exp(-(k - 1) / decay).")
    draft_vocab: Annotated[int, Ge(0), Le(1 << 24)] = option(
        0, "Size of the draft vocabulary (the most frequent tokens of the text). 0: all tokens."
    )
    sample_from_anchor: bool = option(
        False, "Let the root's position draft a token too. vLLM does not serve such a drafter."
    )
    conv_kernel_size: Annotated[int, Ge(0), Le(1024)] = option(
        0, "Positions read by the convolutions around attention and MLP (DFlash2: 2). 0: no convolutions."
    )
    conv_group_size: Annotated[int, Ge(1), Le(1 << 14)] = option(
        16, "Channels that share a kernel of the convolutions."
    )
    selector_rank: Annotated[int, Ge(0), Le(1 << 14)] = option(
        0, "Rank of the selector among each position's best tokens (DFlash2: 256). 0: no selector."
    )
    selector_top_k: Annotated[int, Ge(1), Le(1 << 14)] = option(16, "Tokens that the selector chooses from.")
    format: Literal["z-lab", "speculators"] = option(
        "z-lab", "Layout of the folder: z-lab's, or speculators' (for vLLM)."
    )

    @property
    def parts(self) -> dict[str, int]:
        """Return the fields of `dflash.Shape` for convolutions and a selector."""
        taps, rank = self.conv_kernel_size, self.selector_rank
        convolutions = {"conv_kernel_size": taps, "conv_group_size": self.conv_group_size} if taps else {}
        return convolutions | ({"selector_rank": rank, "selector_top_k": self.selector_top_k} if rank else {})


class DFlashTrainer(BlockTrainer):
    """Trainer of DFlash's drafter; the k-th drafted token has the loss weight exp(-(k - 1) / decay) (sec. 4.2).

    With a selector, its cross-entropy is added, with the same weights.
    """

    name = "dflash"
    summary = "DFlash's drafter of whole blocks on the frozen base"
    method = "dflash"
    Options: ClassVar[type[Any]] = DFlashTraining
    checkpoints = dflash
    lr = 6e-4

    def __init__(
        self, target: Target, options: Any = None, lr: float | None = None, drafter: dflash.Drafter | None = None
    ) -> None:
        super().__init__(target, options, lr)
        if drafter is None:
            o, mask = self.options, self.mask_token(target)
            shape = o.layers, o.block_size, o.draft_vocab, mask, o.sample_from_anchor
            try:
                drafter = dflash.new_drafter(target, *shape, **o.parts)
            except UserError as error:
                raise UserError(f"{self.name}: {error}") from None
        self.use(drafter, drafter.shape.layers, drafter.config, drafter.shape.block - drafter.shape.first)
        self.freeze_target_parts()

    def freeze_target_parts(self) -> None:
        """Keep the LM head and the embedding, which are the target's or a part of it."""
        for part in (self.module.lm_head, self.module.embed_tokens):
            if part is not None:
                part.requires_grad_(False)

    def blocks(self, states: BaseStates, batch: Batch) -> Tensor:
        """Return normed states [B, A, drafts, h] of the drafting positions of every anchor's block."""
        drafter, positions = self.module, batch.positions
        context = drafter.fuse(self.features(states))
        keys, values = drafter.inject(context, self.rotary(positions, context.dtype))
        kv = dict(enumerate(zip(keys, values, strict=True)))
        parts = batch.anchors.at.split(BLOCKS_PER_PASS, 1)
        return torch.cat([self._blocks_at(batch, at, positions.gather(1, at), PrefixCache(kv)) for at in parts], 1)

    def _blocks_at(self, batch: Batch, at: Tensor, positions: Tensor, cache: PrefixCache) -> Tensor:
        """Return the same for anchors `at` [B, A] at these positions of their texts; cache: the row's context."""
        drafter, (b, a), size = self.module, at.shape, self.module.shape.block
        tokens = torch.full((b, a, size), drafter.shape.mask_token, device=at.device)
        tokens[..., 0] = batch.ids.gather(1, (at + 1).clamp_max(batch.ids.shape[1] - 1))
        ahead = positions[..., None] + 1 + torch.arange(size, device=at.device)  # [B, A, size]
        embedded = drafter.block_inputs(tokens.flatten(1), size, self.target)
        rotary = self.rotary(ahead.flatten(1), embedded.dtype)
        out = drafter(embedded, cache, self._masks(batch, at), rotary)
        blocks: Tensor = out.unflatten(1, (a, size))
        return blocks[:, :, drafter.shape.first :]

    def _masks(self, batch: Batch, at: Tensor) -> list[Tensor | None]:
        """Return masks [B, 1, A * size, T + A * size], one per layer: context before the root, and the block."""
        shape, (b, t) = self.module.shape, batch.ids.shape
        keys, text, masks = torch.arange(t, device=at.device), text_visibility(at, t, batch.documents)[:, :, None], {}
        for layer_mask in set(shape.layer_masks):
            context = layer_mask.context(at + 1, shape.block, keys) & text  # [B, A, size, T]
            block = group_visibility(layer_mask.block(shape.block, at.device), at.shape[1])
            masks[layer_mask] = torch.cat((context.flatten(1, 2), block.expand(b, -1, -1)), -1)[:, None]
        return [masks[layer_mask] for layer_mask in shape.layer_masks]

    def loss(self, states: BaseStates, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of the positions' losses, each a mean over the anchors with a token there."""
        labels, out = self.labels(batch), self.blocks(states, batch)
        sums = [self.sums(states, batch, out[:, :, k], labels[..., k], k) for k in range(self.ahead)]
        total = torch.stack([a for a, _ in sums]), torch.stack([b for _, b in sums])
        weights = [math.exp(-k / self.options.decay) for k in range(self.ahead)]
        return mean_loss(total, self.labels(batch.global_batch), weights)

    def sums(self, states: BaseStates, batch: Batch, out: Tensor, labels: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return sums of the losses and of correct predictions of x_{t+2+k}, by the selector if there is one.

        out: the drafter's states [B, A, h]. labels: int64 [B, A].
        """
        if self.module.candidate_selector is None:
            return super().sums(states, batch, out, labels, k)
        labelled = labels != -100
        rows, at = labelled.nonzero()[:, 0], (batch.anchors.at + 1 + k)[labelled]
        inputs = out[labelled], states.final[rows, at], batch.ids[rows, at], labels[labelled]
        return checkpoint_if_large(self._selector_sums, self.ahead * len(rows) * self.target.vocab_size, *inputs)

    def _selector_sums(self, states: Tensor, true: Tensor, before: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return sums over n positions of the block's and the selector's loss, and of correct predictions.

        Args:
            states: [n, h], the drafter's.
            true: [n, h], the target's at the same tokens.
            before: int64 [n], the text's tokens before these.
            labels: int64 [n], the text's tokens.
        """
        logits = self.module.logits(states, self.target)
        with torch.no_grad():
            teacher = self.target.logits(true)
        p = None if self.options.loss == "ce" else teacher.softmax(-1, dtype=torch.float32)
        losses = self.token_losses(self.options.loss, logits.log_softmax(-1, dtype=torch.float32), labels, p)
        selected, drafted = self.module.candidate_selector.loss(logits, states, before, teacher.argmax(-1))
        return (losses + selected).sum(), (drafted == labels).sum()


@dataclass(frozen=True, slots=True)
class DSparkTraining(BlockTraining):
    """Options of `ssbench train dspark`."""

    owner: ClassVar[str] = "dspark"
    loss: Literal["published", LossKind] = option(  # type: ignore[assignment]  # one more than others have
        "published", f"published: 0.1 ce + 0.9 of the L1 distance, which is twice tv. {LOSS_HELP}"
    )
    layers: Annotated[int, Ge(1), Le(128)] = option(5, "Number of decoder layers of the drafter.")
    block_size: Annotated[int, Ge(1), Le(MOST_BLOCK)] = option(BLOCK, "Positions of a block, each drafts a token.")
    decay: Annotated[float, Gt(0)] = option(4.0, "The k-th drafted token's loss has the weight exp(-(k - 1) / decay).")
    markov_rank: Annotated[int, Ge(0), Le(1 << 14)] = option(
        256, "Rank of the Markov head. 0: none, DFlash from the root on."
    )
    markov_kind: MarkovKind = option(
        "vanilla", "Kind of the Markov head; vLLM serves vanilla. gated and rnn also read the block's states."
    )
    confidence: Literal["on", "off"] = option(
        "on", "Train a confidence head, which verified_length=measured and confidence_threshold need."
    )
    draft_vocab: Annotated[int, Ge(0), Le(1 << 24)] = option(
        0, "Size of the draft vocabulary (the most frequent tokens of the text). 0: all tokens."
    )


class DSparkTrainer(DFlashTrainer):
    """Trainer of DSpark's drafter: its loss is a mean over all positions, each with the weight of its place."""

    name = "dspark"
    summary = "DSpark's drafter of whole blocks with a Markov head on the frozen base"
    method = "dspark"
    Options = DSparkTraining

    def __init__(
        self, target: Target, options: Any = None, lr: float | None = None, drafter: dspark.Drafter | None = None
    ) -> None:
        BlockTrainer.__init__(self, target, options, lr)
        o, mask = self.options, self.mask_token(target)
        if o.markov_kind != "vanilla" and not o.markov_rank:
            raise UserError(f"dspark: markov_kind={o.markov_kind} needs a markov_rank above 0")
        if drafter is None:
            heads: dict[str, Any] = {
                "rank": o.markov_rank, "kind": o.markov_kind, "confidence": o.confidence == "on"
            }  # fmt: skip
            drafter = dspark.new_drafter(target, o.layers, o.block_size, o.draft_vocab, mask, **heads)
        self.use(drafter, drafter.shape.layers, drafter.config, drafter.shape.block)
        self.freeze_target_parts()

    def file_config(self) -> dict[str, Any]:
        return dspark.speculators_config_of(self.module, self.target)

    def loss(self, states: BaseStates, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the weighted mean of the losses of all positions, and the accuracies of each [block]."""
        labels, whole = self.labels(batch), self.labels(batch.global_batch)
        used = labels[..., 0] != -100  # [B, A]
        rows, ahead = used.nonzero()[:, 0, None], torch.arange(1, self.ahead + 2, device=used.device)
        at = (batch.anchors.at[used][:, None] + ahead).clamp_max(batch.ids.shape[1] - 1)  # root and drafted tokens
        before, true = batch.ids[rows, at[:, :-1]], states.final[rows, at[:, :-1]]
        out, labels = self.blocks(states, batch)[used], labels[used]
        memory, sums, hits = self.module.correction.start(out[:, 0]), [], []
        for k in range(self.ahead):
            inputs = (out[:, k], true[:, k], before[:, k], labels[:, k].contiguous(), memory)
            total, right, memory = checkpoint_if_large(
                self._position, self.ahead * len(out) * self.target.vocab_size, *inputs
            )
            sums.append(total)
            hits.append(right)
        weights = torch.exp(torch.arange(self.ahead, device=at.device) / -self.options.decay)
        count = (whole != -100).sum((0, 1))
        loss = (torch.stack(sums) * weights).sum() / ((weights * count).sum() + 1e-6)
        return loss, torch.stack(hits) / count.clamp_min(1)

    def _position(
        self, states: Tensor, true: Tensor, before: Tensor, labels: Tensor, memory: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return sums of losses and of correct predictions at one position of n blocks, and the correction's state.

        Args:
            states: [n, h], the drafter's.
            true: [n, h], the target's, which its distribution of the drafted token is computed from.
            before: int64 [n], the text's token before the drafted one.
            labels: int64 [n], the text's token; -100 = no loss.
            memory: [n, s], the correction's state.
        """
        drafter, p = self.module, self.base_probs(true, "tv")
        logits, memory = drafter.correction.step(drafter.logits(states, self.target), states, before, memory)
        log_q = logits.log_softmax(-1, dtype=torch.float32)
        losses = self.token_losses(self.options.loss, log_q, labels, p)
        if drafter.confidence_head is not None:
            alpha = 1 - distribution_losses(log_q.detach(), p, "tv")
            estimate = drafter.confidence(states, before)
            losses = losses + F.binary_cross_entropy_with_logits(estimate, alpha.clamp(0, 1), reduction="none")
        return (losses * (labels != -100)).sum(), self.correct(log_q, labels), memory

    def token_losses(self, kind: Any, log_q: Tensor, labels: Tensor, p: Tensor | None) -> Tensor:
        if kind != "published":
            return super().token_losses(kind, log_q, labels, p)
        return 0.1 * super().token_losses("ce", log_q, labels, p) + 0.9 * 2 * super().token_losses(
            "tv", log_q, labels, p
        )


@dataclass(frozen=True, slots=True)
class PEagleTraining(BlockTraining):
    """Options of `ssbench train peagle`."""

    owner: ClassVar[str] = "peagle"
    layers: Annotated[int, Ge(1), Le(128)] = option(1, "Number of decoder layers of the drafter.")
    depths: Annotated[int, Ge(1), Le(MOST_DEPTHS)] = option(DEPTHS, "Number of tokens drafted in one pass.")
    keep: Annotated[float, Gt(0), Le(1)] = option(0.7, "Depth d is trained at max(keep^d, keep_least) of the anchors.")
    keep_least: Annotated[float, Gt(0), Le(1)] = option(0.2, "Minimum fraction of anchors at which a depth is trained.")
    draft_vocab: Annotated[int, Ge(0), Le(1 << 24)] = option(
        32000, "Size of the draft vocabulary (the most frequent tokens of the text). 0: all tokens."
    )
    embedding: Literal["own", "target"] = option(
        "own", "own: a trained embedding in the checkpoint, as published. target: the base's, unchanged."
    )
    format: Literal["eagle3", "speculators"] = option(
        "eagle3", "Layout of the folder: EAGLE-3's, or speculators' (for vLLM)."
    )


class PEagleTrainer(BlockTrainer):
    """Trainer of P-EAGLE's drafter; depth d is trained at max(keep^d, keep_least) of the anchors."""

    name = "peagle"
    summary = "P-EAGLE's drafter of all depths at once on the frozen base"
    method = "peagle"
    Options = PEagleTraining
    checkpoints = peagle
    lr = 3e-4

    def __init__(
        self, target: Target, options: Any = None, lr: float | None = None, drafter: peagle.Drafter | None = None
    ) -> None:
        super().__init__(target, options, lr)
        o = self.options
        if drafter is None:
            mask, own_embedding = self.mask_token(target), o.embedding == "own"
            drafter = peagle.new_drafter(target, o.depths, o.layers, o.draft_vocab, mask, own_embedding)
        self.use(drafter, drafter.shape.layers, drafter.config, drafter.shape.depths)
        self.shares = [max(o.keep**d, o.keep_least) for d in range(self.ahead)]
        assert drafter.lm_head is not None
        drafter.lm_head.requires_grad_(False)  # the target's, or a part of it

    def states(self, states: BaseStates, batch: Batch) -> list[Tensor]:
        """Return normed states [B, n_d, h] of every depth d, at the first n_d anchors of each row."""
        drafter, at, t = self.module, batch.anchors.at, batch.ids.shape[1]
        counts = [math.ceil(share * at.shape[1]) for share in self.shares]
        deep = torch.tensor(counts[1:], dtype=torch.long, device=at.device)
        depth = torch.arange(1, len(counts), device=at.device).repeat_interleave(deep)  # [R]
        anchor = torch.cat([at[:, :0], *(at[:, :n] for n in counts[1:])], 1)  # [B, R]
        fused = drafter.fuse(self.features(states))  # [B, T, h]
        mask_states = drafter.mask_state().expand(len(at), len(depth), -1)
        following = torch.cat((batch.ids[:, 1:], batch.ids[:, -1:]), 1)
        tokens = torch.cat((following, torch.full_like(anchor, drafter.shape.mask_token)), 1)
        positions = torch.cat((batch.positions, batch.positions.gather(1, anchor) + depth), 1)
        masks = self._masks(batch, anchor, depth)
        embedded = drafter.embed(tokens, self.target)
        out = drafter(embedded, torch.cat((fused, mask_states), 1), None, masks, self.rotary(positions, fused.dtype))
        true, *others = out.split((t, *counts[1:]), 1)
        return [true.gather(1, at[..., None].expand(-1, -1, out.shape[-1])), *others]

    def _masks(self, batch: Batch, anchor: Tensor, depth: Tensor) -> list[Tensor]:
        """Return masks [B, 1, T + R, T + R], one per layer: slots up to the anchor, and earlier depths."""
        b, t = batch.ids.shape
        at = torch.cat((torch.arange(t, device=anchor.device).expand(b, -1), anchor), 1)  # [B, T + R]
        deep = torch.cat((depth.new_zeros(t), depth))
        same_anchor = (at[:, :, None] == anchor[:, None]) & (deep[:, None] >= depth)  # [B, T + R, R]
        masks: dict[int | None, Tensor] = {}
        for window in set(self.module.shape.windows):
            text = text_visibility(at, t, batch.documents, window, deep)
            masks[window] = torch.cat((text, same_anchor), -1)[:, None]
        return [masks[window] for window in self.module.shape.windows]

    def labels(self, batch: Batch) -> Tensor:
        """Return x_{t+2+d}, int64 [B, A, depths]; -100 after the end of the answer and for dropped depths.

        Anchors are in random order with unusable ones last, so the first ones are a random choice.
        """
        labels = super().labels(batch)
        good = (labels[..., :1] != -100).sum(1, keepdim=True)  # [B, 1, 1]
        rank = torch.arange(labels.shape[1], device=labels.device)[:, None]
        n_trained = (good * labels.new_tensor(self.shares, dtype=torch.float64)).ceil()  # [B, 1, depths]
        return labels.masked_fill(rank >= n_trained, -100)

    def loss(self, states: BaseStates, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the mean over all trained positions of all depths."""
        labels, outs = self.labels(batch), self.states(states, batch)
        sums = [self.sums(states, batch, out, labels[:, : out.shape[1], d], d) for d, out in enumerate(outs)]
        count = (self.labels(batch.global_batch) != -100).sum((0, 1))  # [depths]
        right = torch.stack([hits for _, hits in sums]) / count.clamp_min(1)
        return torch.stack([loss for loss, _ in sums]).sum() / count.sum().clamp_min(1), right
