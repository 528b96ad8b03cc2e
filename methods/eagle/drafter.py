"""EAGLE drafters: one Llama layer over the target's hidden states.

Slot s reads the hidden state f_s of position s and the token x_{s+1}, and predicts x_{s+2}: EAGLE sec. 4.1,
EAGLE-3 sec. 3.1. Modules are named as published tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from specbench_ss.engine.target import AnyCache, Target
from specbench_ss.methods._shared.draft_vocabulary import randomize_drafter, set_draft_vocab
from specbench_ss.methods._shared.drafter_network import (
    DrafterNetwork,
    FeatureFusion,
    VocabularyShape,
    block_of,
    published_levels,
)
from specbench_ss.methods._shared.small_llama import llama_layer
from specbench_ss.methods._shared.speculators import check_layer

MOST_DEPTH = 64  # levels of a draft tree; each is one pass of the drafter


@dataclass(frozen=True, slots=True)
class Shape(VocabularyShape):
    """Sizes and switches of a drafter, as in its tensors."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    biases: frozenset[str] = frozenset()  # names of the linear layers with a bias
    feature: int = 0  # width of a target layer
    levels: int = 1  # number of target layers that are read
    feature_norms: bool = False  # fc_norm.*, EAGLE-3.1
    input_norm: bool = False  # one norm over all features
    residual_normed: bool = False  # norm_before_residual in speculators' layout
    output_normed: bool = False  # norm_output, EAGLE-3.1: the normed state is fed back
    head_norms: bool = False  # queries and keys are normed head by head, as in Qwen3

    def llama(self, about: dict[str, Any]) -> LlamaConfig:
        """Return the layer's configuration; RoPE, eps and activation come from config.json, `about`.

        Raise UserError or ValueError for unusable values.
        """
        names = ("rms_norm_eps", "hidden_act", "mlp_bias", "rope_parameters", "rope_scaling", "rope_theta")
        values = {name: about[name] for name in names if about.get(name) is not None}
        if "rms_norm_eps" in values:
            values["rms_norm_eps"] = float(values["rms_norm_eps"])
        config = LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.ffn,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            num_hidden_layers=1,
            max_position_embeddings=about.get("max_position_embeddings") or 2048,
            **values,
        )
        check_layer(config)
        return config


class Layer(nn.Module):
    """A Llama layer without an input norm, whose attention input has this width."""

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


class WideLayer(Layer):
    """EAGLE-3's layer, whose attention reads a normed token and a normed state."""

    def __init__(self, config: LlamaConfig, shape: Shape) -> None:
        super().__init__(config, shape, 2 * shape.hidden)
        self.hidden_norm = LlamaRMSNorm(shape.hidden, config.rms_norm_eps)
        self.input_layernorm = LlamaRMSNorm(shape.hidden, config.rms_norm_eps)


class Drafter(DrafterNetwork, ABC):
    """Interface of the EAGLE-1 and EAGLE-3 networks."""

    shape: Shape

    @abstractmethod
    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        """Return the slots' input [B, n, h] from the hidden states of each target layer [B, n, h_t]."""

    @abstractmethod
    def forward(self, tokens: Tensor, state: Tensor, cache: AnyCache, mask: Tensor | None, rotary: Any) -> Tensor:
        """Return output states [B, n, h] of n slots from embedded tokens and states [B, n, h].

        A slot's output replaces the next slot's fused features for drafted positions.
        """


class Eagle1Drafter(Drafter):
    """EAGLE and EAGLE-2: predicts the target's next final hidden state for the target's LM head, or its own."""

    def __init__(self, shape: Shape, config: LlamaConfig, vocab_size: int) -> None:
        super().__init__(shape, config)
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, "fc" in shape.biases)
        self.layers = nn.ModuleList([Layer(config, shape, shape.hidden)])
        self.make_head(vocab_size)
        self.blocks = [block_of(self.layers[0], nn.Identity())]

    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        """Return the one hidden state unchanged."""
        (feature,) = features
        return feature

    def forward(self, tokens: Tensor, state: Tensor, cache: AnyCache, mask: Tensor | None, rotary: Any) -> Tensor:
        """Run fc(token, state), then the layer, which has no norm before its attention."""
        out: Tensor = self.blocks[0](self.fc(torch.cat((tokens, state), -1)), cache, mask, rotary)
        return out


