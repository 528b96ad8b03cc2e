"""Training shared mode: LoRA and streams together on eq. 6, with alpha_0 = 1 for the main stream, alpha_j = 0.1.

The papers choose alpha_j "to normalise losses", which on a base that is sure of its text is less than 0.1. At first
streams know nothing and their gradients are many times the main stream's: alpha_j can rise from nothing (our addition).

Under eq. 3 a main state depends on its own streams, so every position that predicts an answer token carries streams,
as in decoding. Of several answers in a row all do, where decoding a later turn has the earlier ones as prompt,
without streams: a small difference (docs/design/speculative-streaming.md). Segment attention (ACL appendix I): the
lower layers run once; the MSA layers take a segment of positions at a time, main rows and streams together, over the
keys of all main rows before; a segment is computed again in the backward pass, so that only one segment's streams are
alive, and of the others their main keys and values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from specbench_ss.engine.kv_cache import StreamCache
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.lora import lora_parameters, save_lora, with_lora
from specbench_ss.methods.ss.layout import Layout, segment_visibility, stream_positions
from specbench_ss.methods.ss.stream_config import StreamConfig
from specbench_ss.methods.ss.streams import Streams, run_masked
from specbench_ss.methods.ss.training import prune_loss, start_embedding, stream_groups
from specbench_ss.models.checkpoint import write_checkpoint
from specbench_ss.training.batches import Batch, Documents, additive
from specbench_ss.training.losses import head_sums, mean_loss
from specbench_ss.training.ramp import Ramp
from specbench_ss.training.trainee import BaseStates, Trainee, run_rows

KeysAndValues = list[tuple[Tensor, Tensor]]  # of main rows, an entry for each MSA layer, each [B, kv_heads, t, d]


class SharedTrainee(Trainee):
    """LoRA in every layer, P_j (and whatever else the config has) and the pruning map.

    Runs its own copy of the base, so it wants nothing of the frozen one. alpha_j 0 trains the LoRA on next tokens
    alone, without streams: the fine-tune to compare with. segment: positions whose streams are alive at once; 0 = all
    of them, nothing computed twice. recompute: the layers below the streams are computed again in the backward pass.
    ramp: updates in which alpha_j rises from nothing; 0 = it is what it is from the start.
    """

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
        self.name, self.config, self.recompute = name, config, recompute
        target.check_taken_apart("ss-shared")
        self.lo = config.check_layers(target.n_layers)
        self.prune_layer = self.lo if config.prune_layer < 0 else config.prune_layer
        self.tuned = with_lora(target, config.lora_rank)
        if any(block.window for block in self.tuned.family.blocks):
            raise UserError(f"{name}: shared mode cannot be trained on layers with a sliding window")
        self.lr, self.stream_lr, self.embedding_lr, self.segment = lr, stream_lr, embedding_lr, segment
        self.alpha_j, self.prune_weight = alpha_j, prune_weight
        self.streams = Streams(config, target.hidden_size)
        self.lora = lora_parameters(self.tuned.model)
        self.ramp = Ramp(ramp)
        # a training without a ramp is the one of before there was a choice
        self.module = nn.ModuleList([self.streams, nn.ParameterList(self.lora), *([self.ramp] if ramp else [])])

    def about(self) -> dict[str, Any]:
        """The streams and the weights of the losses."""
        weights = {"alpha_j": self.alpha_j, "prune_weight": self.prune_weight}
        return {**self.config.as_dict(), **weights, **({"ramp": self.ramp.steps} if self.ramp.steps else {})}

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The LoRA, P_j, the rest."""
        groups = stream_groups(self.streams, self.stream_lr, self.embedding_lr)
        return [{"params": self.lora, "lr": self.lr}, *groups]

    @torch.no_grad()
    def prepare(self, states: BaseStates, batch: Batch) -> None:
        """P_j starts at the scale of the residual stream."""
        start_embedding(self.streams, self._lower(batch.ids, batch.documents)[0])

    def loss(self, states: BaseStates, batch: Batch) -> tuple[Tensor, Tensor]:
        """Eq. 6 over all segments, plus the pruning map's next-token loss."""
        g = self.config.gamma if self.alpha_j else 0
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
        loss: Tensor = total + self.prune_weight * prune_loss(self.tuned, self.streams, pruned, batch)
        return loss, right[1:] if g else right

    def _lower(self, ids: Tensor, documents: Documents | None = None) -> tuple[Tensor, Tensor]:
        """States [B, T, h] at layer N - N_s and at the pruning layer, with gradients for the LoRA."""
        tapped: dict[int, Tensor] = {}
        recompute = self.recompute and torch.is_grad_enabled()
        x = run_rows(self.tuned, ids, self.lo, None, documents, (self.prune_layer,), tapped, recompute)
        return x, tapped.get(self.prune_layer, x)

    def _segment(
        self, low: Tensor, labels: Tensor, start: int, past: list[KeysAndValues], documents: Documents | None
    ) -> tuple[tuple[Tensor, Tensor], KeysAndValues]:
        """One segment through the MSA layers: (sums of loss and right guesses [1 + gamma], its main keys and values).

        past: those of the segments before, joined only while the segment is computed.
        """
        carriers, real = carriers_of(labels[..., 0] != -100)  # [B, c]
        own = labels.gather(1, carriers[..., None].expand(-1, -1, labels.shape[-1]))
        own = own.masked_fill(~real[..., None], -100)

        def run(low: Tensor, *flat: Tensor) -> tuple[Tensor, ...]:
            n = 2 * self.config.n_msa_layers  # keys and values of every layer, segment after segment
            joined = [torch.cat(flat[i::n], 2) for i in range(n)] if flat else []
            before = list(zip(joined[::2], joined[1::2], strict=True))
            gamma, known = labels.shape[-1] - 1, self.streams.heard(own[..., :-1], start + carriers)
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
        """Main rows low [B, L, h] at positions start.. and streams of the carriers [B, c] through the MSA layers.

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
            beside = stream_positions(target, places.gather(1, carriers), gamma, self.config.stream_position)
            places = torch.cat((places, beside), 1)
        attends = self.config.main_attends_streams
        visible = segment_visibility(length, start, carriers, real, gamma, attends, documents)
        mask = additive(visible, low.dtype)
        cache = StreamCache(dict(enumerate(past or [None] * self.config.n_msa_layers, start=self.lo)), length)
        masks = [mask] * self.config.n_msa_layers
        x = run_masked(target, self.streams, rows, Layout(length, max(gamma, 1)), cache, masks, target.rotary(places))
        main, streams = x[:, :length].gather(1, picked)[:, :, None], x[:, length:].unflatten(1, (c, gamma))
        final = target.family.norm(torch.cat((main, streams), 2))
        if gamma:
            final = torch.cat((final[:, :, :1], self.streams.told(target, final[:, :, 1:], known)), 2)
        return target.logits(final), [cache.kept[layer] for layer in range(self.lo, target.n_layers)]


def carriers_of(carry: Tensor) -> tuple[Tensor, Tensor]:
    """Bool [B, L] -> int64 [B, c] places of the carrying positions, padded with others; bool [B, c] which are real."""
    count = int(carry.sum(1).max())
    order = carry.int().argsort(dim=1, descending=True, stable=True)[:, : max(count, 1)]
    return order, carry.gather(1, order)


def save_shared(folder: Path, trainee: SharedTrainee, about: dict[str, Any]) -> None:
    """model.safetensors and config.json (streams), adapter_model.safetensors and adapter_config.json (LoRA)."""
    write_checkpoint(folder, trainee.streams, {**about, "streams": trainee.config.as_dict()})
    save_lora(folder, trainee.tuned)
