"""Greedy or sampled decoding of many prompts side by side, by the target's own layers, for text to learn from.

Nothing here is measured: methods decode one prompt at a time (`engine/generate.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from specbench_ss.engine.target import Target

LOOK_EVERY = 8  # tokens from one look at which answers have ended to the next: each waits for the device
WORTH = 0.75  # of the answers go on, at most, where the others are taken out of the batch


class PromptBatch:
    """Prompts [B] of any length, left-padded, and the answers that are being made.

    seen bool [B, longest + limit]: False at padding. places int64, the same shape: positions in each prompt's own text.
    numbers [B']: of the answers that go on, in `answers` int64 [B, limit], which holds -1 where nothing is said.
    """

    def __init__(self, target: Target, prompts: Sequence[Sequence[int]], limit: int) -> None:
        self.target, self.limit, self.made = target, limit, 0
        device, longest = target.device, max(map(len, prompts))
        self.ids = torch.zeros(len(prompts), longest, dtype=torch.long, device=device)
        self.seen = torch.ones(len(prompts), longest + limit, dtype=torch.bool, device=device)
        for i, prompt in enumerate(prompts):
            self.ids[i, longest - len(prompt) :] = torch.tensor(prompt, device=device)
            self.seen[i, : longest - len(prompt)] = False
        self.places = (self.seen.cumsum(1) - 1).clamp_min(0)
        self.cache = target.new_cache(longest + limit)
        self.numbers = torch.arange(len(prompts), device=device)
        self.answers = torch.full((len(prompts), limit), -1, device=device)
        self.ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)

    def logits(self, ids: Tensor) -> Tensor:
        """Run ids [B', q], which follow what the cache holds; return the logits [B', V] after the last of each."""
        target, past, q = self.target, self.cache.get_seq_length(), ids.shape[1]
        positions = self.places[:, past : past + q]
        x, rotary = target.embed(ids, positions), target.rotary(positions, past + q)
        masks = {w: self._mask(past, q, w) for w in {block.window for block in target.family.blocks}}
        for block in target.family.blocks:
            x = block(x, self.cache, masks[block.window], rotary)
        self.cache.advance(q)
        return target.logits(target.family.norm(x[:, -1:]))[:, 0]

    def _mask(self, past: int, q: int, window: int | None) -> Tensor:
        """Return what q new rows see of all: additive [B', 1, q, past + q]."""
        end, device = past + q, self.ids.device
        later = torch.arange(end, device=device) > torch.arange(past, end, device=device)[:, None]
        hidden = later | ~self.seen[:, None, :end]
        if window is not None:
            hidden = hidden | (self.places[:, past:end, None] - self.places[:, None, :end] >= window)
        mask = torch.zeros(hidden.shape, dtype=self.target.dtype, device=device)
        return mask.masked_fill_(hidden, torch.finfo(self.target.dtype).min)[:, None]

    def say(self, tokens: Tensor, ends: Tensor) -> None:
        """Put the next token [B'] of each answer down. ends: tokens that end an answer."""
        self.answers[self.numbers, self.made] = torch.where(self.ended, -1, tokens)
        self.ended |= torch.isin(tokens, ends)
        self.made += 1

    def goes_on(self) -> bool:
        """Say whether there is more to be said; now and then take out what has ended."""
        if self.made == self.limit:
            return False
        if self.made % LOOK_EVERY:
            return True
        left = (~self.ended).nonzero()[:, 0]
        if 0 < len(left) <= WORTH * len(self.ended):
            self.numbers, self.ended, self.seen, self.places = (
                x[left] for x in (self.numbers, self.ended, self.seen, self.places)
            )
            self.cache.choose(left)
        return len(left) > 0

    def newest(self) -> Tensor:
        """Return the newest token of each answer that goes on, [B', 1]."""
        return self.answers[self.numbers, self.made - 1 : self.made].clamp_min(0)


@torch.inference_mode()
def decode_batch(
    target: Target,
    prompts: Sequence[Sequence[int]],
    limit: int,
    ends: Collection[int],
    temperature: float,
    rng: torch.Generator,
) -> list[list[int]]:
    """Return answers of at most `limit` tokens, end token included. Temperature 0 is greedy. rng: on the device."""
    batch = PromptBatch(target, prompts, limit)
    stop = torch.tensor(sorted(ends), device=target.device)
    ids = batch.ids
    while True:
        logits = batch.logits(ids)
        if temperature > 0:
            tokens = (logits.float() / temperature).softmax(-1).multinomial(1, generator=rng)[:, 0]
        else:
            tokens = logits.argmax(-1)
        batch.say(tokens, stop)
        if not batch.goes_on():
            return [[token for token in row if token >= 0] for row in batch.answers.tolist()]
        ids = batch.newest()
