"""Model architectures: decoder layers of each model family in a common form, and model information without weights.

Llama, Mistral, Qwen2, Qwen3, Phi-3, OPT and GPT-NeoX support layer access; the layers of all other models are called
whole (`engine/generic_model.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specbench_ss.engine.generic_model import GenericModel, check_generic, unsupported_architecture
from specbench_ss.engine.layers.attention import without_warnings
from specbench_ss.errors import UserError, error_text, first_line


@dataclass(slots=True)
class Block:
    """One decoder layer in parts.

    sequential: x + attention(norm1(x)), then x + mlp(norm2(x)); parallel: both from the same x (GPT-NeoX).
    """

    norm1: nn.Module
    attention: nn.Module
    norm2: Callable[[Tensor], Tensor]
    mlp: Callable[[Tensor], Tensor]
    parallel: bool
    cache_argument: str
    window: int | None  # sliding-window width, None = full attention

    def attend(self, x: Tensor, cache: Any, mask: Tensor | None, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """Return attention's contribution to x [B, q, h], to be added to it."""
        kwargs: dict[str, Any] = {"attention_mask": mask, self.cache_argument: cache}
        if rotary is not None:
            kwargs["position_embeddings"] = rotary
        out: Tensor = self.attention(hidden_states=self.norm1(x), **kwargs)[0]
        return out

    def attend_by_torch(self, x: Tensor, cache: Any, mask: Tensor | None, rotary: Any) -> Tensor:
        """Return the same by the attention function of the model's configuration, whatever kernels the layer has."""
        return Block.attend(self, x, cache, mask, rotary)

    def run_mlp(self, x: Tensor) -> Tensor:
        """Return the MLP's contribution to x [B, q, h]."""
        return self.mlp(self.norm2(x))

    def __call__(self, x: Tensor, cache: Any, mask: Tensor | None, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """Run the whole layer: [B, q, h] -> [B, q, h]."""
        if self.parallel:
            return x + self.attend(x, cache, mask, rotary) + self.run_mlp(x)
        x = x + self.attend(x, cache, mask, rotary)
        return x + self.run_mlp(x)


@dataclass(slots=True)
class ModelParts:
    """A causal LM in parts: embed -> blocks -> norm -> head. whole: the model if its layers are called whole."""

    blocks: list[Any]  # of `Block`, or of `generic_model.HfLayer`
    embed: Callable[[Tensor, Tensor], Tensor]  # ids [B, q], positions [B, q] -> [B, q, h]
    norm: Callable[[Tensor], Tensor]
    head: Any  # nn.Linear or `generic_model.HfHead`
    rotary: nn.Module | None
    generic: GenericModel | None = None

    def modules(self) -> list[nn.Module]:
        """Return one module of each block."""
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
    """Return the sliding-window width of every layer."""
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
    """Return the longest context in which RoPE depends on the position alone.

    LongRoPE changes its factors once a sequence outgrows the original length, so that cached keys no longer match new
    ones: decoding with a cache is not consistent there.
    """
    longest: int | None = getattr(config, "max_position_embeddings", None)
    if longest is None:
        raise unsupported_architecture(config, "its configuration does not state its number of positions")
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]  # one, or one per kind of layer
    originals = [
        r.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
        for r in ropes
        if r.get("rope_type") == "longrope"
    ]
    return min([longest, *(int(length) for length in originals if length)])


LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3", "phi3")  # `layers.fused` supports their layers
_BUILDERS: dict[str, Callable[[Any], ModelParts]] = {
    "opt": _opt,
    "gpt_neox": _gpt_neox,
    **dict.fromkeys(LLAMA_LIKE, _llama_like),
}


LAYER_ACCESS_TYPES = tuple(sorted(_BUILDERS))


SIZES = dict.fromkeys(
    ("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"),
    (1, 1 << 24),
) | {"num_hidden_layers": (1, 1 << 10), "max_position_embeddings": (2, 1 << 30)}  # least and largest value


def check_config(config: Any) -> None:
    """Raise UserError for an architecture that its configuration shows to be unsupported, or for impossible sizes.

    Other models are checked when they are loaded (`generic_model.check_against_hf`).
    """
    kind = config.model_type
    for name, (least, most) in SIZES.items():
        value = getattr(config, name, None)
        for size in value if isinstance(value, list) else [] if value is None else [value]:
            if type(size) is not int or not least <= size <= most:
                raise unsupported_architecture(
                    config, f"its {name} is {size!r:.20}, not a number of {least} to {most:,}"
                )
    if kind == "opt" and not config.do_layer_norm_before:
        raise UserError("OPT with layer norm after attention (opt-350m) is not supported")
    if kind not in _BUILDERS:
        check_generic(config)


def windows_of(config: Any) -> list[int | None]:
    """Return the sliding-window width of every layer, or None for full attention."""
    windowed = _BUILDERS.get(config.model_type, _llama_like) is _llama_like
    layers: int = config.num_hidden_layers
    return _windows(config, layers) if windowed else [None] * layers


