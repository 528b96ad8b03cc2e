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

from specbench_ss.engine import attention as grouped_attention
from specbench_ss.engine.architectures import Block
from specbench_ss.engine.cpu_kernels import FIRST, ROWS, FusedBlock, PrepackedLinear, PrepackFormat, RopeCache, fuse
from specbench_ss.engine.target import FINAL, Target

LENGTH_BOUND_ROPE = ("dynamic", "longrope")  # kinds whose frequencies change with the length of the sequence


def check_rope(config: PretrainedConfig) -> None:
    """Raise ValueError for a RoPE that changes with the sequence length, and for one without finite angles."""
    rope = config.rope_parameters or {}
    kind = rope.get("rope_type")
    if kind in LENGTH_BOUND_ROPE:
        raise ValueError(f"rope of type {kind!r} changes with the length of the text, which no cache survives")
    with torch.device("cpu"):  # a method's `check` makes everything else on the meta device
        made = Rotary(config, torch.device("cpu"))
    if not (bool(made.frequencies.isfinite().all()) and math.isfinite(made.scale)):
        raise ValueError(f"rope of {rope} turns by angles that are not finite")


class Rotary:
    """RoPE cos and sin of any position, whatever maximum length the drafter's configuration states.

    Not a module: its frequencies stay float32 when the drafter is cast.
    """

    def __init__(self, config: PretrainedConfig, device: torch.device) -> None:
        made = LlamaRotaryEmbedding(config)  # type: ignore[arg-type]  # of any model with rope_parameters
        self.frequencies: Tensor = made.inv_freq.to(device)  # [head_dim / 2]
        self.scale = float(made.attention_scaling)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Positions [B, n] -> cos, sin [B, n, head_dim]."""
        angles = positions[..., None].float() * self.frequencies
        angles = torch.cat((angles, angles), -1)
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyShape:
    """Sizes of a drafter's embedding and LM head.

    vocab: rows of the embedding, 0 = use the target's. draft_vocab: rows of the LM head, 0 = use the target's. mapped,
    marked: d2t and t2d are present.
    """

    vocab: int = 0
    draft_vocab: int = 0
    mapped: bool = False
    marked: bool = False


class DrafterNetwork(nn.Module):
    """Base of the drafters: decoder layers, an optional embedding, an optional LM head over a draft vocabulary.

    shape: a `VocabularyShape` with more. The target's id of draft token d is d + d2t[d]; t2d bool [V] marks the
    target's tokens that can be drafted.
    """

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
        self.head: PrepackedLinear | None = None  # the LM head, once weights are final
        self.finalized = False

    def make_head(self, words: int) -> None:
        """Create the LM head, d2t and t2d that the shape names; words: size of the target's vocabulary."""
        shape = self.shape
        self.lm_head = nn.Linear(self.config.hidden_size, shape.draft_vocab, bias=False) if shape.draft_vocab else None
        if shape.draft_vocab and shape.mapped:
            self.register_buffer("d2t", torch.zeros(shape.draft_vocab, dtype=torch.long))
        if shape.draft_vocab and shape.marked:
            self.register_buffer("t2d", torch.zeros(words, dtype=torch.bool))

    def finalize(self, rotary: Rotary, pack: PrepackFormat) -> None:
        """Prepare for inference with final weights; a second call does nothing: variants share one drafter."""
        if not self.finalized:
            self.finalized = True
            weight, turn = self.fc.weight, RopeCache()
            cos_sin = rotary(torch.arange(FIRST, FIRST + ROWS, device=weight.device)[None], weight.dtype)
            self.blocks = [fuse(b, cos_sin, turn, pack) for b in self.blocks if not isinstance(b, FusedBlock)]
            self.head = None if self.lm_head is None else PrepackedLinear(self.lm_head.weight, None, pack)

    def embed(self, tokens: Tensor, target: Target) -> Tensor:
        """Token ids [B, n] -> [B, n, h], by the drafter's embedding or the target's."""
        own = self.embed_tokens
        table: Tensor = target.model.get_input_embeddings().weight if own is None else own.weight
        return F.embedding(tokens, table)

    def logits(self, states: Tensor, target: Target) -> Tensor:
        """Normed states [.., h] -> [.., draft vocabulary], by the drafter's LM head or the target's."""
        if self.lm_head is None:
            return target.logits(states)
        if self.head is not None and torch.is_inference_mode_enabled():
            return self.head(states)
        out: Tensor = self.lm_head(states)
        return out

    @property
    def draft_vocab(self) -> int:
        """Size of the draft vocabulary; 0 = all tokens of the target."""
        return int(self.shape.draft_vocab)

    @property
    def words(self) -> Tensor | None:
        """The target's ids of the draft vocabulary, int64 [draft vocabulary]; None = all, in order."""
        if "d2t" not in self._buffers:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def token_ids(self, drafted: Tensor) -> Tensor:
        """Map draft-vocabulary indices to the target's token ids."""
        return drafted if "d2t" not in self._buffers else drafted + self.d2t[drafted]


class FeatureFusion(DrafterNetwork):
    """EAGLE-3's input: fc over the target's hidden states of several layers, which may be normed before.

    shape: has `feature_norms` (a norm for each layer's), `input_norm` (one norm over all), `residual_normed`.
    """

    def make_fusion(self, features: int, width: int, bias: bool) -> None:
        """Create fc and its norms for so many features of this width."""
        hidden, eps = self.config.hidden_size, self.config.rms_norm_eps
        if self.shape.feature_norms:
            self.fc_norm = nn.ModuleList([LlamaRMSNorm(width, eps) for _ in range(features)])
        if self.shape.input_norm:
            self.input_norm = LlamaRMSNorm(features * width, eps)
        self.fc = nn.Linear(features * width, hidden, bias)

    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        """Hidden states of each target layer [B, n, h_t] -> drafter input [B, n, h]."""
        s = self.shape
        parts = [norm(f) for norm, f in zip(self.fc_norm, features, strict=True)] if s.feature_norms else features
        x = torch.cat(tuple(parts), -1)
        out: Tensor = self.fc(self.input_norm(x) if s.input_norm else x)
        return out

    def attend_wide(self, layer: Any, tokens: Tensor, state: Tensor, cache: Any, mask: Any, rotary: Any) -> Tensor:
        """Run the first layer, whose attention reads a normed token beside a normed state (2 h wide)."""
        normed, block = layer.hidden_norm(state), self.blocks[0]
        read = torch.cat((layer.input_layernorm(tokens), normed), -1)
        x = (normed if self.shape.residual_normed else state) + block.attend(read, cache, mask, rotary)
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

    In a model of fewer than 7 layers: the outputs of the first, middle and last, FINAL for the last one's.
    """
    if n_layers >= 7:  # fewer, and two would be the same
        return 2, n_layers // 2, n_layers - 3
    return _first_middle_last((*range(1, n_layers), FINAL))


def input_levels(n_layers: int) -> tuple[int, ...]:
    """Return `published_levels` without FINAL, for layouts that name inputs of layers; 0 in a model of one layer."""
    return published_levels(n_layers) if n_layers >= 7 else _first_middle_last((*range(1, n_layers),) or (0,))


def _first_middle_last(states: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(states[i] for i in sorted({0, len(states) // 2, len(states) - 1}))
