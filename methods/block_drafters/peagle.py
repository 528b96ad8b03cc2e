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

import msgspec
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
    check_mask_token,
    mask_token,
    randomize_drafter,
    set_draft_vocab,
    vocabulary_fields,
)
from specbench_ss.methods._shared.drafter_network import FeatureFusion, VocabularyShape, block_of, input_levels

DEPTHS = 8  # draft positions of published drafters
MOST_DEPTHS = 64
LAYERS: dict[str, Any] = {"llama": LlamaDecoderLayer, "qwen3": Qwen3DecoderLayer}  # by model_type
CONFIGS: dict[str, type[PretrainedConfig]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
MASKS = ("mask_token_id", "pard_token", "ptd_token_id")  # the mask token's names; the latter two are vLLM's


@dataclass(frozen=True, slots=True)
class Shape(VocabularyShape):
    """Shape of a drafter without the sizes of its layers."""

    layers: tuple[int, ...]  # target layers whose inputs are read
    depths: int  # draft positions of a step
    mask_token: int
    windows: tuple[int | None, ...]  # sliding windows of its own layers, None = no window
    fc_bias: bool = False
    feature_norms: bool = False  # fc_norm.*, one for each layer's features
    input_norm: bool = False  # one norm over the features of all layers
    residual_normed: bool = False  # norm_before_residual
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
        input_levels(target.n_layers), depths, mask, tuple(windows[:layers]) or (None,) * layers,
        vocab=target.vocab_size * own_embedding, draft_vocab=draft_vocab or target.vocab_size,
        mapped=bool(draft_vocab), marked=bool(draft_vocab),
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


class Proposal(msgspec.Struct, frozen=True):
    """Entry of `proposal_methods` in a speculators configuration."""

    speculative_tokens: int = DEPTHS


class Proposals(msgspec.Struct, frozen=True):
    """`speculators_config`."""

    proposal_methods: list[Proposal] = []


class PEagleFields(speculators.FeatureFields, frozen=True, kw_only=True):
    """Fields of a P-EAGLE config.json in either layout. num_depths: of this project's layout."""

    mask_token_id: int
    speculators_config: Proposals = Proposals()
    num_depths: int | None = None

    @property
    def depths(self) -> int:
        """Return the draft positions of a step: `num_depths` if stated, else the proposed number."""
        proposed = [proposal.speculative_tokens for proposal in self.speculators_config.proposal_methods]
        return self.num_depths if self.num_depths is not None else max(proposed, default=DEPTHS)


def read_fields(config: dict[str, Any]) -> PEagleFields:
    """Return the fields of config.json. Raise UserError if it describes no P-EAGLE drafter."""
    stated = speculators.check_type(config, "peagle")
    mask = next((config[name] for name in MASKS if config.get(name) is not None), None)
    if mask is None and not stated:
        raise UserError("config.json describes no P-EAGLE drafter: it has no mask_token_id")
    nested = config.get("eagle_config")
    flat = {**nested, **config} if isinstance(nested, dict) else config
    return speculators.parse({**flat, "mask_token_id": mask}, PEagleFields)


def _network(config: dict[str, Any], base: ModelInfo, tensors: dict[str, Tensor]) -> Drafter:
    fields = read_fields(config)
    layer = speculators.layer_config(config, "Llama", tuple(CONFIGS), tensors)
    _check_fits(fields, layer, base)
    shape = Shape(
        layers=_inputs(fields, base),
        depths=fields.depths,
        mask_token=fields.mask_token_id,
        windows=_windows(fields, layer),
        **vocabulary_fields(fields.draft_vocab_size, tensors, base),
        fc_bias="fc.bias" in tensors,
        feature_norms=fields.fc_norm or any(name.startswith("fc_norm.") for name in tensors),
        input_norm=fields.norm_before_fc or "input_norm.weight" in tensors,
        residual_normed=fields.norm_before_residual,
    )
    with speculators.describing("layers as Llama has them"):
        return Drafter(shape, CONFIGS[layer.model_type](**speculators.sizes_of(layer)), base.vocab_size)


read_drafter = partial(speculators.read_network, "peagle", _network, lambda config, drafter: ())


def _check_fits(fields: PEagleFields, layer: PretrainedConfig, base: ModelInfo) -> None:
    """Raise UserError for a drafter of another model, or with an impossible mask token or depth."""
    speculators.check_sizes((
        ("hidden size", layer.hidden_size, base.hidden_size),
        ("hidden size", fields.target_hidden_size or base.hidden_size, base.hidden_size),
        ("vocabulary", layer.vocab_size, base.vocab_size),
    ))  # fmt: skip
    check_mask_token(fields.mask_token_id, base, " in config.json")
    most = min(MOST_DEPTHS, base.context_length)
    if not 1 <= fields.depths <= most:
        raise UserError(f"config.json has {fields.depths} tokens drafted a step, it must be 1 to {most}")
    fields.check_norms()


def _inputs(fields: PEagleFields, base: ModelInfo) -> tuple[int, ...]:
    """Return the target layers whose inputs are read. Raise UserError for layers that the base lacks."""
    listed = fields.eagle_aux_hidden_state_layer_ids
    if listed is None:
        return input_levels(base.n_layers)
    speculators.check_layer_ids(listed, f"{speculators.LAYER_IDS} in config.json", base, most=base.n_layers)
    return tuple(listed)


def _windows(fields: PEagleFields, layer: PretrainedConfig) -> tuple[int | None, ...]:
    """Return the layers' sliding windows. Raise UserError for one that would hide draft positions."""
    width = getattr(layer, "sliding_window", None)
    windows = tuple(width if slides else None for slides in speculators.sliding_layers(layer))
    if small := [w for w in windows if w is not None and w < fields.depths]:
        raise UserError(f"sliding_window in config.json is {small[0]}, fewer than the {fields.depths} draft positions")
    return windows


def config_of(drafter: Drafter, base: ModelInfo) -> dict[str, Any]:
    """Return config.json in EAGLE-3's layout, with the mask token also under vLLM's name."""
    shape = drafter.shape
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_layers(drafter, base),
        **speculators.written_features(shape, shape.layers, base),
        "mask_token_id": shape.mask_token,
        "ptd_token_id": shape.mask_token,
        "num_depths": shape.depths,
    }


def speculators_config_of(drafter: Drafter, base: ModelInfo) -> dict[str, Any]:
    """Return config.json in speculators' layout."""
    shape = drafter.shape
    return speculators.written_config(
        "peagle",
        _layers(drafter, base),
        shape.depths,
        base,
        **speculators.written_features(shape, shape.layers, base),
        mask_token_id=shape.mask_token,
        norm_output=False,
        embed_requires_grad=bool(shape.vocab),
    )


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
