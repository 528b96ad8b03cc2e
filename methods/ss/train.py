"""`ssbench train ss`: streams of the lossless and of the shared mode (ACL sec. 2.1, eq. 6).

Segment attention (appendix I): prompt positions carry no streams; anchors are taken in segments, the streams of a
segment see the main keys before them and their own position's streams, and only one segment is alive at a time: each
is computed again in the backward pass.

The papers choose alpha_j "to normalise losses", which on a base that is sure of its text is less than 0.1. At first
streams know nothing and their gradients are many times the main stream's: alpha_j can rise from nothing (our
addition).

Under eq. 3 a main state depends on its own streams, so every position that predicts an answer token carries streams,
as in decoding. Of several answers in a row all do, where decoding a later turn has the earlier ones as prompt,
without streams: a small difference (docs/design/speculative-streaming.md). Segment attention (ACL appendix I): the
lower layers run once; the MSA layers take a segment of positions at a time, main rows and streams together, over the
keys of all main rows before; a segment is computed again in the backward pass, so that only one segment's streams are
alive, and of the others their main keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Gt
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
    own_streams,
    run_masked,
    segment_visibility,
    steps_ahead,
    stream_positions,
)
from specbench_ss.models.checkpoint import write_checkpoint
from specbench_ss.options import Bounded, option
from specbench_ss.training.batch import BaseStates, Batch, Documents, additive, run_rows
from specbench_ss.training.losses import LossKind, LossWarmup, head_loss, head_sums, loss_option, mean_loss
from specbench_ss.training.trainer import DrafterTrainer

SHARED_RANK = 32  # of the 2024 baseline
LOSSLESS_RANK = 8  # R_s, ACL sec. 2.1


@dataclass(frozen=True, slots=True)
class StreamsOptions(Bounded):
    """Options of `ssbench train ss`. -1: as the papers have it."""

    owner: ClassVar[str] = "ss"
    mode: Literal["lossless", "shared"] = option(
        "lossless",
        "lossless: the base stays as it is. shared: the base is changed by a LoRA that is trained together "
        "with the streams.",
    )
    gamma: Annotated[int, Ge(1)] = option(4, "Number of streams: how many tokens are drafted after the next one.")
    n_msa_layers: int = option(4, "Number of top layers that streams pass (N_s).")
    adapter_rank: int = option(
        -1,
        "Rank of the stream adapters, which streams pass in place of the MLP. 0: they pass the MLP. "
        "-1: 8 in lossless mode, 0 in shared mode.",
    )
    init_rank: int = option(0, "Rank of the map from main states to the first stream states. 0: the identity.")
    prune_rank: int = option(8, "Rank of the pruning map.")
    prune_layer: int = option(-1, "Layer before which the tree is pruned. -1: the first one that streams pass.")
    lora_rank: int = option(-1, "Rank of the LoRA in shared mode. -1: 32.")
    main_attends_streams: bool | None = option(
        None, "Whether the main stream sees its streams (eq. 3). Default: in shared mode only."
    )
    stream_init: Literal["embedding", "rotation"] = option(
        "embedding", "What tells streams apart: an embedding of each, or values rotated by an angle of each."
    )
    rotation_step: float = option(
        0.0, "With rotation: angle in radians from one stream to the next. 0: the largest possible."
    )
    keep_mlp: bool = option(
        False, "Let streams pass the layers' own MLPs beside their adapters, which is not in the papers."
    )
    root_rank: Annotated[int, Ge(0)] = option(
        0,
        "Rank of the map by which streams learn the token that the main stream has decided, which is not "
        "in the papers. 0: they do not learn it.",
    )
    parent_rank: Annotated[int, Ge(0)] = option(
        0,
        "Rank of the map by which the guesses of a node's children learn the node's token, which is not in "
        "the papers. 0: all nodes of a level have the same children.",
    )
    stream_position: Literal["ahead", "same"] = option(
        "ahead",
        "Position at which attention takes a stream to be. ahead: that of the token whose successor it "
        "predicts, so each stream has its own. same: the position of the token beside which it runs.",
    )
    loss: LossKind = loss_option("ce")
    alpha: Annotated[float, Gt(0)] = option(
        0.1, "Weight of each stream's loss in shared mode, where the next token's has 1."
    )
    alpha_ramp: Annotated[int, Ge(0)] = option(
        0,
        "Steps in which alpha rises from 0 in shared mode, so that streams that know nothing yet do not "
        "distort the base. 0: it is the same from the start.",
    )
    embedding_lr: float = option(5e-2, "Peak learning rate of the stream embeddings.")
    segment: Annotated[int, Ge(0)] = option(
        0, "Save memory: so many positions of a row have their streams in memory at a time. 0: all of them."
    )
    gradient_checkpointing: bool = field(
        default=False,
        metadata={
            "help": "Save memory by computing activations a second time in the backward pass.",
            "flag": "--gradient-checkpointing",
        },
    )

    def check_together(self) -> None:
        """Raise UserError for options of the other mode."""
        if self.mode == "shared" and self.loss != "ce":
            raise UserError("ss: loss=kl is for --mode lossless: in shared mode the base itself changes")
        if self.mode == "lossless" and self.alpha_ramp:
            raise UserError("ss: alpha_ramp is for --mode shared: in lossless mode all losses are the streams'")
        if self.mode == "lossless" and (self.main_attends_streams or self.lora_rank > 0):
            raise UserError(
                "ss: main_attends_streams and lora_rank are for --mode shared; lossless leaves the base alone"
            )

    def shape(self) -> StreamConfig:
        """Return the streams that are trained. Raises UserError for what cannot be."""
        shared = self.mode == "shared"
        given = {f.name: getattr(self, f.name) for f in fields(StreamConfig)}
        if self.adapter_rank < 0:
            given["adapter_rank"] = 0 if shared else LOSSLESS_RANK
        if self.main_attends_streams is None:
            given["main_attends_streams"] = shared
        if self.lora_rank < 0 or not shared:
            given["lora_rank"] = SHARED_RANK if shared else 0
        return StreamConfig(**given)


class StreamTrainer(DrafterTrainer):
    """Streams of either mode: P_j, whatever else the config has, and the pruning map o_theta.

    segment: positions of a row whose streams are alive at once; 0 = all of them (the naive form).
    """

    name = "ss"
    summary = "speculative streams: adapters in the frozen base, or LoRA and streams together (--mode shared)"
    method = "ss"
    Options = StreamsOptions

    def __init__(
        self,
        target: Target,
        config: StreamConfig,
        lr: float,
        embedding_lr: float,
        segment: int,
        prune_weight: float,
        name: str,
    ) -> None:
        self.target, self.shape, self.lr, self.name = target, config, lr, name
        target.require_layer_access(self.method)
        self.lo, self.ahead = config.check_layers(target.n_layers), config.gamma
        self.prune_layer = self.lo if config.prune_layer < 0 else config.prune_layer
        self.embedding_lr, self.segment, self.prune_weight = embedding_lr, segment, prune_weight
        self.config = {"streams": config.as_dict()}

    def stream_groups(self, streams: Streams, lr: float) -> list[dict[str, Any]]:
        """Return optimizer groups: P_j apart, whose natural unit is the scale of the residual stream."""
        groups = [{"params": [p for n, p in streams.named_parameters() if n != "embedding"], "lr": lr}]
        if streams.config.stream_init == "embedding":
            groups.append({"params": [streams.embedding], "lr": self.embedding_lr})
        return groups

    def prune_loss(self, target: Target, streams: Streams, low: Tensor, batch: Batch) -> Tensor:
        """Return the weighted next-token loss of the early exit (sec. 2.3).

        low: the anchors' states [B, A, h] at the pruning layer.
        """
        logits = target.logits(target.family.norm(streams.early_exit(low.detach())))[..., None, :]
        labels, whole = (b.anchors.labels[..., :1] for b in (batch, batch.whole))
        return self.prune_weight * head_loss(logits, labels, [1.0], whole)[0]


@torch.no_grad()
def start_embedding(module: Streams, low: Tensor) -> None:
    """Start P_j at random at half the scale of the residual stream low [B, T, h], or streams would look alike for long.

    The scale is that of the middle position: the first one is a hundred times larger in many models, since attention
    rests on it where it has nothing to look at.
    """
    if module.config.stream_init == "embedding":
        scale = 0.5 * low.float().pow(2).mean(-1).sqrt().median()
        p = module.embedding
        p.copy_(p / p.pow(2).mean(-1, keepdim=True).sqrt() * scale)


class StreamsTrainer(StreamTrainer):
    """Streams in lossless mode: P_j, the stream adapters and, on their own next-token loss, the pruning map o_theta.

    Segments are of anchors here. loss_kind: what streams learn; published is the text.
    """

    module: Streams

    def __init__(
        self,
        target: Target,
        config: StreamConfig,
        lr: float = 5e-4,
        embedding_lr: float = 5e-2,
        segment: int = 0,
        prune_weight: float = 0.5,
        name: str = "ss",
        loss_kind: LossKind = "ce",
    ) -> None:
        super().__init__(target, config, lr, embedding_lr, segment, prune_weight, name)
        self.aux_hidden_state_layers = tuple(sorted({self.lo, self.prune_layer}))
        self.kv_from, self.loss_kind = self.lo, loss_kind
        self.module = Streams(config, target.hidden_size)

    @classmethod
    def build(cls, target: Target, options: StreamsOptions, lr: float) -> DrafterTrainer:
        """Return the trainer of the mode. Without --segment, --gradient-checkpointing takes a row as one segment."""
        o, shape = options, options.shape()
        segment = o.segment or (target.context_length if o.gradient_checkpointing else 0)
        if o.mode == "lossless":
            return cls(target, shape, lr, o.embedding_lr, segment, loss_kind=o.loss)
        checkpointing = o.gradient_checkpointing
        return SharedTrainer(
            target, shape, lr, lr, o.embedding_lr, segment, o.alpha, recompute=checkpointing, ramp=o.alpha_ramp
        )

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return P_j and the rest."""
        return self.stream_groups(self.module, self.lr)

    def prepare(self, states: BaseStates, batch: Batch) -> None:
        """Start P_j at the scale of the residual stream."""
        start_embedding(self.module, states.hidden_states[self.lo])

    def loss(self, states: BaseStates, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return stream losses over all segments, plus the pruning map's next-token loss."""
        g, anchors = self.ahead, batch.anchors
        labels = anchors.labels[..., 1 : g + 1]
        step = self.segment or labels.shape[1]
        pieces = [slice(i, i + step) for i in range(0, labels.shape[1], step)]
        known = self.module.kept_conditioning(anchors.labels[..., :g], anchors.at)
        parts = [self._segment(states, anchors.at[:, piece], labels[:, piece], known[:, piece]) for piece in pieces]
        sums = torch.stack([a for a, _ in parts]).sum(0), torch.stack([b for _, b in parts]).sum(0)
        total, right = mean_loss(sums, batch.whole.anchors.labels[..., 1 : g + 1], [1.0] * g)
        low = states.at(states.hidden_states[self.prune_layer], anchors)
        return total + self.prune_loss(self.target, self.module, low, batch), right

    def _segment(self, states: BaseStates, at: Tensor, labels: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        """Return sums of a segment's loss and right guesses; the backward pass computes its streams again."""

        def run(at: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            return head_sums(self.stream_logits(states, at, known), labels, self._teacher(states, at))

        if not self.segment:
            return run(at, labels)
        sums: tuple[Tensor, Tensor] = checkpoint(run, at, labels, use_reentrant=False)
        return sums

    def _teacher(self, states: BaseStates, at: Tensor) -> Tensor | None:
        """Return the base's logits [B, a, gamma, V] for the streams' tokens, where its distribution is learnt."""
        if self.loss_kind == "ce":
            return None
        with torch.no_grad():
            return self.target.logits(states.ahead(at, self.ahead))

    def stream_logits(self, states: BaseStates, at: Tensor, known: Tensor | None = None) -> Tensor:
        """Run streams at positions `at` [B, a] of one segment -> logits [B, a, gamma, V].

        known int64 [B, a, gamma]: the tokens after each position, for streams that learn them.
        """
        target, g = self.target, self.ahead
        low = states.hidden_states[self.lo]
        picked = low.gather(1, at[..., None].expand(-1, -1, low.shape[-1]))
        x = self.module.insert(picked, g).to(low.dtype)  # [B, a*gamma, h]
        places = at if states.documents is None else states.documents.places.gather(1, at)
        positions = stream_positions(target, places, g, self.shape.stream_position)
        masks = self._masks(at, low.shape[1], next(iter(states.kv.values()))[0].dtype, states.documents)
        cache, rotary = PrefixCache(states.kv), target.rotary(positions)
        x = run_masked(target, self.module, x, Layout(0, g), cache, masks, rotary)
        x = self.module.condition_on_tokens(target, target.family.norm(x).unflatten(1, (at.shape[1], g)), known)
        logits: Tensor = target.logits(x)
        return logits

    def _masks(self, at: Tensor, t: int, dtype: torch.dtype, documents: Documents | None) -> list[Tensor]:
        """Return the mask of every MSA layer, made once for each width of a sliding window."""
        windows = [block.window for block in self.target.family.blocks[self.lo :]]
        masks = {window: self._mask(at, t, dtype, window, documents) for window in dict.fromkeys(windows)}
        return [masks[window] for window in windows]

    def _mask(self, at: Tensor, t: int, dtype: torch.dtype, window: int | None, documents: Documents | None) -> Tensor:
        """Return the additive mask [B, 1, a*gamma, T + a*gamma]: main keys up to the anchor, own streams up to oneself.

        Main keys of the anchor's own text only; with a sliding window only what is less than `window` places before the
        stream's own.
        """
        g, a = self.ahead, at.shape[1]
        keys = torch.arange(t, device=at.device)
        main = keys <= at[..., None]
        if documents is not None:
            main = main & documents.same(at, t)
        main = main.repeat_interleave(g, 1)  # [B, a*gamma, T]
        own = own_streams(a, g, at.device).expand(at.shape[0], -1, -1)
        if window is not None:
            ahead = steps_ahead(g, self.shape.stream_position, at.device)
            places = (at[..., None] + ahead).flatten(1)  # [B, a*gamma]
            main = main & (places[..., None] - keys < window)
            own = own & (places[..., None] - places[:, None] < window)
        return additive(torch.cat((main, own), 2), dtype)


KeysAndValues = list[tuple[Tensor, Tensor]]  # of main rows, an entry for each MSA layer, each [B, kv_heads, t, d]


class SharedTrainer(StreamTrainer):
    """Streams in shared mode: LoRA in every layer, P_j (and whatever else the config has) and the pruning map.

    It runs its own copy of the base, so it reads no state of the frozen one. alpha_j 0 trains the LoRA on next tokens
    alone, without streams: the fine-tune to compare with. recompute: the layers below the streams are computed again
    in the backward pass. ramp: updates in which alpha_j rises from 0; 0 = it is the same from the start.
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
        prune_weight: float = 0.5,
        name: str = "ss-shared",
        recompute: bool = False,
        ramp: int = 0,
    ) -> None:
        super().__init__(target, config, lr, embedding_lr, segment, prune_weight, name)
        self.stream_lr, self.alpha_j, self.recompute = stream_lr, alpha_j, recompute
        self.tuned = with_lora(target, config.lora_rank)
        if any(block.window for block in self.tuned.family.blocks):
            raise UserError(f"{name}: shared mode cannot be trained on layers with a sliding window")
        self.streams = Streams(config, target.hidden_size)
        self.lora, self.ramp = lora_parameters(self.tuned.model), LossWarmup(ramp)
        self.module = nn.ModuleList([self.streams, nn.ParameterList(self.lora), *([self.ramp] if ramp else [])])

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the LoRA, P_j and the rest."""
        return [{"params": self.lora, "lr": self.lr}, *self.stream_groups(self.streams, self.stream_lr)]

    @torch.no_grad()
    def prepare(self, states: BaseStates, batch: Batch) -> None:
        """Start P_j at the scale of the residual stream."""
        start_embedding(self.streams, self._lower(batch.ids, batch.documents)[0])

    def loss(self, states: BaseStates, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return eq. 6 over all segments, plus the pruning map's next-token loss."""
        g = self.shape.gamma if self.alpha_j else 0
        low, at_pruning = self._lower(batch.ids, batch.documents)
        labels = batch.labels[..., : 1 + g]
        sums: list[tuple[Tensor, Tensor]] = []
        past: list[KeysAndValues] = []  # an entry for each segment so far
        step = self.segment or labels.shape[1]
        for start in range(0, labels.shape[1], step):
            piece = slice(start, start + step)
            found, own = self._segment(low[:, piece], labels[:, piece], start, past, batch.documents)
            sums.append(found)
            past.append(own)
        together = torch.stack([a for a, _ in sums]).sum(0), torch.stack([b for _, b in sums]).sum(0)
        weights = [1.0] + [self.alpha_j * self.ramp()] * g
        total, right = mean_loss(together, batch.whole.labels[..., : 1 + g], weights)
        pruned = states.at(at_pruning, batch.anchors)
        loss = total + self.prune_loss(self.tuned, self.streams, pruned, batch)
        return loss, right[1:] if g else right

    def _lower(self, ids: Tensor, documents: Documents | None = None) -> tuple[Tensor, Tensor]:
        """Return states [B, T, h] at layer N - N_s and at the pruning layer, with gradients for the LoRA."""
        aux_states: dict[int, Tensor] = {}
        recompute = self.recompute and torch.is_grad_enabled()
        x = run_rows(self.tuned, ids, self.lo, None, documents, (self.prune_layer,), aux_states, recompute)
        return x, aux_states.get(self.prune_layer, x)

    def _segment(
        self, low: Tensor, labels: Tensor, start: int, past: list[KeysAndValues], documents: Documents | None
    ) -> tuple[tuple[Tensor, Tensor], KeysAndValues]:
        """Run a segment through the MSA layers; return (sums of loss and right guesses [1 + gamma], keys and values).

        past: those of the segments before, joined only while the segment is computed.
        """
        carriers, real = carriers_of(labels[..., 0] != -100)  # [B, c]
        own = labels.gather(1, carriers[..., None].expand(-1, -1, labels.shape[-1]))
        own = own.masked_fill(~real[..., None], -100)

        def run(low: Tensor, *flat: Tensor) -> tuple[Tensor, ...]:
            n = 2 * self.shape.n_msa_layers  # keys and values of every layer, segment after segment
            joined = [torch.cat(flat[i::n], 2) for i in range(n)] if flat else []
            before = list(zip(joined[::2], joined[1::2], strict=True))
            gamma, known = labels.shape[-1] - 1, self.streams.kept_conditioning(own[..., :-1], start + carriers)
            logits, after = self.upper(low, start, carriers, real, before, gamma, documents, known)
            # clones: a view would keep the streams' keys, and those of all segments before, alive
            return (*head_sums(logits, own), *(x[:, :, start:].clone() for pair in after for x in pair))

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
        known: Tensor | None = None,
    ) -> tuple[Tensor, KeysAndValues]:
        """Run main rows low [B, L, h] at positions start.. and streams of the carriers [B, c] through the MSA layers.

        known int64 [B, c, gamma]: the tokens after each carrier, for streams that learn them.
        Returns logits [B, c, 1 + gamma, V] of main rows and streams, and the keys and values of all main rows so far.
        """
        target, length = self.tuned, low.shape[1]
        b, c = carriers.shape
        picked = carriers[..., None].expand(-1, -1, low.shape[-1])
        places = start + torch.arange(length, device=low.device).expand(b, -1)
        if documents is not None:
            places = documents.places[:, start : start + length]
        rows = low
        if gamma:
            rows = torch.cat((low, self.streams.insert(low.gather(1, picked), gamma).to(low.dtype)), 1)
            beside = stream_positions(target, places.gather(1, carriers), gamma, self.shape.stream_position)
            places = torch.cat((places, beside), 1)
        attends = self.shape.main_attends_streams
        visible = segment_visibility(length, start, carriers, real, gamma, attends, documents)
        mask = additive(visible, low.dtype)
        cache = PrefixCache(dict(enumerate(past or [None] * self.shape.n_msa_layers, start=self.lo)), length)
        masks = [mask] * self.shape.n_msa_layers
        x = run_masked(target, self.streams, rows, Layout(length, max(gamma, 1)), cache, masks, target.rotary(places))
        main, streams = x[:, :length].gather(1, picked)[:, :, None], x[:, length:].unflatten(1, (c, gamma))
        final = target.family.norm(torch.cat((main, streams), 2))
        if gamma:
            final = torch.cat((final[:, :, :1], self.streams.condition_on_tokens(target, final[:, :, 1:], known)), 2)
        return target.logits(final), [cache.kept[layer] for layer in range(self.lo, target.n_layers)]

    def save(self, folder: Path, about: dict[str, Any]) -> None:
        """Write the streams, and beside them the LoRA as peft saves it."""
        write_checkpoint(folder, self.streams, {**about, **self.config})
        save_lora(folder, self.tuned)


def carriers_of(carry: Tensor) -> tuple[Tensor, Tensor]:
    """Return the carrying positions of `carry` bool [B, L], int64 [B, c], padded with others; and which are real."""
    count = int(carry.sum(1).max())
    order = carry.int().argsort(dim=1, descending=True, stable=True)[:, : max(count, 1)]
    return order, carry.gather(1, order)
