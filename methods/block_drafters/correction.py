"""Causal correction of the logits of a block by the tokens that were drafted before each position.

A block drafter computes the logits U_k and the states h_k of all its positions in one pass, so that none reads the
token drafted before it. A correction is a cheap function of U_k, h_k and the tokens before, which runs once
for each drafted token. DSpark's Markov heads (Cheng et al. 2026, arXiv:2607.05147, sec. 3.2) are three of them. The
others are DFlash2's candidate selector (vLLM 0.32, `qwen3_dflash2.py`) and Domino's recurrent head (arXiv:2605.29707;
SpecForge, `modeling/draft/domino.py`).
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specbench_ss.engine.layers.linear import PackedDtype, PrepackedLinear

MarkovKind = Literal["vanilla", "gated", "rnn"]
MARKOV_KINDS: tuple[MarkovKind, ...] = ("vanilla", "gated", "rnn")


class OpenedBlock(NamedTuple):
    """The g positions of a block as `Correction.step` reads them."""

    logits: Tensor  # [g, c], the block's own, of the candidates
    features: Tensor  # [g, ..], computed from the block's states
    candidates: Tensor | None = None  # int64 [g, c], indices in the draft vocabulary; None = all, in order

    def at(self, k: int) -> tuple[Tensor, Tensor]:
        """Return logits [1, c] and features [1, ..] of position k."""
        return self.logits[k : k + 1], self.features[k : k + 1]

    def drafted(self, k: int, chosen: Tensor) -> Tensor:
        """Return the indices in the draft vocabulary of chosen candidates [..] of position k."""
        return chosen if self.candidates is None else self.candidates[k][chosen]

    def over_vocabulary(self, q: Tensor, draft_vocab: int) -> Tensor:
        """Return distributions [n, draft_vocab] of distributions [n, c] over the first n positions' candidates."""
        if self.candidates is None:
            return q
        return q.new_zeros(len(q), draft_vocab).scatter_(1, self.candidates[: len(q)], q)


