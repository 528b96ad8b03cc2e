"""Tiny GGUF files, written on the spot, next to the ordinary models that they should load as."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.methods.train.tokenizers_made import SPECIAL, made_tokenizer

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
HEADS, GROUPS, WIDTH = 4, 2, 64
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TURN_END = "<|im_end|>"


def tokenizer_of(division: str = "smollm") -> Any:
    """Bytes, pairs of them, and ChatML; single digits stand apart where the division states so."""
    from tokenizers import pre_tokenizers as pre

    tokenizer = made_tokenizer("gpt", "chatml")
    if division == "smollm":
        parts = [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = pre.Sequence(parts)
    return tokenizer


def tiny(kind: str, words: int) -> Any:
    """A random llama or qwen2 whose rows are whole blocks of 32."""
    import transformers as t

    config = {"llama": t.LlamaConfig, "qwen2": t.Qwen2Config}[kind](
        vocab_size=words, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS, num_key_value_heads=GROUPS,
        intermediate_size=96, max_position_embeddings=128, bos_token_id=0, eos_token_id=1, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(3)
    model: Any = t.AutoModelForCausalLM.from_config(config)
    for p in model.parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=0.15)
        else:  # norms and biases as after training, which a file in fewer bits stores unrounded
            p.data.add_(torch.randn_like(p) / 10).copy_(p.data.bfloat16())
    return model.eval()


def write(
    path: Path,
    kind: str = "llama",
    type_name: str = "Q8_0",
    division: str = "smollm",
    template: bool = True,
    factors: bool = False,
    **more: int,
) -> Any:
    """Write the file, and return the model with the weights that are left after rounding to `type_name`.

    more: further whole numbers of the file's metadata, by their keys with dots written as two underscores.
    """
    tokenizer = tokenizer_of(division)
    model = tiny(kind, len(tokenizer))
    writer = gguf.GGUFWriter(path, kind)
    _state(writer, model.config, tokenizer, division, template)
    for key, value in more.items():
        writer.add_uint32(key.replace("__", "."), value)
    weights = dict(model.named_parameters())
    for name, p in _names(weights, model.config.num_hidden_layers).items():
        plain = p.ndim == 1
        chosen = gguf.GGMLQuantizationType["F32" if plain else type_name]
        packed = gguf.quants.quantize(_as_written(kind, name, p.detach()).numpy(), chosen)
        rounded = torch.from_numpy(gguf.quants.dequantize(packed, chosen).copy()).float().reshape(p.shape)
        p.data.copy_(_as_read(kind, name, rounded))
        writer.add_tensor(name, packed, raw_dtype=chosen)
    if factors:
        writer.add_tensor("rope_freqs.weight", torch.ones(WIDTH // HEADS // 2).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _state(writer: Any, config: Any, tokenizer: Any, division: str, template: bool) -> None:
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(GROUPS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10000.0)
    bpe = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    words = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(division)
    writer.add_token_list(words)
    writer.add_token_types([3 if word in SPECIAL else 1 for word in words])
    writer.add_token_merges([" ".join(pair) for pair in bpe["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    if template:
        writer.add_chat_template(tokenizer.chat_template)


def _names(weights: dict[str, torch.Tensor], layers: int) -> dict[str, torch.Tensor]:
    """The tensors by the names of the file."""
    named = {
        "token_embd.weight": weights["model.embed_tokens.weight"],
        "output_norm.weight": weights["model.norm.weight"],
    }
    for i in range(layers):
        for short, long in LAYER.items():
            for part in ("weight", "bias"):
                if (p := weights.get(f"model.layers.{i}.{long}.{part}")) is not None:
                    named[f"blk.{i}.{short}.{part}"] = p
    return named


def _turned(kind: str, name: str) -> int:
    """Return the number of heads of the tensor that have their rows in llama.cpp's order: pairs instead of halves."""
    if kind != "llama":
        return 0
    return HEADS if ".attn_q." in name else GROUPS if ".attn_k." in name else 0


def _as_written(kind: str, name: str, p: torch.Tensor) -> torch.Tensor:
    heads = _turned(kind, name)
    if not heads:
        return p
    return p.view(heads, 2, -1, p.shape[-1]).transpose(1, 2).reshape(p.shape).contiguous()


def _as_read(kind: str, name: str, p: torch.Tensor) -> torch.Tensor:
    heads = _turned(kind, name)
    return p.view(heads, -1, 2, p.shape[-1]).transpose(1, 2).reshape(p.shape) if heads else p
