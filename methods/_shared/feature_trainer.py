"""Training of drafters over hidden states of the frozen base: EAGLE, EAGLE-3, DFlash and P-EAGLE."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from specbench_ss.engine.target import FINAL
from specbench_ss.methods._shared.draft_vocabulary import guess_sums, take_words
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
        self.taps = tuple(dict.fromkeys(layer for layer in layers if layer != FINAL))
        self.rotary = Rotary(layer_config, self.target.device)

    def features(self, states: BaseStates) -> list[Tensor]:
        """Return the hidden states of each layer, [B, T, h_t]."""
        return [states.final if layer == FINAL else states.taps[layer] for layer in self.layers]

    def scan(self, batches: Iterable[Batch]) -> None:
        """Choose the draft vocabulary, where it is not the whole one."""
        if self.module.words is not None:
            take_words(self.module, batches, self.target)

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
        soft = self.options.targets == "distribution"
        # logits of a position are many: computed again in the backward pass rather than kept
        rows = self.module, self.target, out[known], true, labels[known], soft
        sums: tuple[Tensor, Tensor] = checkpoint(guess_sums, *rows, use_reentrant=False)
        return sums
