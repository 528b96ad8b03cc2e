"""P-EAGLE's drafter: network, new weights, and checkpoints in EAGLE-3's flat layout and in speculators'.

EAGLE-3's layer over the target's hidden states; a learnt state and a mask token replace future positions: Hui et al.
2026, arXiv:2602.01469. Slot s reads the hidden state of position s and the token x_{s+1}, and predicts
x_{s+2}. Modules are named as published tensors: EAGLE-3's, `mask_hidden`, and possibly further `layers.N.*`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from specbench_ss.engine.architectures import ModelInfo
from specbench_ss.engine.target import AnyCache, Target
from specbench_ss.errors import UserError
from specbench_ss.methods._shared import speculators
from specbench_ss.methods._shared.draft_vocabulary import (
    mask_token,
    randomize_drafter,
    set_draft_vocab,
    token_problem,
    vocabulary_fields,
)
from specbench_ss.methods._shared.drafter_config import config_field, optional, read_config_fields, within
from specbench_ss.methods._shared.drafter_network import FeatureFusion, FeatureShape, block_of, input_levels

DEPTHS = 8  # draft positions of published drafters
MOST_DEPTHS = 64
LAYERS: dict[str, Any] = {"llama": LlamaDecoderLayer, "qwen3": Qwen3DecoderLayer}  # by model_type
CONFIGS: dict[str, type[PretrainedConfig]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
MASKS = ("mask_token_id", "pard_token", "ptd_token_id")  # the mask token's names; the latter two are vLLM's


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape(FeatureShape):
    """Shape of a drafter without the sizes of its layers."""

    layers: tuple[int, ...] = config_field(speculators.LAYER_IDS)  # target layers whose inputs are read
    mask_token: int = config_field("mask_token_id", check=token_problem)
    depths: int = config_field("num_depths", DEPTHS)  # draft positions of a step
    windows: tuple[int | None, ...]  # sliding windows of its own layers, None = no window
    fc_bias: bool = False
    first: ClassVar[int] = 0  # the first position that drafts a token

    @property
    def sizes(self) -> tuple[int, int]:
        """Return the smallest and the trained number of depths."""
        return 1, self.depths


class Drafter(FeatureFusion):
    """P-EAGLE network: fc over hidden states of several target layers, D decoder layers, a norm.

    The first layer also reads tokens. config: of its Llama or Qwen3 layers. vocab_size: the target's.
    """

    def __init__(self, shape: Shape, config: PretrainedConfig, vocab_size: int) -> None:
        super().__init__(shape, config)
        h, eps, n = config.hidden_size, config.rms_norm_eps, len(shape.layers)
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, n * h))
        self.make_fusion(n, h, shape.fc_bias)
        kind = LAYERS[config.model_type]
        self.layers = nn.ModuleList([kind(config, i) for i in range(config.num_hidden_layers)])
        first: Any = self.layers[0]  # its attention reads a normed token and a normed hidden state
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(first.self_attn, name)
            setattr(first.self_attn, name, nn.Linear(2 * h, narrow.out_features, narrow.bias is not None))
        first.hidden_norm = LlamaRMSNorm(h, eps)
        self.norm = LlamaRMSNorm(h, eps)
        self.make_head(vocab_size)
        self.blocks = [block_of(layer, nn.Identity() if i == 0 else None) for i, layer in enumerate(self.layers)]

    def mask_state(self) -> Tensor:
        """Return the fused state [1, 1, h] of slots without a hidden state."""
        return self.fuse(self.mask_hidden.chunk(len(self.shape.layers), -1))

    def forward(
        self, tokens: Tensor, state: Tensor, cache: AnyCache, masks: Sequence[Tensor | None], rotary: Any
    ) -> Tensor:
        """Return normed states [B, n, h] of n slots from embedded tokens and fused hidden states [B, n, h].

        masks: one per layer, None = causal.
        """
        x = self.attend_wide(self.layers[0], tokens, state, cache, masks[0], rotary)
        for block, mask in zip(self.blocks[1:], masks[1:], strict=True):
            x = block(x, cache, mask, rotary)
        out: Tensor = self.norm(x)
        return out


# -- new drafters --------------------------------------------------------------------------------------------------


def new_drafter(
    target: Target,
    depths: int,
    layers: int = 1,
    draft_vocab: int = 0,
    mask: int | None = None,
    own_embedding: bool = False,
    windows: Sequence[int | None] = (),
) -> Drafter:
    """Return an untrained drafter of Llama layers. draft_vocab: 0 = all tokens; else the first ones, until set.

    own_embedding: the drafter has an embedding, initialized from the target's.
    """
    table = target.model.get_input_embeddings().weight
    draft_vocab = 0 if draft_vocab >= target.vocab_size else draft_vocab
    mask = mask_token(target, table) if mask is None else mask
    shape = Shape(
        layers=input_levels(target.n_layers), depths=depths, mask_token=mask,
        windows=tuple(windows[:layers]) or (None,) * layers, vocab=target.vocab_size * own_embedding,
        draft_vocab=draft_vocab or target.vocab_size, mapped=bool(draft_vocab), marked=bool(draft_vocab),
    )  # fmt: skip
    drafter = Drafter(shape, LlamaConfig(**speculators.new_sizes(target, layers)), target.vocab_size)
    assert drafter.lm_head is not None
    with torch.no_grad():
        drafter.lm_head.weight.copy_(target.unembed[: shape.draft_vocab])
        if drafter.embed_tokens is not None:
            drafter.embed_tokens.weight.copy_(table)
    if draft_vocab:
        set_draft_vocab(drafter, torch.arange(draft_vocab))
    return drafter


def random_drafter(
    target: Target, layers: int = 2, draft_vocab: int = 0, windows: Sequence[int | None] = ()
) -> Drafter:
    """Return a drafter of five positions with random weights."""
    drafter = new_drafter(target, 5, layers, draft_vocab, own_embedding=layers > 1, windows=windows)
    return randomize_drafter(drafter, target.vocab_size)


# -- checkpoints ---------------------------------------------------------------------------------------------------


def _network(config: dict[str, Any], base: ModelInfo, tensors: dict[str, Tensor]) -> Drafter:
    fields = _fields(config)
    layer = speculators.layer_config(config, "Llama", tuple(CONFIGS), tensors)
    speculators.check_sizes(
        ("hidden size", layer.hidden_size, base.hidden_size),
        ("hidden size", optional(fields, "target_hidden_size", int) or base.hidden_size, base.hidden_size),
        ("vocabulary", layer.vocab_size, base.vocab_size),
    )
    inputs = speculators.layer_ids(fields, speculators.LAYER_IDS, base, input_levels(base.n_layers), most=base.n_layers)
    values = read_config_fields({**fields, speculators.LAYER_IDS: inputs}, Shape, base)
    if problem := within(values["depths"], 1, min(MOST_DEPTHS, base.context_length)):
        raise UserError(f"config.json has {values['depths']} tokens drafted a step, {problem}")
    vocabulary = vocabulary_fields(optional(fields, "draft_vocab_size", int), tensors, base)
    norms = speculators.norm_fields(values, tensors)
    windows = _windows(layer, values["depths"])
    shape = Shape(**values | norms | vocabulary, windows=windows, fc_bias="fc.bias" in tensors)
    with speculators.describing("layers as Llama has them"):
        return Drafter(shape, CONFIGS[layer.model_type](**speculators.sizes_of(layer)), base.vocab_size)


read_drafter = partial(speculators.read_network, "peagle", _network)


def _fields(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of config.json, flat. Raise UserError if it describes no P-EAGLE drafter."""
    stated = speculators.check_type(config, "peagle")
    mask = next((config[name] for name in MASKS if config.get(name) is not None), None)
    if mask is None and not stated:
        raise UserError("config.json describes no P-EAGLE drafter: it has no mask_token_id")
    nested = config.get("eagle_config")
    flat = {**nested, **config} if isinstance(nested, dict) else config
    proposed, depths = speculators.proposed_tokens(flat), optional(flat, "num_depths", int)
    optional(flat, speculators.TYPE, str)
    return {**flat, "mask_token_id": mask, "num_depths": max(proposed, default=DEPTHS) if depths is None else depths}


