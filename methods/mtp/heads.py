"""Multi-token-prediction (MTP) layers: u = Layer(E [N_e(e); N_h(g)]), logits = head(N_out(u)).

Row i reads the embedding e of token x_{i+1} and the target's state g of position i after its final norm, and predicts
x_{i+2}: DeepSeek-V3 (arXiv:2412.19437) sec. 2.2. The decoder layer is transformers' own of the model type. Tensors are
named as in the package speculators; embedding and LM head are the target's.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from specbench_ss.engine.architectures import LLAMA_LIKE, ModelInfo
from specbench_ss.engine.target import AnyCache, Target
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.drafter_network import VocabularyShape, block_of, check_rope
from specbench_ss.methods._shared.small_llama import llama_layer
from specbench_ss.methods.eagle.drafter import Drafter

PARTS = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")  # of a decoder layer
ROUTER_BIAS = "e_score_correction_bias"


@dataclass(frozen=True, slots=True)
class MTPShape(VocabularyShape):
    """Switches of MTP layers, whose sizes are in the configuration of the decoder layer."""

    modules: int = 1  # number of layers, used in turn
    output_normed: bool = True  # the recycled state is N_out(u), not u


def _class_of(config: PretrainedConfig, ending: str) -> Any:
    """Return transformers' class of the model type with this ending of its name, as in Glm4MoeDecoderLayer."""
    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    names = vars(sys.modules[model.__module__]) if model is not None else {}
    found = [
        value for name, value in names.items() if name.endswith(ending) and "Vision" not in name
        and isinstance(value, type) and value.__module__ == model.__module__
    ]  # fmt: skip
    if len(found) != 1:
        raise UserError(f"MTP layers of the model type {config.model_type!r} are not supported")
    return found[0]


def _layer_index(config: PretrainedConfig) -> int:
    """Return an index at which the model type has full attention and the MLP of its last layers."""
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return int(config.num_hidden_layers)
    full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    if not full:
        raise UserError("config.json has no layer with full attention, which an MTP layer has")
    return full[-1]


class MTPLayer(nn.Module):
    """One MTP layer: the norms of embedding and state, their projection, a decoder layer, and the output norm."""

    self_attn: Any
    mlp: Any
    input_layernorm: Any
    post_attention_layernorm: Any

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        hidden, norm = config.hidden_size, _class_of(config, "RMSNorm")
        layer = _class_of(config, "DecoderLayer")(config, _layer_index(config))
        if {name.partition(".")[0] for name in layer.state_dict()} != set(PARTS):
            raise UserError(f"MTP layers of the model type {config.model_type!r} are not supported")
        for name in PARTS:
            setattr(self, name, getattr(layer, name))
        self.self_attn.layer_idx = 0  # each MTP layer has a KV cache of one layer
        self.token_layernorm = norm(hidden, eps=config.rms_norm_eps)
        self.hidden_layernorm = norm(hidden, eps=config.rms_norm_eps)
        self.input_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.final_layernorm = norm(hidden, eps=config.rms_norm_eps)


class MTPDrafter(Drafter):
    """MTP layers; as a drafter of EAGLE's kind it is the first of them."""

    shape: Any

    def __init__(self, shape: MTPShape, config: PretrainedConfig) -> None:
        super().__init__(shape, config)
        self.rotary_embedding = _class_of(config, "RotaryEmbedding")
        check_rope(config, self.rotary_embedding)
        config._experts_implementation = "grouped_mm"  # as transformers chooses when it loads a model
        self.mtp_layers = nn.ModuleList([MTPLayer(config) for _ in range(shape.modules)])
        self.make_head(0)
        self.blocks = [block_of(layer) for layer in self.mtp_layers]

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Convert all tensors but the correction biases of routers, which stay float32 as in transformers."""
        routers: list[Any] = [module for module in self.modules() if ROUTER_BIAS in module._buffers]
        biases = [router._buffers[ROUTER_BIAS] for router in routers]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for router, bias in zip(routers, biases, strict=True):
            router._buffers[ROUTER_BIAS] = bias.to(router._buffers[ROUTER_BIAS].device)
        return self

    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        """Return the final state unchanged."""
        (feature,) = features
        return feature

    def forward(
        self, tokens: Tensor, state: Tensor, cache: AnyCache, mask: Tensor | None, rotary: Any, index: int = 0
    ) -> Tensor:
        """Run layer `index` on embedded tokens and states [B, n, h]; return the states to recycle [B, n, h]."""
        layer: Any = self.mtp_layers[index]
        # vLLM zeroes the embedding of position 0 with DeepSeek's layers; the definition, used here, does not
        x = layer.input_proj(torch.cat((layer.token_layernorm(tokens), layer.hidden_layernorm(state)), -1))
        out: Tensor = self.blocks[index](x, cache, mask, rotary)
        return layer.final_layernorm(out) if self.shape.output_normed else out

    def head_inputs(self, states: Tensor, index: int = 0) -> Tensor:
        """Return the normed states [.., h] of layer `index`."""
        layer: Any = self.mtp_layers[index]
        out: Tensor = states if self.shape.output_normed else layer.final_layernorm(states)
        return out


# -- new heads -----------------------------------------------------------------------------------------------------


def new_layer_config(base: ModelInfo) -> PretrainedConfig:
    """Return the configuration of a new head's layer: the base's with full attention, or a Llama layer of its width."""
    if base.config.model_type not in LLAMA_LIKE:
        return llama_layer(base)
    config: PretrainedConfig = copy.deepcopy(base.config)
    if getattr(config, "sliding_window", None):
        config.sliding_window = None
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"] * len(config.layer_types)
    return config


def new_head(target: Target, modules: int = 1, output_normed: bool = True) -> MTPDrafter:
    """Return an untrained head for a target."""
    return MTPDrafter(MTPShape(modules=modules, output_normed=output_normed), new_layer_config(target))
