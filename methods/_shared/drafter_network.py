"""Drafter networks over a target's hidden states: RoPE, feature fusion, optional embedding and LM head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from specbench_ss.engine.architectures import Block
from specbench_ss.engine.layers import attention as grouped_attention
from specbench_ss.engine.layers.fused import PROBE_POSITION, PROBE_ROWS, FusedBlock, RopeCache, fuse
from specbench_ss.engine.layers.linear import PackedDtype, PrepackedLinear
from specbench_ss.engine.target import FINAL, Target
from specbench_ss.methods._shared.draft_vocabulary import DraftVocabulary
from specbench_ss.methods._shared.drafter_config import config_field

LENGTH_BOUND_ROPE = ("dynamic", "longrope")  # RoPE types whose frequencies depend on the sequence length


def check_rope(config: PretrainedConfig, embedding: Any = LlamaRotaryEmbedding) -> None:
    """Raise ValueError for a RoPE that changes with the sequence length, and for one without finite angles.

    embedding: transformers' class of the model type's rotary embedding.
    """
    rope = config.rope_parameters or {}
    kind = rope.get("rope_type")
    if kind in LENGTH_BOUND_ROPE:
        raise ValueError(f"rope of type {kind!r} depends on the sequence length, which invalidates cached keys")
    with torch.device("cpu"):  # a method's `check` runs on the meta device
        rotary = Rotary(config, torch.device("cpu"), embedding)
    if not (bool(rotary.frequencies.isfinite().all()) and math.isfinite(rotary.scale)):
        raise ValueError(f"rope of {rope} has angles that are not finite")


class Rotary:
    """RoPE cos and sin at any position, beyond the maximum length in the drafter's configuration too.

    It is not a module, so that its frequencies stay float32 when the drafter is cast. embedding: transformers' class
    that computes the frequencies from a configuration with `rope_parameters`.
    """

    def __init__(self, config: PretrainedConfig, device: torch.device, embedding: Any = LlamaRotaryEmbedding) -> None:
        computed = embedding(config)
        self.frequencies: Tensor = computed.inv_freq.to(device)  # [rotated dimensions / 2]
        self.scale = float(computed.attention_scaling)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos, sin [B, n, head_dim] at positions [B, n]."""
        angles = positions[..., None].float() * self.frequencies
        angles = torch.cat((angles, angles), -1)
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyShape:
    """Sizes of a drafter's embedding and LM head."""

    vocab: int = 0  # rows of the embedding, 0 = use the target's
    draft_vocab: int = 0  # rows of the LM head, 0 = use the target's
    mapped: bool = False  # d2t is present
    marked: bool = False  # t2d is present


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureShape(VocabularyShape):
    """Norms of EAGLE-3's input and first layer, named as in config.json."""

    norm_before_residual: bool = config_field("norm_before_residual", False)  # the normed state is added to attention
    norm_before_fc: bool = config_field("norm_before_fc", False)  # input_norm, one norm over all features
    fc_norm: bool = config_field("fc_norm", False)  # fc_norm.*, one norm for each feature


