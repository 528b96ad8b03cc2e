"""EAGLE's drafter: one Llama layer over the target's features. Knows tensors, neither trees nor the loop.

Slot s reads the feature f_s of position s and the token x_{s+1} after it, and says what follows: EAGLE sec. 4.1,
EAGLE-3 sec. 3.1. Modules are named as the published tensors are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from specbench_ss.engine import attention as grouped_attention
from specbench_ss.engine.architectures import Block
from specbench_ss.engine.cpu_kernels import FIRST, ROWS, LeanBlock, Packing, Product, Turn, lean
from specbench_ss.engine.target import AnyCache, Target
from specbench_ss.methods._shared.layer_configs import check_layer
from specbench_ss.methods._shared.rotary import Rotary


@dataclass(frozen=True, slots=True)
class Shape:
    """What a drafter is made of, sizes as in its tensors.

    vocab: words of its embedding, 0 = the target's embedding is used; draft_vocab: of EAGLE-3's own LM head. levels:
    features a position of EAGLE-3, each `feature` wide. biases: linear layers that have one, by their names.
    """

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    biases: frozenset[str] = frozenset()
    vocab: int = 0
    draft_vocab: int = 0
    feature: int = 0
    levels: int = 1
    feature_norms: bool = False  # fc_norm.*, EAGLE-3.1
    input_norm: bool = False  # one norm over all features
    residual_normed: bool = False  # norm_before_residual of speculators' configurations
    output_normed: bool = False  # norm_output, EAGLE-3.1: the state that is fed back is the normed one
    head_norms: bool = False  # queries and keys are normed head by head, as in Qwen3

    def llama(self, about: dict[str, Any]) -> LlamaConfig:
        """The layer's configuration; what tensors do not say (rope, eps, activation) is `about`'s.

        Raises UserError or ValueError for what no layer can be computed with, such as an eps that is no number.
        """
        names = ("rms_norm_eps", "hidden_act", "mlp_bias")
        kept = {k: v for k, v in about.items() if k in names and v is not None}
        if "rms_norm_eps" in kept:
            kept["rms_norm_eps"] = float(kept["rms_norm_eps"])
        for name in ("rope_parameters", "rope_scaling", "rope_theta"):
            if about.get(name) is not None:
                kept[name] = about[name]
        config = LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.ffn,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            num_hidden_layers=1,
            max_position_embeddings=about.get("max_position_embeddings") or 2048,
            **kept,
        )
        check_layer(config)
        config._attn_implementation = grouped_attention.NAME
        return config


class Layer(nn.Module):
    """A Llama layer that reads `width` numbers a row in its attention and adds to `hidden` of them."""

    def __init__(self, config: LlamaConfig, shape: Shape, width: int) -> None:
        super().__init__()
        attention: Any = Qwen3Attention if shape.head_norms else LlamaAttention
        self.self_attn = attention(config, 0)
        rows = {"q_proj": shape.heads * shape.head_dim, "k_proj": shape.kv_heads * shape.head_dim}
        rows["v_proj"] = rows["k_proj"]
        for name, n in rows.items():
            setattr(self.self_attn, name, nn.Linear(width, n, name in shape.biases))
        self.self_attn.o_proj = nn.Linear(rows["q_proj"], shape.hidden, "o_proj" in shape.biases)
        self.mlp = LlamaMLP(config)
        self.post_attention_layernorm = LlamaRMSNorm(shape.hidden, config.rms_norm_eps)
        self.block = Block(
            nn.Identity(), self.self_attn, self.post_attention_layernorm, self.mlp, False, "past_key_values", None
        )

    def settle(self, rotary: Rotary, pack: Packing) -> None:
        """Compute lean in inference from now on. pack: the weights are final, and products by a second copy pay."""
        if not isinstance(self.block, LeanBlock):
            device, dtype = self.self_attn.q_proj.weight.device, self.self_attn.q_proj.weight.dtype
            cos_sin = rotary(torch.arange(FIRST, FIRST + ROWS, device=device)[None], dtype)
            self.block = lean(self.block, cos_sin, Turn(), pack)

    def run(self, x: Tensor, residual: Tensor, cache: AnyCache, mask: Tensor | None, rotary: Any) -> Tensor:
        """x [B, n, width] what attention reads, residual [B, n, h] what it is added to -> [B, n, h]."""
        residual = residual + self.block.attend(x, cache, mask, rotary)
        return residual + self.block.feed(residual)


class WideLayer(Layer):
    """EAGLE-3's: its attention reads a normed token beside a normed state."""

    def __init__(self, config: LlamaConfig, shape: Shape) -> None:
        super().__init__(config, shape, 2 * shape.hidden)
        self.hidden_norm = LlamaRMSNorm(shape.hidden, config.rms_norm_eps)
        self.input_layernorm = LlamaRMSNorm(shape.hidden, config.rms_norm_eps)


