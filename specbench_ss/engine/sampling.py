"""Sampling from logits: temperature, top-k and top-p, in that order.

Temperature 0 is greedy and never builds a distribution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Generator, Tensor

from specbench_ss.errors import UserError
from specbench_ss.options import Bounded

VerificationRule = Literal["token", "block"]
TOKEN: VerificationRule = "token"
BLOCK: VerificationRule = "block"
MIN_TEMPERATURE = 1e-5  # smallest temperature above 0


@dataclass(frozen=True, slots=True)
class SamplingParams(Bounded):
    """Sampling parameters. Temperature 0 is greedy; top_k 0 and top_p 1 switch these filters off.

    verification: rule that accepts sampled chains at T > 0, token by token or as a block (`engine/verify.py`).

    Raises UserError for values out of bounds, and for a temperature between 0 and MIN_TEMPERATURE.
    """

    temperature: Annotated[float, Ge(0), Lt(math.inf)] = 0.0
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    top_k: Annotated[int, Ge(0)] = 0
    seed: int = 0
    verification: VerificationRule = TOKEN

    def check_together(self) -> None:
        """Raise UserError for a temperature so small that scaled logits are infinite."""
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise UserError(f"temperature must be 0 (greedy) or at least {MIN_TEMPERATURE:g}, not {self.temperature:g}")

    @property
    def greedy(self) -> bool:
        """Return True if tokens are the argmax."""
        return self.temperature == 0

    def probs(self, logits: Tensor) -> Tensor:
        """Return the target distribution p [..., V], float32, of logits [..., V] at T > 0."""
        scores = logits.float() / self.temperature
        if self.top_k and self.top_k < scores.shape[-1]:
            kth = scores.topk(self.top_k, dim=-1).values[..., -1:]
            scores = scores.masked_fill(scores < kth, float("-inf"))
        p = scores.softmax(-1)
        if self.top_p < 1:
            ordered, order = p.sort(-1, descending=True)
            # keep a token while the mass before it is under top_p: the first one always stays
            drop = ordered.cumsum(-1) - ordered >= self.top_p
            p = p.masked_fill(drop.scatter(-1, order, drop), 0.0)
            p = p / p.sum(-1, keepdim=True)
        return p


def sample_categorical(p: Tensor, rng: Generator) -> Tensor:
    """Sample a token [.., 1] from each row of p [.., V], which need not be normalised.

    By inversion of the cumulative distribution in float64, since float32 sums of a large vocabulary round. Without a
    synchronisation: torch.multinomial has two. A row with NaN yields an arbitrary token.
    """
    mass = p.cumsum(-1, dtype=torch.float64)
    u = torch.rand((*p.shape[:-1], 1), generator=rng, dtype=torch.float64, device=p.device)
    return torch.searchsorted(mass, u * mass[..., -1:], right=True).clamp_max_(p.shape[-1] - 1)


def exponential_race(p: Tensor, rng: Generator) -> Tensor:
    """Return p/E [.., V] with E ~ Exp(1) for every token of p [.., V].

    Its argmax is a sample from p; its top m are m samples without replacement, in order.
    """
    return p / p.new_empty(p.shape).exponential_(generator=rng).clamp_min_(1e-30)  # 0 / 0 would win
