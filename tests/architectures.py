"""Tiny random models of architectures that the core does not take apart, and of some that it refuses."""

from __future__ import annotations

from typing import Any

import torch
import transformers as t

from tests.tiny import THOROUGH

VOCAB = 97

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
_GROUPED = _COMMON | {"intermediate_size": 48, "num_key_value_heads": 2}
_WINDOW = _GROUPED | {"sliding_window": 9}
_LOCAL_GLOBAL = {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_GEMMA = _WINDOW | _LOCAL_GLOBAL | {"head_dim": 8, "query_pre_attn_scalar": 8}
_EXPERTS = _GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_GPT = {
    "vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128, "bos_token_id": 1,
    "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip

DRIVEN: dict[str, Any] = {
    "cohere": t.CohereConfig(**_GROUPED, logit_scale=0.5),  # parallel blocks, a scale of logits
    "cohere2": t.Cohere2Config(**_WINDOW | _LOCAL_GLOBAL),  # no positions in global layers
    "deepseek_v3": t.DeepseekV3Config(
        **_GROUPED | {"num_key_value_heads": 4},
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=6,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        moe_intermediate_size=24,
    ),  # keys and values of different widths; a dense layer before those with experts
    "falcon": t.FalconConfig(**_COMMON, alibi=False),  # one key for all heads, attention of its own
    "gemma": t.GemmaConfig(**_GROUPED, head_dim=8),
    "gemma2": t.Gemma2Config(**_GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    "gemma3_text": t.Gemma3TextConfig(**_GEMMA),  # local and global attention with two rope bases
    "glm": t.GlmConfig(**_GROUPED, head_dim=8),
    "gpt2": t.GPT2Config(**_GPT),
    "gpt_bigcode": t.GPTBigCodeConfig(**_GPT),
    "gpt_oss": t.GptOssConfig(
        **_WINDOW | _LOCAL_GLOBAL, head_dim=8, num_local_experts=4, num_experts_per_tok=2
    ),  # attention sinks
    "gptj": t.GPTJConfig(**_GPT, rotary_dim=4),
    "granite": t.GraniteConfig(**_GROUPED, embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.5),
    "mixtral": t.MixtralConfig(**_WINDOW, num_local_experts=4),
    "nemotron": t.NemotronConfig(**_GROUPED),
    "olmo2": t.Olmo2Config(**_GROUPED),
    "olmo3": t.Olmo3Config(**_WINDOW | _LOCAL_GLOBAL),
    "olmoe": t.OlmoeConfig(**_EXPERTS),
    "phi": t.PhiConfig(**_COMMON, intermediate_size=48),
    "phimoe": t.PhimoeConfig(**_GROUPED, num_local_experts=4),
    "qwen3_moe": t.Qwen3MoeConfig(**_EXPERTS, head_dim=8),
    "smollm3": t.SmolLM3Config(**_GROUPED, no_rope_layers=[1, 0, 1]),
    "stablelm": t.StableLmConfig(**_GROUPED),
    "starcoder2": t.Starcoder2Config(**_WINDOW),
}

ALIKE = (
    "cohere",
    "gemma",
    "glm",
    "gpt_bigcode",
    "nemotron",
    "olmo3",
    "olmoe",
    "phimoe",
)  # to others of them, in what counts
TRIED = tuple(DRIVEN) if THOROUGH else tuple(kind for kind in DRIVEN if kind not in ALIKE)

_RECURRENT = "it has recurrent layers"
BY_CONFIGURATION: dict[str, tuple[Any, str]] = {
    "mamba": (t.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2), _RECURRENT),
    "jamba": (t.JambaConfig(**_GROUPED), _RECURRENT),
    "qwen3_next": (t.Qwen3NextConfig(**_GROUPED), _RECURRENT),
    "llama4_text": (t.Llama4TextConfig(**_GROUPED), "layers of the kind chunked_attention"),
    "t5": (t.T5Config(vocab_size=VOCAB, d_model=32), "it has an encoder"),
    "bloom": (t.BloomConfig(vocab_size=VOCAB, hidden_size=32), "does not state its number of positions"),
    "falcon": (t.FalconConfig(**_COMMON, alibi=True), "its layers take 'alibi'"),
    "gemma3": (t.Gemma3Config(), "lacks num_hidden_layers"),
}
AT_LOAD: dict[str, tuple[Any, str]] = {
    "gpt_neo": (
        t.GPTNeoConfig(
            vocab_size=VOCAB, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]],
            window_size=9, max_position_embeddings=128,
        ),
        r"layer 1 \(GPTNeoBlock\) differs from the model's own forward pass by \d",
    ),  # its window counts rows, which in a tree are not places
}  # fmt: skip


def random_model(config: Any, seed: int = 0) -> Any:
    """A tiny random model in float32 with eager attention; its weights are large enough for answers that vary."""
    torch.manual_seed(seed)
    model = t.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    for p in model.parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=0.25)
    return model
