"""DFlash's drafter: a few Qwen3 layers whose keys and values come from the target's features and from a block.

Chen et al. 2026, arXiv:2602.06036. Knows tensors, neither trees nor the loop. Modules are named as published tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.llama.modeling_llama import rotate_half
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm

from specbench_ss.engine import attention
from specbench_ss.engine.architectures import Block
from specbench_ss.engine.cpu_kernels import FIRST, ROWS, LeanBlock, Packing, Product, Turn, lean
from specbench_ss.engine.target import AnyCache, Target
from specbench_ss.methods._shared.own_words import OwnWords
from specbench_ss.methods._shared.rotary import Rotary
from specbench_ss.methods.dflash.sight import Sight


@dataclass(frozen=True, slots=True)
class Shape:
    """What a drafter is, beside the sizes of its layers.

    layers: of the target, whose inputs are the features; -1 = the final, normed state. block: places of a block, the
    root's included. from_anchor: the root's place drafts too. scale: factor on embeddings. vocab: words of its own
    embedding, 0 = the target's is used. draft_vocab: words of its own LM head, 0 = the target's is used. mapped,
    marked: whether d2t and t2d came with that.
    """

    layers: tuple[int, ...]
    block: int
    mask_token: int
    sights: tuple[Sight, ...]
    from_anchor: bool = False
    scale: float = 1.0
    vocab: int = 0
    draft_vocab: int = 0
    mapped: bool = False
    marked: bool = False

    @property
    def first(self) -> int:
        """The first place of a block that drafts a token."""
        return 0 if self.from_anchor else 1


class Drafter(OwnWords):
    """fc over the features of several layers, D layers over context and block, a norm; the target's embedding and head.

    config: sizes of its layers. words: of the target's vocabulary.
    """

    def __init__(self, shape: Shape, config: Qwen3Config, words: int) -> None:
        super().__init__()
        config._attn_implementation = attention.NAME
        self.shape, self.config = shape, config
        h, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = nn.Embedding(shape.vocab, h) if shape.vocab else None
        self.fc = nn.Linear(len(shape.layers) * h, h, bias=False)
        self.hidden_norm = Qwen3RMSNorm(h, eps)
        self.layers = nn.ModuleList([Qwen3DecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = Qwen3RMSNorm(h, eps)
        self.make_head(h, shape.draft_vocab, words, shape.mapped, shape.marked)
        self.blocks = [_block(layer) for layer in self.layers]
        self.injection: tuple[Product, Tensor] | None = None

    def settle(self, rotary: Rotary, pack: Packing) -> None:
        """Prepare for inference: the weights are final. pack: products by a second copy of weights pay."""
        if self.injection is not None:  # a drafter with other options shares this one
            return
        weight, turn = self.fc.weight, Turn()
        cos_sin = rotary(torch.arange(FIRST, FIRST + ROWS, device=weight.device)[None], weight.dtype)
        self.blocks = [lean(b, cos_sin, turn, pack) for b in self.blocks if not isinstance(b, LeanBlock)]
        self.injection = self._injection(pack)
        self.settle_head(pack)

    def embed(self, tokens: Tensor, target: Target) -> Tensor:
        """Token ids [B, n] -> [B, n, h], by its own table or the target's, and scaled."""
        embedded = super().embed(tokens, target)
        return embedded if self.shape.scale == 1 else embedded * self.shape.scale

    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        """The target's features, one of each layer [B, n, h] -> context [B, n, h]."""
        context: Tensor = self.hidden_norm(self.fc(torch.cat(tuple(features), -1)))
        return context

    def inject(self, context: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values [D, B, kv_heads, n, head_dim] of context [B, n, h] in all layers, turned to its positions."""
        product, norm = self.injection or self._injection()
        c, (cos, sin) = self.config, (x[:, :, None, None] for x in rotary)
        rows = product(context).unflatten(-1, (2, len(self.blocks), c.num_key_value_heads, c.head_dim))
        keys, values = rows.unbind(2)  # [B, n, D, kv_heads, head_dim]
        keys = F.rms_norm(keys, (c.head_dim,), eps=c.rms_norm_eps) * norm
        keys = keys * cos + rotate_half(keys) * sin
        return keys.permute(2, 0, 3, 1, 4), values.permute(2, 0, 3, 1, 4)

    def _injection(self, pack: Packing = "") -> tuple[Product, Tensor]:
        """k_proj and v_proj of all layers as one product, and the weights of their k_norm [D, 1, head_dim]."""
        attentions: list[Any] = [layer.self_attn for layer in self.layers]
        parts = [a.k_proj for a in attentions] + [a.v_proj for a in attentions]
        bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts])
        norm = torch.stack([a.k_norm.weight for a in attentions])[:, None]
        weights = [part.weight for part in parts]
        return Product(torch.cat(weights), bias, pack, weights), norm

    def forward(
        self, embedded: Tensor, cache: AnyCache, masks: Sequence[Tensor | None], rotary: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Embedded places of blocks [B, n, h] -> their normed states [B, n, h].

        cache holds the context's keys and values; masks: additive, one a layer, None = everything is seen.
        """
        x = embedded
        for block, mask in zip(self.blocks, masks, strict=True):
            x = block(x, cache, mask, rotary)
        out: Tensor = self.norm(x)
        return out


def _block(layer: Any) -> Block:
    layer.self_attn.is_causal = False
    return Block(
        layer.input_layernorm, layer.self_attn, layer.post_attention_layernorm, layer.mlp, False,
        "past_key_values", None,
    )  # fmt: skip