class Correction(nn.Module):
    """Correction of the logits of one position by the tokens before it; this one changes nothing.

    Subclasses override `open`, `start` and `step`; decoding of chains and trees calls nothing else.
    """

    def open(self, logits: Tensor, states: Tensor) -> OpenedBlock:
        """Compute what no drafted token changes, for all positions of a block. logits: [g, Vd]. states: [g, h]."""
        return OpenedBlock(logits, states)

    def start(self, states: Tensor) -> Tensor:
        """Return the state [n, s] of n chains before their first position. states: [n, h], of any position."""
        return states.new_zeros(len(states), 0)

    def step(
        self, logits: Tensor, features: Tensor, before: Tensor, state: Tensor, table: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the corrected logits [n, c] of one position of n chains, and their states [n, s] after it.

        Args:
            logits: [n or 1, c], of an opened block.
            features: [n or 1, ..], of the same.
            before: int64 [n], the target's id of the token before the position.
            state: [n, s], from `start` or the position before.
            table: the embedding [V, h] of the target's tokens, which Domino reads.
        """
        return logits.expand(len(before), -1), state

    def finalize(self, pack: PackedDtype) -> None:
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

    def finalize(self, pack: PackedDtype) -> None:
        self.project = self.project or PrepackedLinear(self.markov_w2.weight, None, pack)

    def start(self, states: Tensor) -> Tensor:
        return states.new_zeros(len(states), self.rank if self.kind == "rnn" else 0)

    def step(
        self, logits: Tensor, features: Tensor, before: Tensor, state: Tensor, table: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        e = self.embed(before)
        h = features.expand(len(e), -1)
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


class CandidateSelector(Correction):
    """DFlash2's selector: a score <P[x] * W h, S[y]> of rank r for each of the k best tokens y after the token x.

    All other tokens are excluded. Scores are float32. Modules are named as published tensors. A new one changes only
    the number of candidates: S = 0, and rows of P have a standard deviation of 1.
    """

    def __init__(self, rank: int, top_k: int, hidden: int, vocab: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab, rank))
        self.hidden_projection = nn.Linear(hidden, rank, bias=False)

    def reset_parameters(self) -> None:
        """Start as no correction of the candidates."""
        nn.init.normal_(self.predecessor_codebook)
        nn.init.zeros_(self.successor_codebook)

    def open(self, logits: Tensor, states: Tensor) -> OpenedBlock:
        best = logits.topk(self.top_k, dim=-1)
        return OpenedBlock(best.values.float(), self.features(states, best.indices), best.indices)

    def features(self, states: Tensor, candidates: Tensor) -> Tensor:
        """Return W h * S[y], float32 [n, k, r], of states [n, h] and candidates y, int64 [n, k]."""
        projected: Tensor = self.hidden_projection(states)
        return projected.float()[:, None] * F.embedding(candidates, self.successor_codebook).float()

    def step(
        self, logits: Tensor, features: Tensor, before: Tensor, state: Tensor, table: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        e = F.embedding(before, self.predecessor_codebook).float()
        return logits + (features @ e[..., None])[..., 0], state

    def loss(self, logits: Tensor, states: Tensor, before: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cross-entropy [n] of the target among k candidates, and the tokens drafted, int64 [n].

        A target that is none of the k best tokens replaces the last of them, for the loss alone.

        Args:
            logits: [n, V], the block's own at one position of n blocks.
            states: [n, h].
            before: int64 [n], the text's token before the position.
            target: int64 [n], the target's most probable token.
        """
        k, best = self.top_k, logits.detach().topk(self.top_k, dim=-1).indices
        ids = torch.cat((best, target[:, None]), -1)
        unary = logits.gather(-1, ids).float()
        scores, _ = self.step(unary, self.features(states, ids), before, self.start(states))  # [n, k + 1]
        match = best == target[:, None]
        found = match.any(-1)
        place = torch.where(found, match.int().argmax(-1), k - 1)
        last = torch.where(found, scores[:, k - 1], scores[:, k])
        losses = F.cross_entropy(torch.cat((scores[:, : k - 1], last[:, None]), -1), place, reduction="none")
        return losses, best.gather(-1, scores.detach()[:, :k].argmax(-1, keepdim=True))[:, 0]


class RecurrentHead(Correction):
    """Domino's bias E2 silu(E1 [h; s]), where s is the state of a GRU over embeddings of the root .. the token before.

    The first `prefix` drafted tokens are not corrected; the GRU reads them too. Modules are named as published tensors.
    """

    def __init__(self, width: int, rank: int, prefix: int, hidden: int, vocab: int) -> None:
        super().__init__()
        self.prefix, self.width = prefix, width
        self.prefix_gru: Any = nn.GRU(hidden, width, bias=False)
        self.embed_proj: Any = nn.Sequential(
            nn.Linear(hidden + width, rank, bias=False), nn.SiLU(), nn.Linear(rank, vocab, bias=False)
        )
        self.project: PrepackedLinear | None = None

    def finalize(self, pack: PackedDtype) -> None:
        self.project = self.project or PrepackedLinear(self.embed_proj[2].weight, None, pack)

    def open(self, logits: Tensor, states: Tensor) -> OpenedBlock:
        """Compute features [g, rank + 1]: the part of E1 for h, and 1 for corrected positions or 0 for the prefix."""
        corrected = torch.arange(len(states), device=states.device) >= self.prefix
        of_states = F.linear(states, self.embed_proj[0].weight[:, : states.shape[-1]])
        return OpenedBlock(logits, torch.cat((of_states, corrected[:, None].to(states.dtype)), -1))

    def start(self, states: Tensor) -> Tensor:
        return states.new_zeros(len(states), self.width)

    def step(
        self, logits: Tensor, features: Tensor, before: Tensor, state: Tensor, table: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        assert table is not None
        gru, packed = self.prefix_gru, self.project is not None and torch.is_inference_mode_enabled()
        state = torch.gru_cell(F.embedding(before, table), state, gru.weight_ih_l0, gru.weight_hh_l0)
        of_state = F.linear(state, self.embed_proj[0].weight[:, -self.width :])
        inner = F.silu(features[:, :-1] + of_state) * features[:, -1:]
        bias = self.project(inner) if packed and self.project is not None else self.embed_proj[2](inner)
        return logits + bias, state


class ConfidenceHead(nn.Module):
    """Estimate that a drafted token is accepted if all before it are (sec. 3.3): a logit w . features + b."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, features: Tensor) -> Tensor:
        """Return float32 logits [..] of features [.., width]."""
        out: Tensor = self.proj(features)[..., 0]
        return out.float()
