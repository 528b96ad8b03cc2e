"""Causal correction of the logits of a block: what a drafted token depends on beyond its own position.

A block drafter computes the logits U_k and the states h_k of all its positions in one pass, so that none reads the
token drafted before it. A correction is a cheap function of U_k, h_k and the tokens before, which runs once
for each drafted token. DSpark's Markov heads (Cheng et al. 2026, arXiv:2607.05147, sec. 3.2) are three of them.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specbench_ss.engine.cpu_kernels import PrepackedLinear, PrepackFormat

MarkovKind = Literal["vanilla", "gated", "rnn"]
MARKOV_KINDS: tuple[MarkovKind, ...] = ("vanilla", "gated", "rnn")


class Correction(nn.Module):
    """Correction of the logits of one position by the tokens before it; this one changes nothing.

    A further one (DFlash2's selector, Domino's recurrent head) overrides `start` and `step`; decoding of chains and
    trees, and training, call nothing else.
    """

    def start(self, states: Tensor) -> Tensor:
        """Return the state [n, s] of n chains before their first position. states: [n, h], of any position."""
        return states.new_zeros(len(states), 0)

    def step(self, logits: Tensor, states: Tensor, before: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the corrected logits [n, Vd] of one position of n chains, and their states [n, s] after it.

        Args:
            logits: [n or 1, Vd], the block's own.
            states: [n or 1, h], the block's states that the logits were computed from.
            before: int64 [n], the target's id of the token before the position.
            state: [n, s], from `start` or the position before.
        """
        return logits.expand(len(before), -1), state

    def finalize(self, pack: PrepackFormat) -> None:
        """Prepare for inference with final weights."""


class MarkovHead(Correction):
    """DSpark's low-rank bias W2 z of rank r, where e = W1[x] is a row for the token x before the position.

    vanilla: z = e. gated: z = sigmoid(G [h; e] + g) e. rnn: (f, c, o) = J [s; e; h] + j, z = tanh(o), and the state
    becomes sigmoid(f) s + (1 - sigmoid(f)) tanh(c), from s = 0. Modules are named as published tensors. vocab: rows of
    W1, the target's tokens. draft_vocab: rows of W2.
    """

    def __init__(self, kind: MarkovKind, rank: int, hidden: int, vocab: int, draft_vocab: int) -> None:
        super().__init__()
        self.kind, self.rank = kind, rank
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)
        self.project: PrepackedLinear | None = None

    def reset_parameters(self) -> None:
        """Start as no correction: W2 = 0, and rows of W1 with a standard deviation of 1."""
        nn.init.normal_(self.markov_w1.weight)
        nn.init.zeros_(self.markov_w2.weight)

    def finalize(self, pack: PrepackFormat) -> None:
        self.project = self.project or PrepackedLinear(self.markov_w2.weight, None, pack)

    def start(self, states: Tensor) -> Tensor:
        return states.new_zeros(len(states), self.rank if self.kind == "rnn" else 0)

    def step(self, logits: Tensor, states: Tensor, before: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        e = self.embed(before)
        h = states.expand(len(e), -1)
        if self.kind == "gated":
            e = torch.sigmoid(self.gate_proj(torch.cat((h, e), -1))) * e
        elif self.kind == "rnn":
            forget, new, out = self.joint_proj(torch.cat((state, e, h), -1)).chunk(3, -1)
            forget = torch.sigmoid(forget)
            state, e = forget * state + (1 - forget) * torch.tanh(new), torch.tanh(out)
        project = self.project if self.project is not None and torch.is_inference_mode_enabled() else self.markov_w2
        return logits + project(e), state

    def embed(self, tokens: Tensor) -> Tensor:
        """Return rows of W1 [.., r] of token ids [..]."""
        return F.embedding(tokens, self.markov_w1.weight)


class ConfidenceHead(nn.Module):
    """Estimate that a drafted token is accepted if all before it are (sec. 3.3): a logit w . features + b."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, features: Tensor) -> Tensor:
        """Return float32 logits [..] of features [.., width]."""
        out: Tensor = self.proj(features)[..., 0]
        return out.float()
