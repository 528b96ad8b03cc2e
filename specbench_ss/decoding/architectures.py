"""Where each architecture keeps its parts, seen as one kind of decoder layer.

Llama, Mistral, Qwen2, Qwen3, Phi-3, OPT and GPT-NeoX are taken apart; of any other, `own_layers.py` calls whole layers.
Knows modules, no method.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specbench_ss.decoding.grouped_attention import without_warnings
from specbench_ss.decoding.own_arguments import Tables
from specbench_ss.decoding.own_layers import own_parts
from specbench_ss.decoding.unknown_types import cannot_be_used, check_unknown
from specbench_ss.errors import UserError, first_line


@dataclass(slots=True)
class Block:
    """One decoder layer, taken apart.

    sequential: x + attention(norm1(x)), then x + mlp(norm2(x)); parallel: both from the same x (GPT-NeoX).
    """

    norm1: nn.Module
    attention: nn.Module
    norm2: nn.Module
    mlp: Callable[[Tensor], Tensor]
    parallel: bool
    cache_argument: str
    window: int | None  # sliding-window width, None = full attention

    def attend(self, x: Tensor, cache: Any, mask: Tensor | None, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """Attention's contribution to x [B, q, h] (to be added to it)."""
        kwargs: dict[str, Any] = {"attention_mask": mask, self.cache_argument: cache}
        if rotary is not None:
            kwargs["position_embeddings"] = rotary
        out: Tensor = self.attention(hidden_states=self.norm1(x), **kwargs)[0]
        return out

    def feed(self, x: Tensor) -> Tensor:
        """The MLP's contribution to x [B, q, h]."""
        return self.mlp(self.norm2(x))

    def __call__(self, x: Tensor, cache: Any, mask: Tensor | None, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """The whole layer: [B, q, h] -> [B, q, h]."""
        if self.parallel:
            return x + self.attend(x, cache, mask, rotary) + self.feed(x)
        x = x + self.attend(x, cache, mask, rotary)
        return x + self.feed(x)


@dataclass(slots=True)
class Family:
    """A causal LM in parts: embed -> blocks -> norm -> head. tables: of a model whose layers are called whole."""

    blocks: list[Any]  # of `Block`, or of `own_layers.OwnLayer`
    embed: Callable[[Tensor, Tensor], Tensor]  # ids [B, q], positions [B, q] -> [B, q, h]
    norm: Callable[[Tensor], Tensor]
    head: Any  # nn.Linear or `own_layers.OwnHead`
    rotary: nn.Module | None
    tables: Tables | None = None

    def modules(self) -> list[nn.Module]:
        """Return a module of each block."""
        return [block.attention if isinstance(block, Block) else block.layer for block in self.blocks]


def _opt_mlp(layer: Any) -> Callable[[Tensor], Tensor]:
    def mlp(x: Tensor) -> Tensor:
        out: Tensor = layer.fc2(layer.activation_fn(layer.fc1(x)))
        return out

    return mlp


def _opt(model: Any) -> Family:
    decoder = model.get_decoder()
    decoder = getattr(decoder, "decoder", decoder)

    def embed(ids: Tensor, positions: Tensor) -> Tensor:
        x = decoder.embed_tokens(ids)
        if decoder.project_in is not None:
            x = decoder.project_in(x)
        out: Tensor = x + torch.nn.Embedding.forward(
            decoder.embed_positions, positions + decoder.embed_positions.offset
        )
        return out

    def norm(x: Tensor) -> Tensor:
        x = decoder.final_layer_norm(x) if decoder.final_layer_norm is not None else x
        return decoder.project_out(x) if decoder.project_out is not None else x

    blocks = [
        Block(la.self_attn_layer_norm, la.self_attn, la.final_layer_norm, _opt_mlp(la), False, "past_key_values", None)
        for la in decoder.layers
    ]
    return Family(blocks, embed, norm, model.get_output_embeddings(), None)


def _gpt_neox(model: Any) -> Family:
    decoder = model.gpt_neox
    parallel = model.config.use_parallel_residual
    blocks = [
        Block(la.input_layernorm, la.attention, la.post_attention_layernorm, la.mlp, parallel, "layer_past", None)
        for la in decoder.layers
    ]
    return Family(
        blocks,
        lambda ids, positions: decoder.embed_in(ids),
        decoder.final_layer_norm,
        model.get_output_embeddings(),
        decoder.rotary_emb,
    )


def _windows(config: Any, layers: int) -> list[int | None]:
    """Sliding-window width of every layer."""
    window = getattr(config, "sliding_window", None)
    if not window or getattr(config, "use_sliding_window", True) is False:
        return [None] * layers
    types = getattr(config, "layer_types", None)
    if not types:
        return [window] * layers
    return [window if kind == "sliding_attention" else None for kind in types]


def _llama_like(model: Any) -> Family:
    decoder = model.get_decoder()
    windows = _windows(model.config, len(decoder.layers))
    blocks = [
        Block(la.input_layernorm, la.self_attn, la.post_attention_layernorm, la.mlp, False, "past_key_values", w)
        for la, w in zip(decoder.layers, windows, strict=True)
    ]
    return Family(
        blocks,
        lambda ids, positions: decoder.embed_tokens(ids),
        decoder.norm,
        model.get_output_embeddings(),
        decoder.rotary_emb,
    )


def usable_context(config: Any) -> int:
    """The longest context in which cos and sin depend on the position alone.

    LongRoPE changes its factors once a sequence outgrows the original length; the keys in the cache are then of another
    kind than the new ones. No cached decoding is consistent there, so it is left out.
    """
    longest: int | None = getattr(config, "max_position_embeddings", None)
    if longest is None:
        raise cannot_be_used(config, "its configuration does not state how many positions it has")
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]  # one, or one for each kind of layer
    originals = [
        r.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
        for r in ropes
        if r.get("rope_type") == "longrope"
    ]
    return min([longest, *(int(one) for one in originals if one)])


LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3", "phi3")  # whose layers `lean_layers` knows
_BUILDERS: dict[str, Callable[[Any], Family]] = {
    "opt": _opt,
    "gpt_neox": _gpt_neox,
    **dict.fromkeys(LLAMA_LIKE, _llama_like),
}


TAKEN_APART = tuple(sorted(_BUILDERS))


def check_config(config: Any) -> None:
    """Raises UserError for an architecture that cannot be used, as far as a model's configuration tells.

    One that is not known here proves itself when it is loaded: `proof.py`.
    """
    kind = config.model_type
    if kind == "opt" and not config.do_layer_norm_before:
        raise UserError("OPT with layer norm after attention (opt-350m) is not supported")
    if kind not in _BUILDERS:
        check_unknown(config)


def windows_of(config: Any) -> list[int | None]:
    """Sliding-window width of every layer; None = full attention. Of other architectures, what is written there."""
    windowed = _BUILDERS.get(config.model_type, _llama_like) is _llama_like
    layers: int = config.num_hidden_layers
    return _windows(config, layers) if windowed else [None] * layers


def family_of(model: Any) -> Family:
    """A causal LM in parts. Raises UserError for an architecture that cannot be used."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    check_config(base.config)
    builder = _BUILDERS.get(base.config.model_type)
    return builder(base) if builder else _any_other(base, usable_context(base.config))


def _any_other(model: Any, context: int) -> Family:
    try:
        with without_warnings():
            parts = own_parts(model, context)
    except UserError as error:
        raise cannot_be_used(model.config, str(error)) from error
    except Exception as error:  # whatever an architecture's code raises where it is called in another way
        raise cannot_be_used(
            model.config, f"observing it raises {type(error).__name__}: {first_line(error)}"
        ) from error
    return Family(parts.layers, parts.embed, parts.norm, parts.head, None, parts.tables)


def rotary_table(rotary: nn.Module, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos, sin [length, head_dim] for positions 0..length-1."""
    with torch.no_grad():
        positions = torch.arange(length, device=like.device)[None]
        cos, sin = rotary(like, position_ids=positions)
        return cos[0], sin[0]
