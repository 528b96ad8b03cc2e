"""From logits to the target's distribution: temperature, top-k, top-p, in that order.

Knows no tree and no method. T=0 is greedy and never builds a distribution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from specbench_ss.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sampling:
    """temperature 0 = greedy; top_k 0 and top_p 1 switch the filters off."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature must be zero or more, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top-p must be in (0, 1], not {self.top_p}")
        if self.top_k < 0:
            raise UserError(f"top-k must be zero (off) or more, not {self.top_k}")

    @property
    def greedy(self) -> bool:
        """Whether tokens are the argmax."""
        return self.temperature == 0

    def probs(self, logits: Tensor) -> Tensor:
        """logits [..., V] -> the target's distribution p [..., V], float32, T > 0."""
        scores = logits.float() / self.temperature
        if self.top_k and self.top_k < scores.shape[-1]:
            kth = scores.topk(self.top_k, dim=-1).values[..., -1:]
            scores = scores.masked_fill(scores < kth, float("-inf"))
        p = scores.softmax(-1)
        if self.top_p < 1:
            ordered, order = p.sort(-1, descending=True)
            # a token stays while the mass before it is under top_p: the first one always does
            drop = ordered.cumsum(-1) - ordered >= self.top_p
            p = p.masked_fill(drop.scatter(-1, order, drop), 0.0)
            p = p / p.sum(-1, keepdim=True)
        return p
