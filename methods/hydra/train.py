"""`ssbench train hydra`: sequential heads with a teacher loss (Hydra sec. 4).

In training a head reads the tokens of the text in place of drafted tokens (teacher forcing).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

import torch
import torch.nn.functional as F
from annotated_types import Ge, Le
from torch import Tensor

from specbench_ss.engine.target import FINAL, Target
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.small_llama import llama_layer
from specbench_ss.methods.hydra.heads import HydraHeads, initialize
from specbench_ss.methods.medusa.train import MeasurableHeads
from specbench_ss.options import option
from specbench_ss.training.batch import Anchors, BaseStates, Batch
from specbench_ss.training.losses import TOP, LossKind, head_sums, loss_option, mean_loss, topk_predictions
from specbench_ss.training.trainer import DrafterTrainer


@dataclass(frozen=True, slots=True)
class HydraTraining(MeasurableHeads):
    """Options of `ssbench train hydra`; the defaults are Hydra++ as published."""

    owner: ClassVar[str] = "hydra"
    layers: Annotated[int, Ge(1), Le(128)] = option(4, "Number of residual blocks of a head.")
    prefix: bool = option(True, "Add one decoder layer before the heads (Hydra++).")
    loss: LossKind = loss_option("kl")


class HydraTrainer(DrafterTrainer):
    """Trainer of the heads and Hydra++'s prefix layer; its accuracies give `hydra`'s tree.

    heads, layer: existing heads, and the layer whose input they read.
    """

    name = "hydra"
    summary = "Hydra heads on the frozen base, teacher loss, with Hydra++'s prefix layer"
    method = "hydra"
    weights_file = "hydra_lm_head.safetensors"
    ranked = True
    Options = HydraTraining
    module: HydraHeads

    def __init__(
        self,
        target: Target,
        options: Any = None,
        lr: float | None = None,
        heads: HydraHeads | None = None,
        layer: int = FINAL,
    ) -> None:
        super().__init__(target, options, lr)
        self.embedding: Tensor = target.model.get_input_embeddings().weight
        if self.embedding.shape[1] != target.hidden_size:
            raise UserError(
                f"hydra: the embedding size {self.embedding.shape[1]} differs from the hidden size "
                f"{target.hidden_size}, which is not supported"
            )
        if heads is None:
            o, prefix = self.options, llama_layer(target) if self.options.prefix else None
            heads = HydraHeads(o.heads, o.layers, target.hidden_size, target.vocab_size, prefix, o.own_unembed)
            initialize(heads, target.unembed)
        self.module, self.ahead, self.layer = heads, heads.count, layer
        self.config = {  # keys of published configs
            "hydra_num_heads": heads.count,
            "hydra_num_layers": heads.layers,
            "hydra_head_arch": "mlp" if heads.prefix is None else "prefix-mlp",
        }
        self.aux_hidden_state_layers = () if layer == FINAL else (layer,)

    @classmethod
    def loaded(cls, target: Target, weights: str) -> Self:
        """Return a trainer of existing heads, loaded as by `hydra`."""
        from specbench_ss.methods.hydra.decode import Hydra

        decoder = Hydra.load(target, Hydra.Options(weights=weights, tree="published"))
        return cls(target, heads=decoder.drafter, layer=decoder.layer)

    @torch.no_grad()
    def prepare(self, states: BaseStates, batch: Batch) -> None:
        """Start the prefix layer's norm at the scale of the states it reads, which the LM heads expect."""
        if self.module.prefix is not None:
            self.module.prefix.norm.weight.fill_(self._read(states).float().pow(2).mean().sqrt())

    def loss(self, states: BaseStates, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the sum over heads of the mean loss against the base's distribution or the text's token."""
        anchors, n = batch.anchors, self.module.count
        labels, whole = (self.labels(b).flatten(0, 1) for b in (batch, batch.global_batch))  # [B*A, n]
        final = states.ahead(anchors.at, n).flatten(0, 1)  # [B*A, n, h]
        sums = []
        for i, logits in enumerate(self._logits(states, anchors)):
            with torch.no_grad():
                teacher = self.target.logits(final[:, i, None]) if self.options.loss != "ce" else None
            sums.append(head_sums(logits[:, None], labels[:, i, None], teacher, self.options.loss))
        return mean_loss((torch.cat([a for a, _ in sums]), torch.cat([b for _, b in sums])), whole, [1.0] * n)

    @torch.no_grad()
    def accuracies(self, states: BaseStates, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return accuracies given that all earlier tokens are correct; a path's probability is their product."""
        top = min(TOP, self.target.vocab_size)
        predictions = [logits.topk(top).indices for logits in self._logits(states, batch.anchors)]
        return topk_predictions(torch.stack(predictions), batch.anchors)

    def _read(self, states: BaseStates) -> Tensor:
        """Return the base's states that the heads or the prefix layer read, [B, T, h]."""
        return states.final if self.layer == FINAL else states.hidden_states[self.layer]

    def _logits(self, states: BaseStates, anchors: Anchors) -> list[Tensor]:
        """Return the logits [B*A, V] of every head."""
        x = states.at(self._prefixed(states), anchors).flatten(0, 1)  # [B*A, h]
        tokens = anchors.labels[..., : self.module.count].clamp_min(0).flatten(0, 1)  # x_{t+1}.. [B*A, n]
        path = F.embedding(tokens, self.embedding)
        shared = self.target.logits
        return [self.module.logits(i, x, path[:, : i + 1], shared) for i in range(self.module.count)]

    def _prefixed(self, states: BaseStates) -> Tensor:
        x, prefix, documents = self._read(states), self.module.prefix, states.documents
        if prefix is None:
            return x
        t = x.shape[1]
        positions = torch.arange(t, device=x.device)[None] if documents is None else documents.position_ids
        mask = None if documents is None else documents.masks((None,), x.dtype)[None]
        out: Tensor = prefix(x, None, mask, prefix.rotary(positions, t, x.dtype))
        return out