class DrafterNetwork(nn.Module):
    """Decoder layers with an optional embedding and LM head, and an optional reduced draft vocabulary.

    shape: a subclass of `VocabularyShape`. d2t and t2d: as in `draft_vocabulary`. rotary_embedding: transformers' class
    of the layers' rotary embedding.
    """

    rotary_embedding: Any = LlamaRotaryEmbedding
    embed_tokens: nn.Embedding | None
    lm_head: nn.Linear | None
    fc: nn.Linear
    d2t: Tensor
    t2d: Tensor

    def __init__(self, shape: Any, config: PretrainedConfig) -> None:
        super().__init__()
        config._attn_implementation = grouped_attention.NAME
        self.shape, self.config = shape, config
        self.embed_tokens = nn.Embedding(shape.vocab, config.hidden_size) if shape.vocab else None
        self.blocks: list[Any] = []
        self.head: PrepackedLinear | None = None  # the LM head, after `finalize`
        self.finalized = False

    def make_head(self, vocab_size: int) -> None:
        """Create the LM head, d2t and t2d that the shape names; vocab_size: the target's."""
        shape = self.shape
        self.lm_head = nn.Linear(self.config.hidden_size, shape.draft_vocab, bias=False) if shape.draft_vocab else None
        if shape.draft_vocab and shape.mapped:
            self.register_buffer("d2t", torch.zeros(shape.draft_vocab, dtype=torch.long))
        if shape.draft_vocab and shape.marked:
            self.register_buffer("t2d", torch.zeros(vocab_size, dtype=torch.bool))

    def finalize(self, rotary: Rotary, pack: PackedDtype) -> None:
        """Prepare for inference with final weights. A second call does nothing: configurations share a drafter."""
        if not self.finalized:
            self.finalized = True
            weight, rope_cache = next(self.parameters()), RopeCache()
            probed = torch.arange(PROBE_POSITION, PROBE_POSITION + PROBE_ROWS, device=weight.device)
            cos_sin = rotary(probed[None], weight.dtype)
            self.blocks = [fuse(b, cos_sin, rope_cache, pack) for b in self.blocks if not isinstance(b, FusedBlock)]
            self.head = None if self.lm_head is None else PrepackedLinear(self.lm_head.weight, None, pack)

    def embed(self, tokens: Tensor, target: Target) -> Tensor:
        """Embed token ids [B, n] by the drafter's embedding or the target's: [B, n, h]."""
        embedding = self.embed_tokens or target.model.get_input_embeddings()
        table: Tensor = embedding.weight
        return F.embedding(tokens, table)

    def head_inputs(self, states: Tensor, index: int = 0) -> Tensor:
        """Return the LM head's inputs [.., h] for output states [.., h]. index: of the layer they come from."""
        return states

    def logits(self, states: Tensor, target: Target, index: int = 0, rows: Sequence[PrepackedLinear] = ()) -> Tensor:
        """Return logits [.., draft vocabulary] of output states [.., h], by the drafter's LM head or the target's.

        rows: of `draft_vocabulary.head_rows`, which replace the LM head. index: as of `head_inputs`.
        """
        inputs = self.head_inputs(states, index)
        if rows:
            return rows[0](inputs)
        if self.lm_head is None:
            return target.logits(inputs)
        if self.head is not None and torch.is_inference_mode_enabled():
            return self.head(inputs)
        out: Tensor = self.lm_head(inputs)
        return out

    def lm_heads(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return weight and bias of the drafter's own LM head, if any."""
        return [] if self.lm_head is None else [(self.lm_head.weight, None)]

    @property
    def draft_vocab(self) -> int:
        """Return the size of the draft vocabulary; 0 = all tokens of the target."""
        return int(self.shape.draft_vocab)

    @property
    def vocab_ids(self) -> Tensor | None:
        """Return the target's ids of the draft vocabulary, int64 [draft vocabulary]; None = all, in order."""
        if "d2t" not in self._buffers:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def vocabulary(self, vocab: int) -> DraftVocabulary:
        """Return the drafter's own draft vocabulary for a target with this many tokens."""
        return DraftVocabulary(vocab, self.vocab_ids)


class FeatureFusion(DrafterNetwork):
    """EAGLE-3's input: fc over hidden states of several target layers, with optional norms. shape: a FeatureShape."""

    def make_fusion(self, features: int, width: int, bias: bool) -> None:
        """Create fc and its norms for this number of features of this width."""
        hidden, eps = self.config.hidden_size, self.config.rms_norm_eps
        if self.shape.fc_norm:
            self.fc_norm = nn.ModuleList([LlamaRMSNorm(width, eps) for _ in range(features)])
        if self.shape.norm_before_fc:
            self.input_norm = LlamaRMSNorm(features * width, eps)
        self.fc = nn.Linear(features * width, hidden, bias)

    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        """Return the drafter input [B, n, h] from the hidden states of each target layer [B, n, h_t]."""
        s = self.shape
        parts = [norm(f) for norm, f in zip(self.fc_norm, features, strict=True)] if s.fc_norm else features
        x = torch.cat(tuple(parts), -1)
        out: Tensor = self.fc(self.input_norm(x) if s.norm_before_fc else x)
        return out

    def attend_wide(self, layer: Any, tokens: Tensor, state: Tensor, cache: Any, mask: Any, rotary: Any) -> Tensor:
        """Run the first layer, whose attention reads a normed token and a normed state (2 h wide)."""
        normed, block = layer.hidden_norm(state), self.blocks[0]
        wide = torch.cat((layer.input_layernorm(tokens), normed), -1)
        x = (normed if self.shape.norm_before_residual else state) + block.attend(wide, cache, mask, rotary)
        out: Tensor = x + block.run_mlp(x)
        return out


def block_of(layer: Any, norm: nn.Module | None = None) -> Block:
    """Return a decoder layer for the layer driver; norm: replaces its input norm."""
    return Block(
        norm or layer.input_layernorm, layer.self_attn, layer.post_attention_layernorm, layer.mlp, False,
        "past_key_values", None,
    )  # fmt: skip


# -- target layers that EAGLE-3 and P-EAGLE read -------------------------------------------------------------------


def published_levels(n_layers: int) -> tuple[int, ...]:
    """Return the layers whose inputs EAGLE-3 reads: 2, N/2, N - 3.

    With fewer than 7 layers: the outputs of the first, middle and last layer (FINAL).
    """
    if n_layers >= 7:  # with fewer, two would be the same
        return 2, n_layers // 2, n_layers - 3
    return _first_middle_last((*range(1, n_layers), FINAL))


def input_levels(n_layers: int) -> tuple[int, ...]:
    """Return `published_levels` without FINAL, for layouts that name layer inputs; 0 for a model of one layer."""
    return published_levels(n_layers) if n_layers >= 7 else _first_middle_last((*range(1, n_layers),) or (0,))


def _first_middle_last(states: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(states[i] for i in sorted({0, len(states) // 2, len(states) - 1}))