def _windows(layer: PretrainedConfig, depths: int) -> tuple[int | None, ...]:
    """Return the layers' sliding windows. Raise UserError for one that would hide draft positions."""
    width = getattr(layer, "sliding_window", None)
    windows = tuple(width if slides else None for slides in speculators.sliding_layers(layer))
    if small := [w for w in windows if w is not None and w < depths]:
        raise UserError(f"sliding_window in config.json is {small[0]}, fewer than the {depths} draft positions")
    return windows


def config_of(drafter: Drafter, base: ModelInfo) -> dict[str, Any]:
    """Return config.json in EAGLE-3's layout, with the mask token also under vLLM's name."""
    fields = speculators.feature_fields(drafter.shape, drafter.shape.layers, base)
    depths, mask = fields.pop("num_depths"), {"ptd_token_id": drafter.shape.mask_token}
    return {
        "architectures": ["LlamaForCausalLMEagle3"], **_layers(drafter, base), **fields, **mask, "num_depths": depths,
    }  # fmt: skip


def speculators_config_of(drafter: Drafter, base: ModelInfo) -> dict[str, Any]:
    """Return config.json in speculators' layout."""
    shape = drafter.shape
    fields = speculators.feature_fields(shape, shape.layers, base)
    depths, more = fields.pop("num_depths"), {"norm_output": False, "embed_requires_grad": bool(shape.vocab)}
    return speculators.config_json("peagle", _layers(drafter, base), depths, base, **fields, **more)


vllm_config_of = speculators_config_of


def _layers(drafter: Drafter, base: ModelInfo) -> dict[str, Any]:
    """Return the fields of the drafter's layers."""
    fields = {
        "model_type": drafter.config.model_type,
        **speculators.sizes_of(drafter.config),
        "vocab_size": base.vocab_size,
    }
    windows = drafter.shape.windows
    if widths := {w for w in windows if w is not None}:
        kinds = ["full_attention" if w is None else "sliding_attention" for w in windows]
        fields |= {"sliding_window": max(widths), "use_sliding_window": True, "layer_types": kinds}
    return fields
