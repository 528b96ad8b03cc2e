"""Training of drafters on hidden states of the frozen base."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specbench_ss.engine.target import FINAL
from specbench_ss.methods._shared.draft_vocabulary import set_draft_vocab
from specbench_ss.methods._shared.drafter_network import Rotary
from specbench_ss.training.batch import BaseStates, Batch
from specbench_ss.training.losses import checkpoint_if_large, distribution_losses
from specbench_ss.training.trainer import DrafterTrainer


class FeatureTrainer(DrafterTrainer):
    """Trainer of a drafter that reads inputs of some of the base's layers; FINAL is the LM head's input.

    The option `loss` selects the text's token (ce) or a loss of the base's distribution.
    """

    module: Any  # a DrafterNetwork

    def use(self, drafter: Any, layers: Sequence[int], layer_config: Any, ahead: int) -> None:
        """Set the drafter, the layers it reads, and the configuration of its layers for the rotary embedding."""
        self.module, self.layers, self.ahead = drafter, tuple(layers), ahead
        self.aux_hidden_state_layers = tuple(dict.fromkeys(layer for layer in layers if layer != FINAL))
        self.rotary = Rotary(layer_config, self.target.device, drafter.rotary_embedding)

    def features(self, states: BaseStates) -> list[Tensor]:
        """Return the hidden states of each layer, [B, T, h_t]."""
        return [states.final if layer == FINAL else states.hidden_states[layer] for layer in self.layers]

    @torch.no_grad()
    def scan(self, batches: Iterable[Batch]) -> None:
        """Set a reduced draft vocabulary to the most frequent tokens of the answers."""
        drafter, target = self.module, self.target
        if drafter.vocab_ids is None:
            return
        counts = torch.zeros(target.vocab_size, dtype=torch.long)
        for batch in batches:
            answers = batch.labels[..., 0]
            counts += torch.bincount(answers[answers != -100], minlength=len(counts))
        best = counts.sort(descending=True, stable=True).indices[: drafter.draft_vocab]
        token_ids = best.sort().values.to(target.device)
        set_draft_vocab(drafter, token_ids)
        drafter.lm_head.weight.copy_(target.unembed[token_ids])

    def sums(self, states: BaseStates, batch: Batch, out: Tensor, labels: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return sums of the loss and of correct predictions of x_{t+2+k}.

        out: the drafter's output states [B, n, h] at the first n anchors of each row. labels: int64 [B, n].
        """
        labelled = labels != -100
        at = (batch.anchors.at[:, : out.shape[1]] + 1 + k)[labelled]
        true = states.final[labelled.nonzero()[:, 0], at]  # [n, h], the target's state before each label
        inputs = out[labelled], true, labels[labelled]
        return checkpoint_if_large(self._sums, self.ahead * len(true) * self.target.vocab_size, *inputs)

    def _sums(self, states: Tensor, true: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return sums over n positions of the loss and of correct predictions.

        With loss=kl tokens outside the draft vocabulary are excluded from the target's distribution, and positions with
        such a label from the loss. Losses of acceptance keep both: what cannot be drafted is never accepted.

        Args:
            states: [n, h], the drafter's.
            true: [n, h], the target's at the same tokens.
            labels: int64 [n], the target's ids of the tokens.
        """
        q, vocab_ids = self.module.logits(states, self.target), self.module.vocab_ids
        drafted = None if vocab_ids is None else self.module.t2d[labels]  # bool [n]
        if self.options.loss == "ce":
            if drafted is not None:
                labels = torch.where(drafted, torch.searchsorted(vocab_ids, labels), -100)
            return F.cross_entropy(q.float(), labels, reduction="sum"), (q.argmax(-1) == labels).sum()
        log_q = q.log_softmax(-1, dtype=torch.float32)
        predictions = log_q.detach().argmax(-1)
        with torch.no_grad():
            p = self.target.logits(true)
            if drafted is None:
                p = p.softmax(-1, dtype=torch.float32)
            else:
                predictions = vocab_ids[predictions]
                if self.options.loss == "kl":
                    p = p[:, vocab_ids].softmax(-1, dtype=torch.float32) * drafted[:, None]
                else:
                    p = p.softmax(-1, dtype=torch.float32)[:, vocab_ids]
        return distribution_losses(log_q, p, self.options.loss).sum(), (predictions == labels).sum()
