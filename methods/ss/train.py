"""`ssbench train ss`: streams in lossless and shared mode (EMNLP sec. 2.1, eq. 6).

Segment attention (appendix I), lossless mode: prompt positions have no streams. Anchors are processed in segments;
streams attend to earlier main keys and to streams of their own position. A segment is recomputed in the backward pass,
so only one is in memory.

The papers choose alpha_j "to normalise losses", which is less than 0.1 for a base with low loss. Untrained streams have
gradients many times the main stream's, so alpha_j can be warmed up (an extension).

Under eq. 3 a main state depends on its own streams, so every position that predicts an answer token has streams, as in
decoding. In a row of several answers all have streams, whereas decoding treats earlier answers as a prompt without
streams: a small difference (docs/design/speculative-streaming.md). Segment attention: the lower layers run once; the
MSA layers process one segment of positions at a time, main rows and streams, over the keys of all earlier main rows.
Recomputation keeps only main keys and values of other segments in memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from specbench_ss.engine.kv_cache import PrefixCache
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.fine_tuned import lora_parameters, save_lora, with_lora
from specbench_ss.methods.ss.config import StreamConfig
from specbench_ss.methods.ss.layers import (
    Layout,
    Streams,
    run_masked,
    segment_visibility,
    steps_ahead,
    stream_positions,
)
from specbench_ss.models.checkpoint import write_checkpoint
from specbench_ss.options import Bounded, option
from specbench_ss.training.batch import BaseStates, Batch, run_rows
from specbench_ss.training.losses import LossKind, LossWarmup, head_loss, head_sums, loss_option, mean_loss
from specbench_ss.training.masks import Documents, additive, draft_visibility
from specbench_ss.training.trainer import DrafterTrainer, checkpointing_option

SHARED_RANK = 32  # of the 2024 baseline
LOSSLESS_RANK = 8  # R_s, EMNLP sec. 2.1


@dataclass(frozen=True, slots=True)
class StreamsOptions(Bounded):
    """Options of `ssbench train ss`. -1: as in the papers."""

    owner: ClassVar[str] = "ss"
    mode: Literal["lossless", "shared"] = option(
        "lossless",
        "lossless: the base is frozen. shared: a LoRA of the base is trained with the streams.",
    )
    gamma: Annotated[int, Ge(1), Le(64)] = option(4, "Number of streams: tokens drafted after the next one.")
    n_msa_layers: int = option(4, "Number of top layers with streams (N_s).")
    adapter_rank: Annotated[int, Ge(-1), Le(1 << 14)] = option(
        -1,
        "Rank of the stream adapters, used in place of the MLP. 0: the MLP is used. -1: 8 in lossless mode, "
        "0 in shared mode.",
    )
    init_rank: Annotated[int, Ge(0), Le(1 << 14)] = option(
        0, "Rank of the map from main states to the first stream states. 0: the identity."
    )
    prune_rank: Annotated[int, Ge(1), Le(1 << 14)] = option(8, "Rank of the pruning map.")
    prune_layer: int = option(-1, "Layer before which the tree is pruned. -1: the first layer with streams.")
    lora_rank: Annotated[int, Ge(-1), Le(1 << 14)] = option(-1, "Rank of the LoRA in shared mode. -1: 32.")
    main_attends_streams: bool | None = option(
        None, "Let the main stream attend to its streams (eq. 3). Default: in shared mode only."
    )
    stream_init: Literal["embedding", "rotation"] = option(
        "embedding", "How streams are distinguished: by an embedding, or by an angle that rotates their values."
    )
    rotation_step: float = option(
        0.0, "With rotation: angle in radians from one stream to the next. 0: the largest possible."
    )
    keep_mlp: bool = option(
        False, "Use the layers' MLPs in addition to the stream adapters (an extension, not in the papers)."
    )
    root_rank: Annotated[int, Ge(0), Le(1 << 14)] = option(
        0,
        "Rank of the map that conditions streams on the newly accepted token (an extension, not in the "
        "papers). 0: unconditioned.",
    )
    parent_rank: Annotated[int, Ge(0), Le(1 << 14)] = option(
        0,
        "Rank of the map that conditions the children of a node on its token (an extension, not in the "
        "papers). 0: all nodes of a level have the same children.",
    )
    stream_position: Literal["ahead", "same"] = option(
        "ahead",
        "Position of a stream in attention. ahead: that of the token whose successor it predicts. same: "
        "that of its main row's token.",
    )
    loss: LossKind = loss_option("ce")
    alpha: Annotated[float, Gt(0)] = option(
        0.1, "Weight of each stream's loss in shared mode relative to the next token's."
    )
    alpha_ramp: Annotated[int, Ge(0)] = option(
        0,
        "Warm-up steps of alpha from 0 in shared mode, so that untrained streams do not distort the base. "
        "0: no warm-up.",
    )
    embedding_lr: Annotated[float, Gt(0), Lt(math.inf)] = option(5e-2, "Peak learning rate of the stream embeddings.")
    segment: Annotated[int, Ge(0)] = option(
        0, "Save memory: number of positions of a row with streams in memory at a time. 0: all."
    )
    gradient_checkpointing: bool = checkpointing_option()

    def check_together(self) -> None:
        """Raise UserError for options of the other mode."""
        if self.mode == "shared" and self.loss != "ce":
            raise UserError(f"ss: loss={self.loss} requires --mode lossless; in shared mode the base changes")
        if self.mode == "lossless" and self.alpha_ramp:
            raise UserError("ss: alpha_ramp requires --mode shared")
        if self.mode == "lossless" and (self.main_attends_streams or self.lora_rank > 0):
            raise UserError("ss: main_attends_streams and lora_rank require --mode shared")

    def shape(self) -> StreamConfig:
        """Return the configuration of the trained streams. Raise UserError if it is unsupported."""
        shared = self.mode == "shared"
        values = {f.name: getattr(self, f.name) for f in fields(StreamConfig)}
        if self.adapter_rank < 0:
            values["adapter_rank"] = 0 if shared else LOSSLESS_RANK
        if self.main_attends_streams is None:
            values["main_attends_streams"] = shared
        if self.lora_rank < 0 or not shared:
            values["lora_rank"] = SHARED_RANK if shared else 0
        return StreamConfig(**values)


class StreamTrainer(DrafterTrainer):
    """Base trainer of streams: P_j, the configured adapters, and the pruning map o_theta.

    segment: positions of a row with streams in memory at once; 0 = all (the naive form). prune_weight: of the pruning
    map's loss.
    """

    name = "ss"
    summary = "speculative streams: adapters in the frozen base, or LoRA and streams together (--mode shared)"
    method = "ss"
    Options = StreamsOptions
    prune_weight = 0.5

    def __init__(self, target: Target, config: StreamConfig, lr: float, embedding_lr: float, segment: int) -> None:
        self.target, self.shape, self.lr, self.name = target, config, lr, self.method
        target.require_layer_access(self.method)
        self.first_msa_layer, self.ahead = config.check_layers(target.n_layers), config.gamma
        self.prune_layer = self.first_msa_layer if config.prune_layer < 0 else config.prune_layer
        self.embedding_lr, self.segment = embedding_lr, segment
        self.config = {"streams": config.as_dict()}

    def stream_groups(self, streams: Streams, lr: float) -> list[dict[str, Any]]:
        """Return the parameter groups; P_j has its own, since it has the scale of the residual stream."""
        groups = [{"params": [p for n, p in streams.named_parameters() if n != "embedding"], "lr": lr}]
        if streams.config.stream_init == "embedding":
            groups.append({"params": [streams.embedding], "lr": self.embedding_lr})
        return groups

    def prune_loss(self, target: Target, streams: Streams, low: Tensor, batch: Batch) -> Tensor:
        """Return the weighted next-token loss of the early exit (sec. 2.3).

        low: the anchors' states [B, A, h] at the pruning layer.
        """
        logits = target.logits(target.family.norm(streams.early_exit(low.detach())))[..., None, :]
        labels, whole = (b.anchors.labels[..., :1] for b in (batch, batch.global_batch))
        return self.prune_weight * head_loss(logits, labels, [1.0], whole)[0]


@torch.no_grad()
def start_embedding(module: Streams, low: Tensor) -> None:
    """Initialize P_j at random with half the scale of the residual stream low [B, T, h], so that they differ.

    The scale is the median over positions: the first position is 100 times larger in many models (attention sink).
    """
    if module.config.stream_init == "embedding":
        scale = 0.5 * low.float().pow(2).mean(-1).sqrt().median()
        p = module.embedding
        p.copy_(p / p.pow(2).mean(-1, keepdim=True).sqrt() * scale)


class StreamsTrainer(StreamTrainer):
    """Trainer of lossless streams: P_j, stream adapters and, with its own next-token loss, the pruning map o_theta.

    Segments consist of anchors. loss_kind: ce, as published, or a loss of the base's distribution.
    """

    module: Streams

    def __init__(
        self,
        target: Target,
        config: StreamConfig,
        lr: float = 5e-4,
        embedding_lr: float = 5e-2,
        segment: int = 0,
        loss_kind: LossKind = "ce",
    ) -> None:
        super().__init__(target, config, lr, embedding_lr, segment)
        self.aux_hidden_state_layers = tuple(sorted({self.first_msa_layer, self.prune_layer}))
        self.kv_from, self.loss_kind = self.first_msa_layer, loss_kind
        self.module = Streams(config, target.hidden_size)

    @classmethod
    def build(cls, target: Target, options: StreamsOptions, lr: float) -> DrafterTrainer:
        """Return the trainer of the mode. --gradient-checkpointing without --segment makes a row one segment."""
        o, shape = options, options.shape()
        segment = o.segment or (target.context_length if o.gradient_checkpointing else 0)
        if o.mode == "lossless":
            return cls(target, shape, lr, o.embedding_lr, segment, loss_kind=o.loss)
        checkpointing = o.gradient_checkpointing
        return SharedTrainer(
            target, shape, lr, lr, o.embedding_lr, segment, o.alpha, recompute=checkpointing, ramp=o.alpha_ramp
        )

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups of P_j and the rest."""
        return self.stream_groups(self.module, self.lr)

    def prepare(self, states: BaseStates, batch: Batch) -> None:
        """Initialize P_j at the scale of the residual stream."""
        start_embedding(self.module, states.hidden_states[self.first_msa_layer])

    def loss(self, states: BaseStates, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return stream losses over all segments, plus the pruning map's next-token loss."""
        g, anchors, labels = self.ahead, batch.anchors, self.labels(batch)
        step = self.segment or labels.shape[1]
        pieces = [slice(i, i + step) for i in range(0, labels.shape[1], step)]
        conditioning = self.module.mask_parents(anchors.labels[..., :g], anchors.at)
        parts = [
            self._segment(states, anchors.at[:, piece], labels[:, piece], conditioning[:, piece]) for piece in pieces
        ]
        sums = torch.stack([a for a, _ in parts]).sum(0), torch.stack([b for _, b in parts]).sum(0)
        total, right = mean_loss(sums, self.labels(batch.global_batch), [1.0] * g)
        low = states.at(states.hidden_states[self.prune_layer], anchors)
        return total + self.prune_loss(self.target, self.module, low, batch), right

    def _segment(self, states: BaseStates, at: Tensor, labels: Tensor, conditioning: Tensor) -> tuple[Tensor, Tensor]:
        """Return sums of a segment's loss and correct predictions; the backward pass recomputes its streams."""

        def run(at: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.stream_logits(states, at, conditioning)
            return head_sums(logits, labels, self._teacher(states, at), self.loss_kind)

        if not self.segment:
            return run(at, labels)
        sums: tuple[Tensor, Tensor] = checkpoint(run, at, labels, use_reentrant=False)
        return sums

    def _teacher(self, states: BaseStates, at: Tensor) -> Tensor | None:
        """Return the base's logits [B, a, gamma, V] for the streams' tokens unless loss=ce."""
        if self.loss_kind == "ce":
            return None
        with torch.no_grad():
            return self.target.logits(states.ahead(at, self.ahead))

    def stream_logits(self, states: BaseStates, at: Tensor, conditioning: Tensor | None = None) -> Tensor:
        """Run streams at positions `at` [B, a] of one segment -> logits [B, a, gamma, V].

        conditioning int64 [B, a, gamma]: the tokens after each position, for conditioned streams.
        """
        target, g = self.target, self.ahead
        low = states.hidden_states[self.first_msa_layer]
        picked = low.gather(1, at[..., None].expand(-1, -1, low.shape[-1]))
        x = self.module.insert(picked, g).to(low.dtype)  # [B, a*gamma, h]
        main_positions = at if states.documents is None else states.documents.position_ids.gather(1, at)
        positions = stream_positions(target, main_positions, g, self.shape.stream_position)
        masks = self._masks(at, low.shape[1], next(iter(states.kv.values()))[0].dtype, states.documents)
        cache, rotary = PrefixCache(states.kv), target.rotary(positions)
        x = run_masked(target, self.module, x, Layout(0, g), cache, masks, rotary)
        x = self.module.condition_on_tokens(target, target.family.norm(x).unflatten(1, (at.shape[1], g)), conditioning)
        logits: Tensor = target.logits(x)
        return logits

    def _masks(self, at: Tensor, t: int, dtype: torch.dtype, documents: Documents | None) -> list[Tensor]:
        """Return the masks [B, 1, a*gamma, T + a*gamma] of the MSA layers, one for each sliding window."""
        windows = [block.window for block in self.target.family.blocks[self.first_msa_layer :]]
        steps = steps_ahead(self.ahead, self.shape.stream_position, at.device)
        masks = {w: additive(draft_visibility(at, steps, t, documents, w), dtype) for w in set(windows)}
        return [masks[window] for window in windows]


KeysAndValues = list[tuple[Tensor, Tensor]]  # of main rows, one entry per MSA layer, each [B, kv_heads, t, d]


class SharedTrainer(StreamTrainer):
    """Trainer of shared mode: LoRA in every layer, P_j, the configured adapters and the pruning map.

    It runs its own copy of the base and reads no states of the frozen one. alpha_j 0 trains only the LoRA on next
    tokens, as a fine-tuning baseline. recompute: recompute the layers below the streams in the backward pass. ramp:
    warm-up steps of alpha_j; 0 = none.
    """

    method = "ss-shared"
    needs_base = False
    adapts_base = True

    def __init__(
        self,
        target: Target,
        config: StreamConfig,
        lr: float = 5e-4,
        stream_lr: float = 5e-4,
        embedding_lr: float = 5e-2,
        segment: int = 0,
        alpha_j: float = 0.1,
        recompute: bool = False,
        ramp: int = 0,
    ) -> None:
        super().__init__(target, config, lr, embedding_lr, segment)
        self.stream_lr, self.alpha_j, self.recompute = stream_lr, alpha_j, recompute
        self.tuned = with_lora(target, config.lora_rank)
        if any(block.window for block in self.tuned.family.blocks):
            raise UserError(f"{self.name}: shared mode cannot be trained on layers with a sliding window")
        self.streams = Streams(config, target.hidden_size)
        self.lora, self.ramp = lora_parameters(self.tuned.model), LossWarmup(ramp)
        self.module = nn.ModuleList([self.streams, nn.ParameterList(self.lora), *([self.ramp] if ramp else [])])

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups of the LoRA, P_j and the rest."""
        return [{"params": self.lora, "lr": self.lr}, *self.stream_groups(self.streams, self.stream_lr)]

    @torch.no_grad()
    def prepare(self, states: BaseStates, batch: Batch) -> None:
        """Initialize P_j at the scale of the residual stream."""
        start_embedding(self.streams, self._lower(batch.ids, batch.documents)[0])

    def loss(self, states: BaseStates, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return eq. 6 over all segments, plus the pruning map's next-token loss."""
        g = self.shape.gamma if self.alpha_j else 0
        low, at_pruning = self._lower(batch.ids, batch.documents)
        labels = batch.labels[..., : 1 + g]
        sums: list[tuple[Tensor, Tensor]] = []
        past: list[KeysAndValues] = []  # one entry per earlier segment
        step = self.segment or labels.shape[1]
        for start in range(0, labels.shape[1], step):
            piece = slice(start, start + step)
            segment_sums, kv = self._segment(low[:, piece], labels[:, piece], start, past, batch.documents)
            sums.append(segment_sums)
            past.append(kv)
        totals = torch.stack([a for a, _ in sums]).sum(0), torch.stack([b for _, b in sums]).sum(0)
        weights = [1.0] + [self.alpha_j * self.ramp()] * g
        total, right = mean_loss(totals, batch.global_batch.labels[..., : 1 + g], weights)
        pruned = states.at(at_pruning, batch.anchors)
        loss = total + self.prune_loss(self.tuned, self.streams, pruned, batch)
        return loss, right[1:] if g else right

    def count_positions(self, batch: Batch) -> int:
        """Return the number of positions with streams: those that predict a token of an answer."""
        return int((batch.labels[..., 0] != -100).sum())

    def _lower(self, ids: Tensor, documents: Documents | None = None) -> tuple[Tensor, Tensor]:
        """Return states [B, T, h] at layer N - N_s and at the pruning layer, with gradients for the LoRA."""
        recompute = self.recompute and torch.is_grad_enabled()
        x, aux_states = run_rows(self.tuned, ids, self.first_msa_layer, None, documents, (self.prune_layer,), recompute)
        return x, aux_states.get(self.prune_layer, x)

    def _segment(
        self, low: Tensor, labels: Tensor, start: int, past: list[KeysAndValues], documents: Documents | None
    ) -> tuple[tuple[Tensor, Tensor], KeysAndValues]:
        """Run a segment through the MSA layers; return sums of loss and correct predictions, and keys and values.

        past: keys and values of earlier segments, concatenated only during the computation.
        """
        carriers, real = carriers_of(labels[..., 0] != -100)  # [B, c]
        carrier_labels = labels.gather(1, carriers[..., None].expand(-1, -1, labels.shape[-1]))
        carrier_labels = carrier_labels.masked_fill(~real[..., None], -100)

        def run(low: Tensor, *flat: Tensor) -> tuple[Tensor, ...]:
            n = 2 * self.shape.n_msa_layers  # keys and values of every layer, segment after segment
            joined = [torch.cat(flat[i::n], 2) for i in range(n)] if flat else []
            before = list(zip(joined[::2], joined[1::2], strict=True))
            gamma = labels.shape[-1] - 1
            conditioning = self.streams.mask_parents(carrier_labels[..., :-1], start + carriers)
            logits, after = self.upper(low, start, carriers, real, before, gamma, documents, conditioning)
            # clones: views would keep the keys of the streams and of earlier segments in memory
            return (*head_sums(logits, carrier_labels), *(x[:, :, start:].clone() for pair in after for x in pair))

        flat = [x for segment in past for pair in segment for x in pair]
        out = checkpoint(run, low, *flat, use_reentrant=False) if self.segment else run(low, *flat)
        return (out[0], out[1]), list(zip(out[2::2], out[3::2], strict=True))

    def upper(
        self,
        low: Tensor,
        start: int,
        carriers: Tensor,
        real: Tensor,
        past: KeysAndValues,
        gamma: int,
        documents: Documents | None = None,
        conditioning: Tensor | None = None,
    ) -> tuple[Tensor, KeysAndValues]:
        """Run main rows low [B, L, h] at positions start.. and streams of the carriers [B, c] through the MSA layers.

        conditioning int64 [B, c, gamma]: the tokens after each carrier, for conditioned streams.
        Return logits [B, c, 1 + gamma, V] of main rows and streams, and the keys and values of all main rows so far.
        """
        target, length = self.tuned, low.shape[1]
        b, c = carriers.shape
        picked = carriers[..., None].expand(-1, -1, low.shape[-1])
        positions = start + torch.arange(length, device=low.device).expand(b, -1)
        if documents is not None:
            positions = documents.position_ids[:, start : start + length]
        rows = low
        if gamma:
            rows = torch.cat((low, self.streams.insert(low.gather(1, picked), gamma).to(low.dtype)), 1)
            ahead = stream_positions(target, positions.gather(1, carriers), gamma, self.shape.stream_position)
            positions = torch.cat((positions, ahead), 1)
        attends = self.shape.main_attends_streams
        visible = segment_visibility(length, start, carriers, real, gamma, attends, documents)
        mask = additive(visible, low.dtype)
        cache = PrefixCache(
            dict(enumerate(past or [None] * self.shape.n_msa_layers, start=self.first_msa_layer)), length
        )
        masks = [mask] * self.shape.n_msa_layers
        x = run_masked(
            target, self.streams, rows, Layout(length, max(gamma, 1)), cache, masks, target.rotary(positions)
        )
        main, streams = x[:, :length].gather(1, picked)[:, :, None], x[:, length:].unflatten(1, (c, gamma))
        final = target.family.norm(torch.cat((main, streams), 2))
        if gamma:
            final = torch.cat(
                (final[:, :, :1], self.streams.condition_on_tokens(target, final[:, :, 1:], conditioning)), 2
            )
        return target.logits(final), [cache.kept[layer] for layer in range(self.first_msa_layer, target.n_layers)]

    def save(self, folder: Path, about: dict[str, Any]) -> None:
        """Write the streams, and the LoRA in peft's format."""
        write_checkpoint(folder, self.streams, {**about, **self.config})
        save_lora(folder, self.tuned)


def carriers_of(carry: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions set in `carry` bool [B, L], int64 [B, c], padded with others; and a mask of real ones."""
    count = int(carry.sum(1).max())
    order = carry.int().argsort(dim=1, descending=True, stable=True)[:, : max(count, 1)]
    return order, carry.gather(1, order)