def family_of(model: Any) -> ModelParts:
    """Return the parts of a causal LM. Raises UserError for an unsupported architecture."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    check_config(base.config)
    builder = _BUILDERS.get(base.config.model_type)
    return builder(base) if builder else _generic(base)


def _generic(model: Any) -> ModelParts:
    try:
        with without_warnings():
            generic = GenericModel(model, windows_of(model.config))
    except UserError as error:
        raise unsupported_architecture(model.config, str(error)) from error
    except Exception as error:  # from an architecture's own code
        raise unsupported_architecture(
            model.config, f"tracing its layers raises {type(error).__name__}: {first_line(error)}"
        ) from error
    return ModelParts(generic.layers, generic.embed, generic.norm, generic.head, None, generic)


def rotary_table(rotary: nn.Module, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos, sin [length, head_dim] for positions 0..length-1."""
    with torch.no_grad():
        positions = torch.arange(length, device=like.device)[None]
        cos, sin = rotary(like, position_ids=positions)
        return cos[0], sin[0]


THINK = ("<think>", "</think>")  # tags around the thinking of most models
THINK_TAIL = 16  # tokens at the end of a prompt in which a chat template begins it


class ModelInfo:
    """Configuration and tokenizer of a causal LM, without weights. Raises UserError if it is unsupported."""

    def __init__(self, config: Any, tokenizer: Any, name: str, folder: Path | None = None) -> None:
        check_config(config)
        self.config = config
        self.tokenizer = tokenizer
        self.name = name
        self.folder = folder
        self.is_lab = False
        self.device_type = "cpu"  # to run on
        self.bundled_drafters: Path | None = None  # has a folder per method with weights for this model
        self.template_variables: dict[str, Any] = {}  # of the chat template
        self.origin: dict[str, Any] = {}  # source and conversion of the weights, as far as recorded
        self.n_layers: int = config.num_hidden_layers
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self.embedding_size: int = getattr(config, "word_embed_proj_dim", None) or config.hidden_size
        self.context_length = usable_context(config)
        self.windows = windows_of(config)  # sliding-window width of each layer, None = full attention

    @property
    def has_layer_access(self) -> bool:
        """Return True if attention, MLP and norms of its layers can be called one by one."""
        return self.config.model_type in LAYER_ACCESS_TYPES

    @property
    def attention_heads(self) -> tuple[int, int, int]:
        """Return the numbers of query heads and KV heads and the head dimension, from the configuration."""
        heads: int = self.config.num_attention_heads
        kv_heads = getattr(self.config, "num_key_value_heads", None) or heads
        return heads, kv_heads, getattr(self.config, "head_dim", None) or self.hidden_size // heads

    def require_layer_access(self, method: str) -> None:
        """Raise UserError if only whole layers can be called; method: the feature that needs more, for the message."""
        if not self.has_layer_access:
            raise UserError(
                f"{method} needs a model of type {', '.join(LAYER_ACCESS_TYPES)}; "
                f"{self.name!r} has type {self.config.model_type!r}"
            )

    def require_hidden_eq_embedding(self, method: str) -> None:
        """Raise UserError if embeddings and hidden states differ in size; method: joins them, for the message."""
        if self.embedding_size != self.hidden_size:
            raise UserError(
                f"{method} needs a model with equal embedding and hidden sizes; "
                f"{self.name!r} has {self.embedding_size:,} and {self.hidden_size:,}"
            )

    def encode_chat(self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Return the token ids of a conversation with tools, ready for the assistant's answer."""
        if self.tokenizer is None:
            raise UserError(f"model {self.name!r} has no tokenizer")
        if self.tokenizer.chat_template is None:
            raise UserError(f"the tokenizer of {self.name!r} has no chat template")
        ids = list(self.tokenizer(self.chat_text(messages, tools), add_special_tokens=False)["input_ids"])
        if ids and max(ids) >= self.vocab_size:
            raise UserError(
                f"the tokenizer of {self.name!r} gives id {max(ids)}, beyond the {self.vocab_size} of the model"
            )
        return ids

    def chat_text(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Return the chat template filled with a conversation and the definitions of tools.

        Raises UserError if the template rejects it.
        """
        try:
            variables = {"add_generation_prompt": True, "tokenize": False, "tools": list(tools) or None}
            variables |= self.template_variables
            return str(self.tokenizer.apply_chat_template(messages, **variables))
        except Exception as error:  # Jinja's errors and those that a template raises
            roles = ", ".join(message["role"] for message in messages[:6])
            ellipsis = ", ..." if len(messages) > 6 else ""
            message = f"the chat template of {self.name!r} rejects messages of the roles {roles}{ellipsis}"
            raise UserError(f"{message}: {error_text(error)}") from error

    def decode_text(self, ids: Sequence[int]) -> str:
        """Return the text of these ids without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def thinking_tokens(self, prompt: Sequence[int], ids: Sequence[int]) -> int:
        """Return how many tokens of an output come before its answer: up to `</think>`, or all without that tag.

        Thinking begins with `<think>`: at the end of the prompt, where a chat template writes it, or at the start of
        the output. 0 without a tokenizer.
        """
        if self.tokenizer is None:
            return 0
        opened, closed = (self.tokenizer.decode(list(prompt[-THINK_TAIL:])).rfind(tag) for tag in THINK)
        if opened <= closed and not self.tokenizer.decode(list(ids)).lstrip().startswith(THINK[0]):
            return 0
        prefixes = range(len(ids))  # the first one with the whole tag ends the thinking
        return bisect_left(prefixes, True, key=lambda n: THINK[1] in self.tokenizer.decode(list(ids[:n])))

    def bundled_drafter(self, method: str) -> Path | None:
        """Return the folder with a method's weights that came with this model, or None."""
        path = None if self.bundled_drafters is None else self.bundled_drafters / method
        return path if path is not None and path.is_dir() else None
