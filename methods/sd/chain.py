"""Chains: gamma tokens one after the other, each from the draft's distribution (Leviathan et al. 2023, algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specbench_ss.engine.decoder import State
from specbench_ss.engine.sampling import Sampling
from specbench_ss.methods._shared.tree_growth import draw
from specbench_ss.methods.sd.draft import Draft
from specbench_ss.methods.sd.options import LONGEST, TwoModelOptions

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Drafted:
    """tokens int64 [n]; probs [n + 1, V]: what each was drawn from (the last row is of no token), None = the best."""

    tokens: Tensor
    probs: Tensor | None


def draft_chain(
    draft: Draft, logits: Tensor, length: int, threshold: float, drawn: Sampling | None, state: State
) -> Drafted:
    """At most `length` tokens after what has been fed, given its logits [V]: the best, or drawn as `drawn` samples.

    A token less probable than the threshold ends the chain: whether another follows depends on what is verified
    alone, and what was drawn is never dropped, so that verification stays exact. Without threshold the device is never
    waited for.
    """
    tokens: list[Tensor] = []
    probs: list[Tensor] = []
    while True:
        if drawn is None:
            token = logits.argmax(-1, keepdim=True)
        else:
            probs.append(drawn.probs(logits))
            token = draw(probs[-1], state.rng)
        tokens.append(token)
        if len(tokens) == length:
            break
        if threshold:
            p = logits.softmax(-1, dtype=torch.float32) if drawn is None else probs[-1]
            if float(p[token]) < threshold:
                break
        logits = draft.feed(token)
    return Drafted(torch.cat(tokens), torch.stack([*probs, probs[-1]]) if probs else None)


class Length:
    """How long a chain is next, as transformers' schedules have it; forgotten with every prompt."""

    def __init__(self, options: TwoModelOptions) -> None:
        self.gamma, self.adapts = options.gamma, options.schedule == "heuristic"
        self.now = self.gamma

    def begin(self) -> None:
        """A new prompt."""
        self.now = self.gamma

    def observe(self, accepted: int, drafted: int) -> None:
        """Two longer where everything was accepted, else one shorter."""
        if self.adapts and drafted:
            self.now = min(LONGEST, self.now + 2) if accepted == drafted else max(1, self.now - 1)