class Drafter(nn.Module, ABC):
    """What the three methods ask of either kind."""

    embed_tokens: nn.Embedding | None

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden) if shape.vocab else None

    def settle(self, rotary: Rotary, pack: Packing) -> None:
        """Prepare for inference: the weights are final. pack: as in `Layer.settle`."""
        self.layer.settle(rotary, pack)

    @property
    @abstractmethod
    def layer(self) -> Layer:
        """Its one decoder layer."""

    def embed(self, tokens: Tensor, target: Target) -> Tensor:
        """Token ids [B, n] -> [B, n, h], by its own table or the target's."""
        own = self.embed_tokens
        table: Tensor = target.model.get_input_embeddings().weight if own is None else own.weight
        return F.embedding(tokens, table)

    @abstractmethod
    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        """The target's features, one of each level [B, n, h_t] -> what a slot reads of them [B, n, h]."""

    @abstractmethod
    def forward(self, tokens: Tensor, state: Tensor, cache: AnyCache, mask: Tensor | None, rotary: Any) -> Tensor:
        """Embedded tokens and states [B, n, h] of n slots -> their output states [B, n, h].

        The output of a slot stands in for the feature of the next one where that is not known.
        """

    @abstractmethod
    def logits(self, state: Tensor, target: Target) -> Tensor:
        """Output states [.., h] -> [.., draft vocabulary]."""

    @property
    @abstractmethod
    def draft_vocab(self) -> int:
        """Words that it can draft; 0 = all of the target's."""

    def token_ids(self, drafted: Tensor) -> Tensor:
        """Indices into the draft vocabulary -> the target's token ids."""
        return drafted


class Eagle1Drafter(Drafter):
    """EAGLE and EAGLE-2: predicts the target's next final state, which the target's LM head reads."""

    def __init__(self, shape: Shape, config: LlamaConfig) -> None:
        super().__init__(shape)
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, "fc" in shape.biases)
        self.layers = nn.ModuleList([Layer(config, shape, shape.hidden)])

    @property
    def layer(self) -> Layer:
        """Its one decoder layer."""
        (layer,) = self.layers
        assert isinstance(layer, Layer)
        return layer

    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        """The feature itself."""
        (feature,) = features
        return feature

    def forward(self, tokens: Tensor, state: Tensor, cache: AnyCache, mask: Tensor | None, rotary: Any) -> Tensor:
        """fc(token, feature), then the layer, which has no norm before its attention."""
        x = self.fc(torch.cat((tokens, state), -1))
        return self.layer.run(x, x, cache, mask, rotary)

    def logits(self, state: Tensor, target: Target) -> Tensor:
        """The target's LM head."""
        return target.logits(state)

    @property
    def draft_vocab(self) -> int:
        """All words."""
        return 0


class Eagle3Drafter(Drafter):
    """EAGLE-3: features of several levels, its own norm and LM head over the most frequent words.

    d2t int64 [draft vocabulary]: the target's id is d + d2t[d]. t2d bool [V]: which of the target's words are drafted.
    """

    d2t: Tensor

    def __init__(self, shape: Shape, config: LlamaConfig, mapped: bool = True, marked: int = 0) -> None:
        """mapped: it has d2t; marked: length of t2d, which only training asks for, 0 = it has none."""
        super().__init__(shape)
        eps, width = config.rms_norm_eps, shape.levels * shape.feature
        if shape.feature_norms:
            self.fc_norm = nn.ModuleList([LlamaRMSNorm(shape.feature, eps) for _ in range(shape.levels)])
        if shape.input_norm:
            self.input_norm = LlamaRMSNorm(width, eps)
        self.fc = nn.Linear(width, shape.hidden, "fc" in shape.biases)
        self.midlayer = WideLayer(config, shape)
        self.norm = LlamaRMSNorm(shape.hidden, eps)
        self.lm_head = nn.Linear(shape.hidden, shape.draft_vocab, bias=False)
        self.head: Product | None = None
        self.mapped = mapped
        if mapped:
            self.register_buffer("d2t", torch.zeros(shape.draft_vocab, dtype=torch.long))
        if marked:
            self.register_buffer("t2d", torch.zeros(marked, dtype=torch.bool))

    def settle(self, rotary: Rotary, pack: Packing) -> None:
        """Prepare for inference: the weights are final. pack: as in `Layer.settle`."""
        super().settle(rotary, pack)
        if self.head is None:  # a drafter with other options shares this one
            self.head = Product(self.lm_head.weight, None, pack)

    @property
    def layer(self) -> Layer:
        """Its one decoder layer."""
        return self.midlayer

    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        """fc over all levels; normed one by one, or together, where the checkpoint has such norms."""
        s = self.shape
        parts = [norm(f) for norm, f in zip(self.fc_norm, features, strict=True)] if s.feature_norms else features
        x = torch.cat(tuple(parts), -1)
        out: Tensor = self.fc(self.input_norm(x) if s.input_norm else x)
        return out

    def forward(self, tokens: Tensor, state: Tensor, cache: AnyCache, mask: Tensor | None, rotary: Any) -> Tensor:
        """Attention reads the normed token beside the normed state, twice as wide; the residual is the state's."""
        layer, normed = self.midlayer, self.midlayer.hidden_norm(state)
        x = torch.cat((layer.input_layernorm(tokens), normed), -1)
        out = layer.run(x, normed if self.shape.residual_normed else state, cache, mask, rotary)
        return self.norm(out) if self.shape.output_normed else out

    def logits(self, state: Tensor, target: Target) -> Tensor:
        """Its own head, over the draft vocabulary."""
        normed = state if self.shape.output_normed else self.norm(state)
        if self.head is not None and torch.is_inference_mode_enabled():
            return self.head(normed)
        out: Tensor = self.lm_head(normed)
        return out

    @property
    def draft_vocab(self) -> int:
        """Of the head."""
        return self.shape.draft_vocab

    def token_ids(self, drafted: Tensor) -> Tensor:
        """By d2t, where there is one."""
        return drafted + self.d2t[drafted] if self.mapped else drafted
