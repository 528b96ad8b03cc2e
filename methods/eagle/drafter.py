"""EAGLE drafters: one Llama layer over the target's hidden states.

Slot s reads the hidden state f_s of position s and the token x_{s+1}, and predicts x_{s+2}: EAGLE sec. 4.1,
EAGLE-3 sec. 3.1. Modules are named as published tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from specbench_ss.engine.target import AnyCache, Target
from specbench_ss.methods._shared.draft_vocabulary import randomize_drafter, set_draft_vocab
from specbench_ss.methods._shared.drafter_config import config_field
from specbench_ss.methods._shared.drafter_network import (
    DrafterNetwork,
    FeatureFusion,
    FeatureShape,
    block_of,
    published_levels,
)
from specbench_ss.methods._shared.small_llama import llama_layer
from specbench_ss.methods._shared.speculators import check_layer

SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
MOST_DEPTH = 64  # levels of a draft tree; each is one pass of the drafter


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape(FeatureShape):
    """Switches of a drafter, whose sizes are in the configuration of its layer."""

    biases: frozenset[str] = frozenset()  # names of the linear layers with a bias
    feature: int = 0  # width of a target layer
    levels: int = 1  # number of target layers that are read
    norm_output: bool = config_field("norm_output", False)  # EAGLE-3.1: the normed state is fed back
    head_norms: bool = False  # queries and keys are normed head by head, as in Qwen3


def layer_config(about: Mapping[str, Any], **sizes: Any) -> LlamaConfig:
    """Return the layer's configuration of these sizes; RoPE, eps and activation come from config.json, `about`.

    Raise UserError or ValueError for unusable values.
    """
    names = ("rms_norm_eps", "hidden_act", "mlp_bias", "rope_parameters", "rope_scaling", "rope_theta")
    values = {name: about[name] for name in names if about.get(name) is not None}
    if "rms_norm_eps" in values:
        values["rms_norm_eps"] = float(values["rms_norm_eps"])
    context = about.get("max_position_embeddings") or 2048
    config = LlamaConfig(num_hidden_layers=1, max_position_embeddings=context, **sizes, **values)
    check_layer(config)
    return config


class Layer(nn.Module):
    """A Llama layer without an input norm, whose attention input has this width."""

    def __init__(self, config: LlamaConfig, shape: Shape, width: int) -> None:
        super().__init__()
        attention: Any = Qwen3Attention if shape.head_norms else LlamaAttention
        self.self_attn = attention(config, 0)
        assert config.head_dim and config.num_key_value_heads
        keys = config.num_key_value_heads * config.head_dim
        rows = {"q_proj": config.num_attention_heads * config.head_dim, "k_proj": keys, "v_proj": keys}
        for name, n in rows.items():
            setattr(self.self_attn, name, nn.Linear(width, n, name in shape.biases))
        self.self_attn.o_proj = nn.Linear(rows["q_proj"], config.hidden_size, "o_proj" in shape.biases)
        self.mlp = LlamaMLP(config)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)


class WideLayer(Layer):
    """EAGLE-3's layer, whose attention reads a normed token and a normed state."""

    def __init__(self, config: LlamaConfig, shape: Shape) -> None:
        super().__init__(config, shape, 2 * config.hidden_size)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)


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
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, "fc" in shape.biases)
        self.layers = nn.ModuleList([Layer(config, shape, config.hidden_size)])
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
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.make_head(vocab_size)
        self.blocks = [block_of(self.midlayer, nn.Identity())]

    def forward(self, tokens: Tensor, state: Tensor, cache: AnyCache, mask: Tensor | None, rotary: Any) -> Tensor:
        """Run the wide layer, and the norm if its output is fed back normed."""
        out = self.attend_wide(self.midlayer, tokens, state, cache, mask, rotary)
        return self.norm(out) if self.shape.norm_output else out

    def head_inputs(self, states: Tensor, index: int = 0) -> Tensor:
        """Return the normed output states [.., h]."""
        out: Tensor = states if self.shape.norm_output else self.norm(states)
        return out


# -- new drafters --------------------------------------------------------------------------------------------------


def config_for(target: Target) -> dict[str, Any]:
    """Return config.json, in EAGLE's layout, of a drafter with a layer of the target's width and heads."""
    layer, rope = llama_layer(target), getattr(target.config, "rope_parameters", None) or {}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{name: getattr(layer, name) for name in SIZES[:2]},
        "num_hidden_layers": 1,
        **{name: getattr(layer, name) for name in SIZES[2:]},
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": float(rope.get("rope_theta") or 10000.0),
        "max_position_embeddings": target.context_length,
        "vocab_size": target.vocab_size,
    }


def _new_layer(config: Mapping[str, Any]) -> LlamaConfig:
    return layer_config(config, **{name: config[name] for name in SIZES})


def new_eagle(target: Target, draft_vocab: int = 0) -> tuple[Eagle1Drafter, dict[str, Any]]:
    """Return an untrained EAGLE drafter and its config. draft_vocab: 0 = the target's LM head.

    `fc` has no bias, which vLLM would drop. `bias` is stated: in the authors' code a missing one means true.
    """
    reduced = bool(draft_vocab)
    shape = Shape(feature=target.hidden_size, draft_vocab=draft_vocab, mapped=reduced, marked=reduced)
    config = config_for(target) | {"bias": False}
    return Eagle1Drafter(shape, _new_layer(config), target.vocab_size), config


def new_eagle3(
    target: Target, draft_vocab: int, layers: tuple[int, ...] = ()
) -> tuple[Eagle3Drafter, dict[str, Any], tuple[int, ...]]:
    """Return an untrained EAGLE-3 drafter, its config and the layers it reads. layers: empty = as published.

    Its draft vocabulary is the target's first tokens.
    """
    layers = layers or published_levels(target.n_layers)
    draft_vocab = min(draft_vocab, target.vocab_size)
    words: dict[str, Any] = {"draft_vocab": draft_vocab, "mapped": True, "marked": True}
    shape = Shape(feature=target.hidden_size, levels=len(layers), **words)
    config = config_for(target) | {
        "draft_vocab_size": draft_vocab, "target_hidden_size": target.hidden_size, "feature_layers": list(layers)
    }  # fmt: skip
    drafter = Eagle3Drafter(shape, _new_layer(config), target.vocab_size)
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
