"""`ssbench train hydra`: sequential heads with a teacher loss (Hydra sec. 4).

Grounded: a head reads the text's own tokens where decoding gives it drafted ones, which in training all are right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import Tensor

from specbench_ss.engine.target import FINAL, Target
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.small_llama import llama_layer
from specbench_ss.methods.hydra.heads import HydraHeads, start
from specbench_ss.methods.medusa.train import MeasurableHeads
from specbench_ss.options import option
from specbench_ss.training.batch import Anchors, BaseStates, Batch
from specbench_ss.training.losses import TOP, LossKind, head_sums, loss_option, mean_loss, topk_predictions
from specbench_ss.training.trainer import DrafterTrainer


@dataclass(frozen=True, slots=True)
class HydraTraining(MeasurableHeads):
    """Options of `ssbench train hydra`; defaults make Hydra++ as published."""

    owner: ClassVar[str] = "hydra"
    layers: Annotated[int, Ge(1)] = option(4, "Number of residual blocks of a head.")
    prefix: bool = option(True, "Put one more decoder layer before the heads (Hydra++).")
    loss: LossKind = loss_option("kl")


class HydraTrainer(DrafterTrainer):
    """Heads, for Hydra++ the prefix layer, and accuracies, of which `hydra` builds its tree.

    heads, tap: existing heads, and the layer whose input they read.
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
        tap: int = FINAL,
    ) -> None:
        super().__init__(target, options, lr)
        self.embedding: Tensor = target.model.get_input_embeddings().weight
        if self.embedding.shape[1] != target.hidden_size:
            raise UserError(
                f"hydra: the model embeds tokens in {self.embedding.shape[1]} numbers, its states have "
                f"{target.hidden_size}: such models are not supported"
            )
        if heads is None:
            o, layer = self.options, llama_layer(target) if self.options.prefix else None
            heads = HydraHeads(o.heads, o.layers, target.hidden_size, target.vocab_size, layer, o.own_unembed)
            start(heads, target.unembed)
        self.module, self.ahead, self.tap = heads, heads.count, tap
        self.config = {  # as published configs have it
            "hydra_num_heads": heads.count,
            "hydra_num_layers": heads.layers,
            "hydra_head_arch": "mlp" if heads.prefix is None else "prefix-mlp",
        }
        self.aux_hidden_state_layers = () if tap == FINAL else (tap,)

    @classmethod
    def loaded(cls, target: Target, weights: str) -> Self:
        """Return a trainer of existing heads, as `hydra` loads them."""
        from specbench_ss.methods.hydra.decode import Hydra

        decoder = Hydra.load(target, Hydra.Options(weights=weights, tree="published"))
        return cls(target, heads=decoder.heads, tap=decoder.tap)

    @torch.no_grad()
    def prepare(self, states: BaseStates, batch: Batch) -> None:
        """The prefix layer starts at the scale of the states it reads, which the LM heads know."""
        if self.module.prefix is not None:
            self.module.prefix.norm.weight.fill_(self._read(states).float().pow(2).mean().sqrt())

    def loss(self, states: BaseStates, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sum over heads of the mean cross-entropy from the base's distribution of the token, or from the text's."""
        anchors, n = batch.anchors, self.module.count
        labels, whole = (b.anchors.labels[..., 1 : n + 1].flatten(0, 1) for b in (batch, batch.whole))  # [B*A, n]
        final = states.ahead(anchors.at, n).flatten(0, 1)  # [B*A, n, h]
        sums = []
        for i, logits in enumerate(self._logits(states, anchors)):
            with torch.no_grad():
                teacher = self.target.logits(final[:, i, None]) if self.options.loss == "kl" else None
            sums.append(head_sums(logits[:, None], labels[:, i, None], teacher))
        return mean_loss((torch.cat([a for a, _ in sums]), torch.cat([b for _, b in sums])), whole, [1.0] * n)

    @torch.no_grad()
    def accuracies(self, states: BaseStates, batch: Batch) -> tuple[Tensor, Tensor]:
        """Given that all tokens before are the text's, of which a path's probability is the product."""
        top = min(TOP, self.target.vocab_size)
        guesses = [logits.topk(top).indices for logits in self._logits(states, batch.anchors)]
        return topk_predictions(torch.stack(guesses), batch.anchors)

    def _read(self, states: BaseStates) -> Tensor:
        """The base's states that the heads or the prefix layer read, [B, T, h]."""
        return states.final if self.tap == FINAL else states.hidden_states[self.tap]

    def _logits(self, states: BaseStates, anchors: Anchors) -> list[Tensor]:
        """Of every head, [B*A, V]."""
        x = states.at(self._prefixed(states), anchors).flatten(0, 1)  # [B*A, h]
        tokens = anchors.labels[..., : self.module.count].clamp_min(0).flatten(0, 1)  # x_{t+1}.. [B*A, n]
        path = F.embedding(tokens, self.embedding)
        shared = self.target.logits
        return [self.module.logits(i, x, path[:, : i + 1], shared) for i in range(self.module.count)]

    def _prefixed(self, states: BaseStates) -> Tensor:
        x, layer, documents = self._read(states), self.module.prefix, states.documents
        if layer is None:
            return x
        t = x.shape[1]
        places = torch.arange(t, device=x.device)[None] if documents is None else documents.places
        mask = None if documents is None else documents.masks((None,), x.dtype)[None]
        out: Tensor = layer(x, None, [mask], layer.rotary(places, t, x.dtype))
        return out
