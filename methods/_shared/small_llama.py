"""Small Llamas with random weights: the lab's base and draft model, and drafters for a user's model."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM

from specbench_ss.engine.architectures import ModelInfo


def new_llama(
    hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int, context: int, special: dict[str, Any]
) -> Any:
    """Return a Llama with random weights in float32 and tied embeddings. special: ids of bos, eos and pad."""
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=ffn,
        vocab_size=vocab,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=special["bos"],
        eos_token_id=special["eos"],
        pad_token_id=special["pad"],
    )
    model: Any = LlamaForCausalLM(config)
    return model.float()


def llama_layer(base: ModelInfo, ffn: int = 0, kv_rows: int = 0) -> LlamaConfig:
    """Return the configuration of a Llama layer of the base's width and heads. ffn, kv_rows: 0 = as in the base.

    It has the base's rotary embedding (without a partial factor) and norm epsilon, if the base has them.
    """
    config, hidden = base.config, base.hidden_size
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    kv_heads = kv_rows // head_dim if kv_rows else getattr(config, "num_key_value_heads", None) or heads
    ffn = ffn or getattr(config, "intermediate_size", None) or getattr(config, "ffn_dim", 0) or 4 * hidden
    shared: dict[str, Any] = {}
    rope, eps = getattr(config, "rope_parameters", None) or {}, getattr(config, "rms_norm_eps", None)
    if "rope_type" in rope:  # the same in all layers
        shared["rope_parameters"] = {k: v for k, v in rope.items() if k != "partial_rotary_factor"}
    if eps is not None:
        shared["rms_norm_eps"] = eps
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=max(1, kv_heads),
        head_dim=head_dim,
        max_position_embeddings=base.context_length,
        **shared,
    )
