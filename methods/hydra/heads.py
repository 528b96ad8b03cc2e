"""Hydra's sequential heads, and the prefix layer of Hydra++. Knows tensors, neither trees nor the loop.

Head i reads the prefix state and the embeddings of the root and of i drafted tokens, (i + 2) h values: Ankner et al.
2024, sec. 3.1; the prefix layer is of sec. 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from specbench_ss.engine import attention as attention_ways
from specbench_ss.engine import attention as grouped_attention
from specbench_ss.engine.architectures import rotary_table
from specbench_ss.engine.attention import Heads
from specbench_ss.engine.target import AnyCache


class ResBlock(nn.Module):
    """R x + SiLU(W x + b), where R is the identity, or a linear map where the width changes."""

    def __init__(self, wide: int, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(wide, hidden)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.res_connection: nn.Module = nn.Identity()
        if wide != hidden:
            self.res_connection = nn.Linear(wide, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """x [m, wide] -> [m, h]."""
        out: Tensor = self.res_connection(x) + F.silu(self.linear(x))
        return out


class Prefix(nn.Module):
    """One Llama layer over the base's states of the whole sequence, with its own keys and values, and its own norm."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        config._attn_implementation = grouped_attention.NAME
        self.config = config
        self.layer = LlamaDecoderLayer(config, 0)
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self._table: tuple[Tensor, Tensor] | None = None  # cos, sin [length, head_dim]: of as many as were asked for

    def settle(self) -> None:
        """Prepare for inference: which way of attention is fastest is measured now, and in no step."""
        weight, c = self.norm.weight, self.config
        assert c.num_key_value_heads and c.head_dim
        heads = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        attention_ways.in_words(Heads(str(weight.device), weight.dtype, *heads))

    def forward(self, x: Tensor, cache: AnyCache, masks: Sequence[Tensor | None], rotary: Any) -> Tensor:
        """States x [B, q, h] with their cos and sin -> [B, q, h]. masks: its one layer's, additive, None = causal."""
        (mask,) = masks
        out: Tensor = self.norm(self.layer(x, attention_mask=mask, past_key_values=cache, position_embeddings=rotary))
        return out

    def rotary(self, places: Tensor, until: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos, sin [1 or B, q, head_dim] at places [1 or B, q], all below `until`."""
        cos, sin = (table[places].to(dtype) for table in self._tables(until, places.device))
        return cos, sin

    def _tables(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """For positions 0..length-1 and more, in float32, whatever the layer was cast to.

        Never for more than the base has: kinds of rope that change with the length do so beyond that.
        """
        table = self._table
        if table is None or len(table[0]) < length or table[0].device != device:
            rotary = LlamaRotaryEmbedding(self.config).to(device)
            most = max(length, self.config.max_position_embeddings)
            table = self._table = rotary_table(rotary, min(2 * length, most), torch.empty(0, device=device))
        return table


class HydraHeads(nn.Module):
    """Heads of `layers` blocks each; prefix: Hydra++.

    own_unembed: LM heads of their own, with a bias; else the base's serves. tied: a head's blocks after the first are
    one block, applied again, as published. Modules are named as the published tensors, but for wrappers:
    hydra_mlp.{i}.{j}, hydra_lm_head.{i}.
    """

    def __init__(
        self,
        heads: int,
        layers: int,
        hidden: int,
        vocab: int,
        prefix: LlamaConfig | None = None,
        own_unembed: bool = True,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.layers = layers

        def plain() -> list[ResBlock]:
            more = layers - 1
            return [ResBlock(hidden, hidden)] * more if tied else [ResBlock(hidden, hidden) for _ in range(more)]

        self.hydra_mlp = nn.ModuleList(
            nn.Sequential(ResBlock((i + 2) * hidden, hidden), *plain()) for i in range(heads)
        )
        self.hydra_lm_head = nn.ModuleList(nn.Linear(hidden, vocab) for _ in range(heads)) if own_unembed else None
        self.prefix = None if prefix is None else Prefix(prefix)

    @property
    def count(self) -> int:
        """Number of heads."""
        return len(self.hydra_mlp)

    def logits(self, head: int, x: Tensor, path: Tensor, shared: Callable[[Tensor], Tensor]) -> Tensor:
        """Prefix states x [1 or m, h], embedded tokens from the root on, path [m, head + 1, h] -> logits [m, V].

        shared: the base's LM head, [.., h] -> [.., V].
        """
        states: Tensor = self.hydra_mlp[head](torch.cat((x.expand(len(path), -1), path.flatten(1)), 1))
        if self.hydra_lm_head is None:
            return shared(states)
        out: Tensor = self.hydra_lm_head[head](states)
        return out


@torch.no_grad()
def start(heads: HydraHeads, unembed: Tensor) -> None:
    """LM heads begin as the base's, the prefix layer as the identity; what reads state and tokens begins random.

    Begun as the identity on the state, heads would first have to forget what it says of the next token: measured on the
    lab, they learn more slowly (docs/methods/hydra.md).
    """
    for head in heads.hydra_lm_head or ():
        own: Any = head
        own.weight.copy_(unembed)
        own.bias.zero_()
    if heads.prefix is not None:
        layer: Any = heads.prefix.layer
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
