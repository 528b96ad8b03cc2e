"""Speculative streams of lossless mode: what is trained, and how streams pass a multi-stream-attention (MSA) layer.

Knows the target's blocks, not the loop. Equations of the ACL paper; M main states, S stream states, gamma streams,
N_s MSA layers on top, h hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specbench_ss.errors import UserError
from specbench_ss.family import Block
from specbench_ss.target import Target


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """The shape of trained streams; saved beside their weights.

    adapter_rank R_s: rank of the stream adapter that stands in place of the MLP. init_rank eta: rank of f_eta, 0 =
    identity. prune_rank theta: rank of the early-exit map. prune_layer -1 = N - N_s.
    """

    gamma: int = 4
    n_msa_layers: int = 4
    adapter_rank: int = 8
    init_rank: int = 0
    prune_rank: int = 8
    prune_layer: int = -1

    def __post_init__(self) -> None:
        for name in ("gamma", "n_msa_layers", "adapter_rank", "prune_rank"):
            if getattr(self, name) < 1:
                raise UserError(f"ss: {name} must be at least 1, not {getattr(self, name)}")

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


class Streams(nn.Module):
    """P_j, f_eta and the stream adapters: gamma*h + 2*R_s*h*N_s (+ 2*eta*h) parameters; 2*theta*h more for pruning."""

    def __init__(self, config: StreamConfig, hidden: int) -> None:
        super().__init__()
        c = self.config = config
        self.embedding = nn.Parameter(torch.randn(c.gamma, hidden) * 0.02)  # P_j, eq. 4
        self.down = nn.Parameter(torch.randn(c.n_msa_layers, c.adapter_rank, hidden) * hidden**-0.5)
        self.up = nn.Parameter(torch.zeros(c.n_msa_layers, hidden, c.adapter_rank))
        if c.init_rank:
            self.init_down = nn.Parameter(torch.randn(c.init_rank, hidden) * hidden**-0.5)
            self.init_up = nn.Parameter(torch.zeros(hidden, c.init_rank))
        self.prune_down = nn.Parameter(torch.randn(c.prune_rank, hidden) * hidden**-0.5)
        self.prune_up = nn.Parameter(torch.zeros(hidden, c.prune_rank))

    def insert(self, main: Tensor) -> Tensor:
        """Eq. 4: main [B, m, h] at layer N - N_s -> streams [B, m * gamma, h], the streams of a row side by side."""
        if self.config.init_rank:
            main = main + F.linear(F.linear(main, self.init_down), self.init_up)
        return (main[:, :, None] + self.embedding).flatten(1, 2)

    def adapt(self, layer: int, x: Tensor) -> Tensor:
        """The stream adapter of the layer-th MSA layer, in place of its MLP: [B, r, h] -> [B, r, h]."""
        return F.linear(F.silu(F.linear(x, self.down[layer])), self.up[layer])

    def early_exit(self, x: Tensor) -> Tensor:
        """o_theta (sec. 2.3): the main state at the pruning layer, mapped to what the LM head can read."""
        return x + F.linear(F.linear(x, self.prune_down), self.prune_up)

    def pass_layer(self, layer: int, block: Block, x: Tensor, mains: int, attended: Tensor) -> Tensor:
        """After attention: the first `mains` rows through the frozen MLP, the stream rows through the adapter.

        x [B, r, h] before attention, attended [B, r, h] its contribution.
        """
        source = x if block.parallel else x + attended
        parts = []
        if mains:
            parts.append(block.feed(source[:, :mains]))
        parts.append(self.adapt(layer, block.norm2(source[:, mains:])))
        return x + attended + torch.cat(parts, 1)


def run_msa(target: Target, streams: Streams, x: Tensor, mains: int, cache: Any, mask: Tensor, rotary: Any) -> Tensor:
    """Rows x [B, mains + streams, h] through the top N_s layers, eq. 2."""
    lo, rows = target.n_layers - streams.config.n_msa_layers, x.shape[1]
    masks = [target.windowed(mask, b.window, rows, cache, lo + i) for i, b in enumerate(target.family.blocks[lo:])]
    return run_masked(target, streams, x, mains, cache, masks, rotary)


def run_masked(
    target: Target, streams: Streams, x: Tensor, mains: int, cache: Any, masks: Sequence[Tensor | None], rotary: Any
) -> Tensor:
    """The same with a mask for each of the top N_s layers. mains may be 0: the cache gives keys."""
    lo = target.n_layers - streams.config.n_msa_layers
    for layer, (block, mask) in enumerate(zip(target.family.blocks[lo:], masks, strict=True)):
        x = streams.pass_layer(layer, block, x, mains, block.attend(x, cache, mask, rotary))
    return x


@lru_cache(maxsize=256)
def own_streams(rows: int, gamma: int, device: torch.device) -> Tensor:
    """Bool [rows * gamma, rows * gamma]: stream j of a row sees streams 1..j of that row and no other's."""
    own = torch.ones(gamma, gamma, dtype=torch.bool).tril()
    return torch.kron(torch.eye(rows, dtype=torch.int8), own.to(torch.int8)).bool().to(device)


def stream_visibility(visible: Tensor, gamma: int) -> Tensor:
    """Who sees whom among m main rows and their streams, bool [m + m*gamma, m + m*gamma].

    visible [m, m]: main rows. Stream j of row i sees what row i sees, and streams 1..j of row i; no main row
    sees a stream, no stream one of another row.
    """
    m = visible.shape[0]
    upper = F.pad(visible, (0, m * gamma))
    lower = torch.cat((visible.repeat_interleave(gamma, 0), own_streams(m, gamma, visible.device)), 1)
    return torch.cat((upper, lower))
