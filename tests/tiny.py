"""Tiny random models of every supported architecture, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

ARCHITECTURES = ("llama", "mistral", "mistral-window", "qwen2", "qwen3", "phi3", "opt", "gpt_neox")


def paths(parents: Sequence[int]) -> list[list[int]]:
    """The path root..node of every node of a tree."""
    found = [[0]]
    for i, p in enumerate(parents[1:], start=1):
        found.append([*found[p], i])
    return found


def tiny_model(kind: str, seed: int = 0, vocab: int = 61, layers: int = 4, dtype: torch.dtype = torch.float32) -> Any:
    """A random causal LM, 32 wide."""
    import transformers as t

    torch.manual_seed(seed)
    common = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    grouped = dict(common, intermediate_size=48, num_key_value_heads=2)
    config = {
        "llama": lambda: t.LlamaConfig(**grouped),
        "mistral": lambda: t.MistralConfig(**grouped, sliding_window=None),
        "mistral-window": lambda: t.MistralConfig(**grouped, sliding_window=9),
        "qwen2": lambda: t.Qwen2Config(**grouped),
        "qwen3": lambda: t.Qwen3Config(**grouped, head_dim=8),
        "phi3": lambda: t.Phi3Config(**grouped),
        "opt": lambda: t.OPTConfig(**common, ffn_dim=48, word_embed_proj_dim=32),
        "gpt_neox": lambda: t.GPTNeoXConfig(**common, intermediate_size=48),
    }[kind]()
    model = t.AutoModelForCausalLM.from_config(config).to(dtype)
    for p in model.parameters():  # larger weights than the usual start, so that the argmax varies
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=0.15)
    return model
