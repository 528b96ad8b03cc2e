"""Drafters that may have an embedding and an LM head of their own, the latter perhaps for some of the words only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from specbench_ss.engine.cpu_kernels import Packing, Product

if TYPE_CHECKING:
    from torch import Tensor

    from specbench_ss.engine.target import Target


class OwnWords(nn.Module):
    """embed_tokens, lm_head: None = the target's. d2t, t2d: buffers of a draft vocabulary, where they came with it.

    The target's id of draft word d is d + d2t[d]; t2d bool [V] marks the words that are drafted.
    """

    embed_tokens: nn.Embedding | None
    lm_head: nn.Linear | None
    head: Product | None = None  # the LM head's, once weights are final
    d2t: Tensor
    t2d: Tensor

    def make_head(self, hidden: int, draft_vocab: int, words: int, mapped: bool, marked: bool) -> None:
        """An LM head where draft_vocab is not 0; words: of the target. mapped, marked: with d2t, t2d."""
        self.lm_head = nn.Linear(hidden, draft_vocab, bias=False) if draft_vocab else None
        if draft_vocab and mapped:
            self.register_buffer("d2t", torch.zeros(draft_vocab, dtype=torch.long))
        if draft_vocab and marked:
            self.register_buffer("t2d", torch.zeros(words, dtype=torch.bool))

    def settle_head(self, pack: Packing) -> None:
        """The LM head is final. pack: products by a second copy of weights pay."""
        if self.lm_head is not None:
            self.head = Product(self.lm_head.weight, None, pack)

    def embed(self, tokens: Tensor, target: Target) -> Tensor:
        """Token ids [B, n] -> [B, n, h], by its own table or the target's."""
        own = self.embed_tokens
        table: Tensor = target.model.get_input_embeddings().weight if own is None else own.weight
        return F.embedding(tokens, table)

    def logits(self, states: Tensor, target: Target) -> Tensor:
        """Normed states [.., h] -> [.., draft vocabulary], by the target's LM head or its own."""
        if self.lm_head is None:
            return target.logits(states)
        if self.head is not None and torch.is_inference_mode_enabled():
            return self.head(states)
        out: Tensor = self.lm_head(states)
        return out

    @property
    def words(self) -> Tensor | None:
        """The target's ids of the words that it drafts, int64 [draft vocabulary]; None = all, in order."""
        if "d2t" not in self._buffers:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def token_ids(self, drafted: Tensor) -> Tensor:
        """Indices into the draft vocabulary -> the target's token ids."""
        return drafted if "d2t" not in self._buffers else drafted + self.d2t[drafted]
