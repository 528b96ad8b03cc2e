"""Training of drafters over hidden states of the frozen base: EAGLE, EAGLE-3, DFlash and P-EAGLE."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from specbench_ss.engine.target import FINAL
from specbench_ss.methods._shared.draft_vocabulary import choose_words
from specbench_ss.methods._shared.drafter_network import Rotary
from specbench_ss.training.batch import BaseStates, Batch
from specbench_ss.training.trainer import DrafterTrainer


class FeatureTrainer(DrafterTrainer):
    """A drafter that reads the inputs of some of the base's layers; FINAL is the state that the LM head reads.

    The option `targets` says whether the base's distribution is learnt or the text's token.
    """

    module: Any  # a DrafterNetwork

    def use(self, drafter: Any, layers: Sequence[int], layer_config: Any, ahead: int) -> None:
        """Set the drafter, the layers it reads, and the configuration of its own layers, for the rotary embedding."""
        self.module, self.layers, self.ahead = drafter, tuple(layers), ahead
        self.aux_hidden_state_layers = tuple(dict.fromkeys(layer for layer in layers if layer != FINAL))
        self.rotary = Rotary(layer_config, self.target.device)

    def features(self, states: BaseStates) -> list[Tensor]:
        """Return the hidden states of each layer, [B, T, h_t]."""
        return [states.final if layer == FINAL else states.hidden_states[layer] for layer in self.layers]

    @torch.no_grad()
    def scan(self, batches: Iterable[Batch]) -> None:
        """Make the draft vocabulary, where it is not the whole one, the most frequent words of the answers."""
        drafter, target = self.module, self.target
        if drafter.words is None:
            return
        counts = torch.zeros(target.vocab_size, dtype=torch.long)
        for batch in batches:
            answers = batch.labels[..., 0]
            counts += torch.bincount(answers[answers != -100], minlength=len(counts))
        best = counts.sort(descending=True, stable=True).indices[: drafter.draft_vocab]
        words = best.sort().values.to(target.device)
        choose_words(drafter, words)
        drafter.lm_head.weight.copy_(target.unembed[words])

    def labels(self, batch: Batch) -> Tensor:
        """Return the drafted tokens x_{t+2+k}, int64 [B, A, ahead]; -100 where the answer has ended by then."""
        return batch.anchors.labels[..., 1 : 1 + self.ahead]

    def sums(self, states: BaseStates, batch: Batch, out: Tensor, labels: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return sums of the loss and of right guesses of x_{t+2+k}.

        out: the drafter's output states [B, n, h] at the first n anchors of each row. labels: int64 [B, n].
        """
        known = labels != -100
        at = (batch.anchors.at[:, : out.shape[1]] + 1 + k)[known]
        true = states.final[known.nonzero()[:, 0], at]  # [n, h], whose distribution the token was taken from
        # logits of a position are many: computed again in the backward pass rather than kept
        sums: tuple[Tensor, Tensor] = checkpoint(self._sums, out[known], true, labels[known], use_reentrant=False)
        return sums

    def _sums(self, states: Tensor, true: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return sums over n positions of the cross-entropy and of right guesses.

        From the target's distribution its gradient is that of the KL divergence. Words outside the draft vocabulary are
        left out of that distribution, and positions whose token is one of them out of the loss.

        Args:
            states: [n, h], the drafter's.
            true: [n, h], the target's at the same tokens.
            labels: int64 [n], the target's ids of the tokens.
        """
        q, words = self.module.logits(states, self.target), self.module.words
        drafted = None if words is None else self.module.t2d[labels]  # bool [n]
        if self.options.loss == "ce":
            if drafted is not None:
                labels = torch.where(drafted, torch.searchsorted(words, labels), -100)
            return F.cross_entropy(q.float(), labels, reduction="sum"), (q.argmax(-1) == labels).sum()
        log_q = q.log_softmax(-1, dtype=torch.float32)
        guesses = log_q.detach().argmax(-1)
        with torch.no_grad():
            p = self.target.logits(true)
            if drafted is None:
                p = p.softmax(-1, dtype=torch.float32)
            else:
                guesses = words[guesses]
                p = p[:, words].softmax(-1, dtype=torch.float32) * drafted[:, None]
        return -(p * log_q).sum(), (guesses == labels).sum()
