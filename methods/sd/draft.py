"""The draft model and its own cache, kept in step with what is accepted. Knows no tree, no text and no target."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specbench_ss.engine.target import Target

if TYPE_CHECKING:
    from torch import Tensor


class Draft:
    """A causal LM that continues what it has been fed. `calls` are its forward passes since `begin`.

    vocab: width of the logits it gives, the target's: an embedding padded to another width is cut, or filled with
    tokens of no probability. Ids that it has no embedding for are read as its last one.
    """

    def __init__(self, model: Target, vocab: int) -> None:
        self.model, self.vocab = model, vocab
        self.cache = model.new_cache(0)
        self.calls = 0

    def begin(self, capacity: int) -> None:
        """Forget everything, and have room for so many tokens, as far as the model has positions."""
        self.model.empty(self.cache, capacity)
        self.calls = 0

    @property
    def fed(self) -> int:
        """Tokens in the cache."""
        return self.cache.get_seq_length()

    @property
    def room(self) -> int:
        """Tokens that may still be fed."""
        return min(self.model.context_length, self.cache.capacity) - self.fed

    def rewind(self, length: int) -> None:
        """Forget all but the first tokens."""
        self.cache.keep(min(length, self.fed), ())

    def keep(self, start: int, rows: list[int]) -> None:
        """Of what was fed as a tree after the first `start` tokens, only these rows, in order."""
        self.cache.keep(start, rows)

    def feed(self, tokens: Tensor) -> Tensor:
        """tokens int64 [q], on the device -> logits [V] of what follows the last one. Waits for nothing."""
        self.calls += 1
        return self._fit(self.model.prefill(self._known(tokens)[None], self.cache).logits[0, 0])

    def feed_level(self, tokens: Tensor, visible: Tensor, level: int) -> Tensor:
        """Nodes [k] of a level of a tree (1 = children of the newest token) -> logits [k, V].

        Earlier levels lie in the cache, k rows each. visible bool [k, level * k]: the nodes' rows and their ancestors'.
        """
        self.calls += 1
        model, (k, rows) = self.model, visible.shape
        before = self.fed - (rows - k)  # tokens before the tree
        positions = torch.full((1, k), before + level - 1, device=model.device)
        rotary = model.rotary(positions, before + level - 1)
        x = model.embed(self._known(tokens)[None], positions)
        if any(model.windows):  # whose masks go by depths, not by rows
            for block, mask in zip(model.family.blocks, self._masks(visible, before, level), strict=True):
                x = block(x, self.cache, mask, rotary)
        else:
            x = model.run(x, 0, model.n_layers, self.cache, model.block_mask(visible, before), rotary)
        self.cache.advance(k)
        return self._fit(model.logits(model.family.norm(x))[0])

    def _masks(self, visible: Tensor, before: int, level: int) -> list[Tensor]:
        """Of every layer: additive [1, 1, k, before + rows], windows folded in; the tree's row j is j // k + 1 deep."""
        model, (k, rows) = self.model, visible.shape
        whole = model.block_mask(visible, before)
        windowed: dict[int, Tensor] = {}
        for window in {w for w in model.windows if w is not None}:
            levels = torch.arange(rows, device=model.device) // k
            places = torch.cat((torch.arange(before, device=model.device), before + levels))
            hidden = before + level - 1 - places >= window
            windowed[window] = whole.masked_fill(hidden, torch.finfo(model.dtype).min)
        return [whole if w is None else windowed[w] for w in model.windows]

    def _known(self, tokens: Tensor) -> Tensor:
        """Without ids that the draft has no embedding for."""
        have = self.model.vocab_size
        return tokens if have >= self.vocab else tokens.clamp_max(have - 1)

    def _fit(self, logits: Tensor) -> Tensor:
        """[.., the draft's width] -> [.., V]."""
        more = self.vocab - logits.shape[-1]
        return logits if more == 0 else torch.nn.functional.pad(logits, (0, more), value=float("-inf"))
