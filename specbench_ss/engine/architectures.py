"""Architectures: the parts of each model family as one kind of decoder layer; a model before its weights.

Llama, Mistral, Qwen2, Qwen3, Phi-3, OPT and GPT-NeoX are taken apart; of any other, `engine/generic_model.py` calls
whole layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specbench_ss.engine.attention import without_warnings
from specbench_ss.engine.generic_model import GenericModel, check_generic, unsupported_architecture
from specbench_ss.errors import UserError, error_text, first_line


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

    def run_mlp(self, x: Tensor) -> Tensor:
        """The MLP's contribution to x [B, q, h]."""
        return self.mlp(self.norm2(x))

    def __call__(self, x: Tensor, cache: Any, mask: Tensor | None, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """The whole layer: [B, q, h] -> [B, q, h]."""
        if self.parallel:
            return x + self.attend(x, cache, mask, rotary) + self.run_mlp(x)
        x = x + self.attend(x, cache, mask, rotary)
        return x + self.run_mlp(x)


@dataclass(slots=True)
class ModelParts:
    """A causal LM in parts: embed -> blocks -> norm -> head. whole: of a model whose layers are called whole."""

    blocks: list[Any]  # of `Block`, or of `generic_model.OwnLayer`
    embed: Callable[[Tensor, Tensor], Tensor]  # ids [B, q], positions [B, q] -> [B, q, h]
    norm: Callable[[Tensor], Tensor]
    head: Any  # nn.Linear or `generic_model.OwnHead`
    rotary: nn.Module | None
    whole: GenericModel | None = None

    def modules(self) -> list[nn.Module]:
        """Return a module of each block."""
        return [block.attention if isinstance(block, Block) else block.layer for block in self.blocks]


def _opt_mlp(layer: Any) -> Callable[[Tensor], Tensor]:
    def mlp(x: Tensor) -> Tensor:
        out: Tensor = layer.fc2(layer.activation_fn(layer.fc1(x)))
        return out

    return mlp


def _opt(model: Any) -> ModelParts:
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
    return ModelParts(blocks, embed, norm, model.get_output_embeddings(), None)


def _gpt_neox(model: Any) -> ModelParts:
    decoder = model.gpt_neox
    parallel = model.config.use_parallel_residual
    blocks = [
        Block(la.input_layernorm, la.attention, la.post_attention_layernorm, la.mlp, parallel, "layer_past", None)
        for la in decoder.layers
    ]
    return ModelParts(
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


def _llama_like(model: Any) -> ModelParts:
    decoder = model.get_decoder()
    windows = _windows(model.config, len(decoder.layers))
    blocks = [
        Block(la.input_layernorm, la.self_attn, la.post_attention_layernorm, la.mlp, False, "past_key_values", w)
        for la, w in zip(decoder.layers, windows, strict=True)
    ]
    return ModelParts(
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
        raise unsupported_architecture(config, "its configuration does not state how many positions it has")
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]  # one, or one for each kind of layer
    originals = [
        r.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
        for r in ropes
        if r.get("rope_type") == "longrope"
    ]
    return min([longest, *(int(one) for one in originals if one)])


LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3", "phi3")  # whose layers `cpu_kernels` knows
_BUILDERS: dict[str, Callable[[Any], ModelParts]] = {
    "opt": _opt,
    "gpt_neox": _gpt_neox,
    **dict.fromkeys(LLAMA_LIKE, _llama_like),
}


TAKEN_APART = tuple(sorted(_BUILDERS))


def check_config(config: Any) -> None:
    """Raise UserError for an architecture that cannot be used, as far as a model's configuration tells.

    One that is not known here proves itself when it is loaded (`generic_model.prove`).
    """
    kind = config.model_type
    if kind == "opt" and not config.do_layer_norm_before:
        raise UserError("OPT with layer norm after attention (opt-350m) is not supported")
    if kind not in _BUILDERS:
        check_generic(config)


def windows_of(config: Any) -> list[int | None]:
    """Sliding-window width of every layer; None = full attention. Of other architectures, what is written there."""
    windowed = _BUILDERS.get(config.model_type, _llama_like) is _llama_like
    layers: int = config.num_hidden_layers
    return _windows(config, layers) if windowed else [None] * layers


def family_of(model: Any) -> ModelParts:
    """A causal LM in parts. Raises UserError for an architecture that cannot be used."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    check_config(base.config)
    builder = _BUILDERS.get(base.config.model_type)
    return builder(base) if builder else _any_other(base)


def _any_other(model: Any) -> ModelParts:
    try:
        with without_warnings():
            whole = GenericModel(model, windows_of(model.config))
    except UserError as error:
        raise unsupported_architecture(model.config, str(error)) from error
    except Exception as error:  # whatever an architecture's code raises where it is called in another way
        raise unsupported_architecture(
            model.config, f"observing it raises {type(error).__name__}: {first_line(error)}"
        ) from error
    return ModelParts(whole.layers, whole.embed, whole.norm, whole.head, None, whole)


def rotary_table(rotary: nn.Module, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos, sin [length, head_dim] for positions 0..length-1."""
    with torch.no_grad():
        positions = torch.arange(length, device=like.device)[None]
        cos, sin = rotary(like, position_ids=positions)
        return cos[0], sin[0]


class ModelInfo:
    """A causal LM by its configuration and tokenizer. Raises UserError for an architecture that is not known."""

    def __init__(self, config: Any, tokenizer: Any, name: str, folder: Path | None = None) -> None:
        check_config(config)
        self.config = config
        self.tokenizer = tokenizer
        self.name = name
        self.folder = folder
        self.is_lab = False
        self.device_type = "cpu"  # that it is to run on
        self.bundled_drafters: Path | None = (
            None  # folder with a folder for each method whose weights came with this model
        )
        self.origin: dict[str, Any] = {}  # where its weights come from, and what was done to them, as far as is known
        self.n_layers: int = config.num_hidden_layers
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self.embedding_size: int = getattr(config, "word_embed_proj_dim", None) or config.hidden_size
        self.context_length = usable_context(config)
        self.windows = windows_of(config)  # sliding-window width of each layer, None = full attention

    @property
    def has_layer_access(self) -> bool:
        """Whether attention, MLP and norms of its layers can be called one by one, not only whole layers."""
        return self.config.model_type in TAKEN_APART

    @property
    def attention_heads(self) -> tuple[int, int, int]:
        """Heads of queries, heads of keys and values, and numbers a head, by the configuration."""
        heads: int = self.config.num_attention_heads
        kv_heads = getattr(self.config, "num_key_value_heads", None) or heads
        return heads, kv_heads, getattr(self.config, "head_dim", None) or self.hidden_size // heads

    def require_layer_access(self, method: str) -> None:
        """Raise UserError, for a method that must enter a layer, where only whole layers can be called."""
        if not self.has_layer_access:
            raise UserError(
                f"{method} enters decoder layers, which it can in models of the types {', '.join(TAKEN_APART)}; "
                f"{self.name!r} is of type {self.config.model_type!r}"
            )

    def require_hidden_eq_embedding(self, method: str) -> None:
        """Raise UserError, for a method that joins embeddings and hidden states, where these are of different sizes."""
        if self.embedding_size != self.hidden_size:
            raise UserError(
                f"{method}: {self.name!r} embeds tokens in {self.embedding_size:,} numbers and computes with "
                f"{self.hidden_size:,}: {method} needs a model where these are the same"
            )

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer."""
        if self.tokenizer is None:
            raise UserError(f"model {self.name!r} has no tokenizer")
        if self.tokenizer.chat_template is None:
            raise UserError(f"the tokenizer of {self.name!r} has no chat template")
        return list(self.tokenizer(self.chat_text(messages), add_special_tokens=False)["input_ids"])

    def chat_text(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the chat template filled with a conversation. Raises UserError where the template refuses it."""
        try:
            return str(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        except Exception as error:  # Jinja's own errors, and whatever a template raises by itself
            roles = ", ".join(message["role"] for message in messages[:6])
            more = ", ..." if len(messages) > 6 else ""
            said = f"the chat template of {self.name!r} refuses messages of the roles {roles}{more}"
            raise UserError(f"{said}: {error_text(error)}") from error

    def decode_text(self, ids: Sequence[int]) -> str:
        """Text of these ids, special tokens left out."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def bundled_drafter(self, method: str) -> Path | None:
        """The folder with a method's weights that came along with this model, if there is one."""
        path = None if self.bundled_drafters is None else self.bundled_drafters / method
        return path if path is not None and path.is_dir() else None