class Eagle3Drafter(FeatureFusion, Drafter):
    """EAGLE-3: hidden states of several layers, and its own norm and LM head. vocab_size: the target's."""

    def __init__(self, shape: Shape, config: LlamaConfig, vocab_size: int) -> None:
        super().__init__(shape, config)
        self.make_fusion(shape.levels, shape.feature, "fc" in shape.biases)
        self.midlayer = WideLayer(config, shape)
        self.norm = LlamaRMSNorm(shape.hidden, config.rms_norm_eps)
        self.make_head(vocab_size)
        self.blocks = [block_of(self.midlayer, nn.Identity())]

    def forward(self, tokens: Tensor, state: Tensor, cache: AnyCache, mask: Tensor | None, rotary: Any) -> Tensor:
        """Run the wide layer, and the norm if its output is fed back normed."""
        out = self.attend_wide(self.midlayer, tokens, state, cache, mask, rotary)
        return self.norm(out) if self.shape.output_normed else out

    def head_inputs(self, states: Tensor, index: int = 0) -> Tensor:
        """Return the normed output states [.., h]."""
        out: Tensor = states if self.shape.output_normed else self.norm(states)
        return out


# -- new drafters --------------------------------------------------------------------------------------------------


def shape_for(target: Target) -> Shape:
    """Return the shape of a layer of the target's width and heads."""
    c = llama_layer(target)
    assert c.num_key_value_heads and c.head_dim
    return Shape(
        c.hidden_size, c.intermediate_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim,
        feature=target.hidden_size,
    )  # fmt: skip


def config_for(target: Target, shape: Shape) -> dict[str, Any]:
    """Return config.json of a drafter of this shape in EAGLE's layout."""
    rope = getattr(target.config, "rope_parameters", None) or {}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": float(rope.get("rope_theta") or 10000.0),
        "max_position_embeddings": target.context_length,
        "vocab_size": target.vocab_size,
    }


def new_eagle(target: Target, draft_vocab: int = 0) -> tuple[Eagle1Drafter, dict[str, Any]]:
    """Return an untrained EAGLE drafter and its config. draft_vocab: 0 = the target's LM head.

    `fc` has no bias, which vLLM would drop. `bias` is stated: in the authors' code a missing one means true.
    """
    reduced = bool(draft_vocab)
    shape = replace(shape_for(target), draft_vocab=draft_vocab, mapped=reduced, marked=reduced)
    config = config_for(target, shape) | {"bias": False}
    return Eagle1Drafter(shape, shape.llama(config), target.vocab_size), config


def new_eagle3(
    target: Target, draft_vocab: int, layers: tuple[int, ...] = ()
) -> tuple[Eagle3Drafter, dict[str, Any], tuple[int, ...]]:
    """Return an untrained EAGLE-3 drafter, its config and the layers it reads. layers: empty = as published.

    Its draft vocabulary is the target's first tokens.
    """
    layers = layers or published_levels(target.n_layers)
    draft_vocab = min(draft_vocab, target.vocab_size)
    shape = replace(shape_for(target), draft_vocab=draft_vocab, mapped=True, marked=True, levels=len(layers))
    config = config_for(target, shape) | {
        "draft_vocab_size": draft_vocab, "target_hidden_size": target.hidden_size, "feature_layers": list(layers)
    }  # fmt: skip
    drafter = Eagle3Drafter(shape, shape.llama(config), target.vocab_size)
    set_draft_vocab(drafter, torch.arange(draft_vocab))
    return drafter, config, layers


def random_eagle(target: Target, reduced: bool = False) -> Eagle1Drafter:
    """Return an EAGLE drafter with random weights. reduced: as for `random_eagle3`."""
    return randomize_drafter(new_eagle(target, target.vocab_size * 3 // 4 * reduced)[0], target.vocab_size)


def random_eagle3(target: Target, reduced: bool = True) -> tuple[Eagle3Drafter, dict[str, Any], tuple[int, ...]]:
    """Return `new_eagle3` with random weights. reduced: with a draft vocabulary that lacks some first tokens."""
    draft_vocab = target.vocab_size * 3 // 4 if reduced else target.vocab_size
    drafter, config, layers = new_eagle3(target, draft_vocab)
    return randomize_drafter(drafter, target.vocab_size), config, layers
