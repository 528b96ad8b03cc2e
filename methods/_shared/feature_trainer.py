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
from specbench_ss.training.losses import LossKind, checkpoint_if_large, distribution_losses
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

        Args:
            states: [n, h], the drafter's.
            true: [n, h], the target's at the same tokens.
            labels: int64 [n], the target's ids of the tokens.
        """
        log_q = self.module.logits(states, self.target).log_softmax(-1, dtype=torch.float32)
        p = None if self.options.loss == "ce" else self.base_probs(true, self.options.loss)
        return self.token_losses(self.options.loss, log_q, labels, p).sum(), self.correct(log_q, labels)

    @torch.no_grad()
    def base_probs(self, true: Tensor, kind: LossKind) -> Tensor:
        """Return the target's probabilities [n, draft vocabulary] in states [n, h].

        They sum to less than 1 if other tokens are probable, but with kl, which excludes these.
        """
        logits, vocab_ids = self.target.logits(true), self.module.vocab_ids
        if vocab_ids is not None and kind == "kl":
            return logits[:, vocab_ids].softmax(-1, dtype=torch.float32)
        p = logits.softmax(-1, dtype=torch.float32)
        return p if vocab_ids is None else p[:, vocab_ids]

    def token_losses(self, kind: LossKind, log_q: Tensor, labels: Tensor, p: Tensor | None) -> Tensor:
        """Return the loss [n] of draft distributions log_q [n, draft vocabulary] at labels int64 [n].

        Tokens outside the draft vocabulary have no cross-entropy. With kl they are excluded from p, and positions with
        such a label from the loss. Losses of acceptance keep both: what cannot be drafted is never accepted. p: of
        `base_probs`; None with ce.
        """
        vocab_ids = self.module.vocab_ids
        if vocab_ids is not None:
            drafted = self.module.t2d[labels.clamp_min(0)] & (labels != -100)
            labels = torch.where(drafted, torch.searchsorted(vocab_ids, labels), -100)
            if p is not None and kind == "kl":
                p = p / p.sum(-1, keepdim=True).clamp_min(torch.finfo(p.dtype).tiny) * drafted[:, None]
        if p is None or kind == "ce":
            return F.nll_loss(log_q, labels, reduction="none")
        return distribution_losses(log_q, p, kind)

    def correct(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return how many of the best tokens of logits [n, draft vocabulary] are the labels [n]."""
        drafted: Tensor = self.module.vocabulary(self.target.vocab_size).token_ids(logits.detach().argmax(-1))
        return (drafted == labels).sum()
