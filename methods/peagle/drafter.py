"""P-EAGLE's drafter: EAGLE-3's layer over the target's features, and what stands in for features not yet known.

Hui et al. 2026, arXiv:2602.01469. Slot s reads the feature of position s and the token x_{s+1}, and says what x_{s+2}
is. At deeper places a learnt feature and a mask token take their part. Knows tensors, neither trees nor the loop.
Modules are named as published tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from specbench_ss.engine import attention as grouped_attention
from specbench_ss.engine.architectures import Block
from specbench_ss.engine.cpu_kernels import FIRST, ROWS, LeanBlock, Packing, Turn, lean
from specbench_ss.engine.target import AnyCache
from specbench_ss.methods._shared.own_words import OwnWords
from specbench_ss.methods._shared.rotary import Rotary

LAYERS: dict[str, Any] = {"llama": LlamaDecoderLayer, "qwen3": Qwen3DecoderLayer}  # by the type in a configuration


@dataclass(frozen=True, slots=True)
class Shape:
    """What a drafter is, beside the sizes of its layers.

    layers: of the target, whose inputs are the features. depths: places of a step that it was trained on. windows: of
    its own layers, None = all is seen. vocab: words of its own embedding, 0 = the target's is used. draft_vocab: words
    of its LM head. mapped, marked: whether d2t and t2d came with it. The other four as in EAGLE-3's configurations.
    """

    layers: tuple[int, ...]
    depths: int
    mask_token: int
    windows: tuple[int | None, ...]
    draft_vocab: int
    vocab: int = 0
    mapped: bool = False
    marked: bool = False
    fc_bias: bool = False
    feature_norms: bool = False  # fc_norm.*, of each layer's features
    input_norm: bool = False  # one norm over the features of all layers
    residual_normed: bool = False  # norm_before_residual


class Drafter(OwnWords):
    """fc over the features of several layers, D decoder layers of which the first reads tokens too, a norm, an LM head.

    config: sizes of its layers, of a Llama or a Qwen3. words: of the target's vocabulary.
    """

    def __init__(self, shape: Shape, config: PretrainedConfig, words: int) -> None:
        super().__init__()
        config._attn_implementation = grouped_attention.NAME
        self.shape, self.config = shape, config
        h, eps, n = config.hidden_size, config.rms_norm_eps, len(shape.layers)
        self.embed_tokens = nn.Embedding(shape.vocab, h) if shape.vocab else None
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, n * h))
        if shape.feature_norms:
            self.fc_norm = nn.ModuleList([LlamaRMSNorm(h, eps) for _ in range(n)])
        if shape.input_norm:
            self.input_norm = LlamaRMSNorm(n * h, eps)
        self.fc = nn.Linear(n * h, h, shape.fc_bias)
        kind = LAYERS[config.model_type]
        self.layers = nn.ModuleList([kind(config, i) for i in range(config.num_hidden_layers)])
        _widen(self.layers[0], h, eps)
        self.norm = LlamaRMSNorm(h, eps)
        self.make_head(h, shape.draft_vocab, words, shape.mapped, shape.marked)
        self.blocks = [_block(layer, nn.Identity() if i == 0 else None) for i, layer in enumerate(self.layers)]

    def settle(self, rotary: Rotary, pack: Packing) -> None:
        """Prepare for inference: the weights are final. pack: products by a second copy of weights pay."""
        if self.head is not None:  # a drafter with other options shares this one
            return
        weight, turn = self.fc.weight, Turn()
        cos_sin = rotary(torch.arange(FIRST, FIRST + ROWS, device=weight.device)[None], weight.dtype)
        self.blocks = [lean(b, cos_sin, turn, pack) for b in self.blocks if not isinstance(b, LeanBlock)]
        self.settle_head(pack)

    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        """The target's features, one of each layer [B, n, h] -> what a slot reads of them [B, n, h]."""
        s = self.shape
        parts = [norm(f) for norm, f in zip(self.fc_norm, features, strict=True)] if s.feature_norms else features
        x = torch.cat(tuple(parts), -1)
        out: Tensor = self.fc(self.input_norm(x) if s.input_norm else x)
        return out

    def unknown(self) -> Tensor:
        """What a slot reads [1, 1, h] whose feature is not known yet."""
        return self.fuse(self.mask_hidden.chunk(len(self.shape.layers), -1))

    def forward(
        self, tokens: Tensor, state: Tensor, cache: AnyCache, masks: Sequence[Tensor | None], rotary: Any
    ) -> Tensor:
        """Embedded tokens and fused features [B, n, h] of n slots -> their normed states [B, n, h].

        masks: one a layer, None = causal.
        """
        wide: Any = self.layers[0]
        normed, first = wide.hidden_norm(state), self.blocks[0]
        x = normed if self.shape.residual_normed else state
        read = torch.cat((wide.input_layernorm(tokens), normed), -1)  # [B, n, 2 h]
        x = x + first.attend(read, cache, masks[0], rotary)
        x = x + first.feed(x)
        for block, mask in zip(self.blocks[1:], masks[1:], strict=True):
            x = block(x, cache, mask, rotary)
        out: Tensor = self.norm(x)
        return out


def _block(layer: Any, norm: nn.Module | None) -> Block:
    return Block(
        norm or layer.input_layernorm, layer.self_attn, layer.post_attention_layernorm, layer.mlp, False,
        "past_key_values", None,
    )  # fmt: skip


def _widen(layer: Any, hidden: int, eps: float) -> None:
    """Let a layer's attention read a normed token beside a normed feature."""
    for name in ("q_proj", "k_proj", "v_proj"):
        narrow = getattr(layer.self_attn, name)
        setattr(layer.self_attn, name, nn.Linear(2 * hidden, narrow.out_features, narrow.bias is not None))
    layer.hidden_norm = LlamaRMSNorm(hidden, eps)
