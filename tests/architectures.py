"""Tiny random models of architectures that the core does not take apart."""

from __future__ import annotations

from typing import Any

import torch
import transformers as t

VOCAB = 97

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GROUPED = _COMMON | {"intermediate_size": 48, "num_key_value_heads": 2}
_GEMMA = _GROUPED | {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 9}
_EXPERTS = _GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gemma": (t.GemmaConfig, _GROUPED | {"head_dim": 8}),
    "gemma2": (t.Gemma2Config, _GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3_text": (t.Gemma3TextConfig, _GEMMA | {"num_hidden_layers": 4, "sliding_window_pattern": 3}),
    "olmo": (t.OlmoConfig, _GROUPED | {"clip_qkv": 2.0}),
    "olmo2": (t.Olmo2Config, _GROUPED),
    "olmo3": (t.Olmo3Config, _GROUPED | {"sliding_window": 9, "num_hidden_layers": 4}),
    "olmoe": (t.OlmoeConfig, _EXPERTS),
    "qwen2_moe": (t.Qwen2MoeConfig, _EXPERTS | {"shared_expert_intermediate_size": 24}),
    "qwen3_moe": (t.Qwen3MoeConfig, _EXPERTS | {"head_dim": 8}),
    "mixtral": (t.MixtralConfig, _GROUPED | {"num_local_experts": 4, "sliding_window": 9}),
    "granite": (
        t.GraniteConfig,
        _GROUPED | {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5},
    ),
    "gpt2": (t.GPT2Config, {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128}),
    "gpt_bigcode": (t.GPTBigCodeConfig, {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128}),
    "falcon": (t.FalconConfig, _COMMON | {"alibi": False, "new_decoder_architecture": False}),
    "gpt_oss": (
        t.GptOssConfig,
        _GROUPED | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9},
    ),
    "cohere": (t.CohereConfig, _GROUPED | {"logit_scale": 0.5}),
    "cohere2": (t.Cohere2Config, _GROUPED | {"sliding_window": 9, "num_hidden_layers": 4}),
    "stablelm": (t.StableLmConfig, _GROUPED),
    "starcoder2": (t.Starcoder2Config, _GROUPED | {"sliding_window": 9}),
    "gptj": (t.GPTJConfig, {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128, "rotary_dim": 4}),
    "phi": (t.PhiConfig, _COMMON | {"intermediate_size": 48}),
    "phimoe": (t.PhimoeConfig, _GROUPED | {"num_local_experts": 4}),
    "glm": (t.GlmConfig, _GROUPED | {"head_dim": 8}),
    "smollm3": (t.SmolLM3Config, _GROUPED | {"num_hidden_layers": 5, "no_rope_layer_interval": 2}),
    "nemotron": (t.NemotronConfig, _GROUPED),
    "deepseek_v3": (
        t.DeepseekV3Config,
        _GROUPED | {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 24},
    ),
    "ernie4_5": (t.Ernie4_5Config, _GROUPED),
    "codegen": (t.CodeGenConfig, {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128, "rotary_dim": 4}),
    "xglm": (t.XGLMConfig, {"vocab_size": VOCAB, "d_model": 32, "num_layers": 3, "attention_heads": 4, "ffn_dim": 48, "max_position_embeddings": 128}),
    "llama4_text": (t.Llama4TextConfig, _GROUPED),
    "bloom": (t.BloomConfig, {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 3, "n_head": 4}),
    "mpt": (t.MptConfig, {"vocab_size": VOCAB, "d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 128}),
    "gpt_neo": (t.GPTNeoConfig, {"vocab_size": VOCAB, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 9, "max_position_embeddings": 128}),
    "falcon-alibi": (t.FalconConfig, _COMMON | {"alibi": True}),
    "mamba": (t.MambaConfig, {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2}),
    "jamba": (t.JambaConfig, _GROUPED),
    "qwen3_next": (t.Qwen3NextConfig, _GROUPED),
    "gemma3n": (t.Gemma3nTextConfig, _GROUPED | {"num_hidden_layers": 4}),
}  # fmt: skip


def config_of(kind: str) -> Any:
    """The configuration of a tiny model."""
    made, options = CONFIGS[kind]
    return made(**options)


def random_model(kind: str, seed: int = 0) -> Any:
    """A tiny random model in float32, its weights large enough for answers that vary."""
    torch.manual_seed(seed)
    model = t.AutoModelForCausalLM.from_config(config_of(kind)).float().eval()
    for p in model.parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=0.2)
    return model
