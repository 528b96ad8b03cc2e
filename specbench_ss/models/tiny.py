"""Tiny random models of every supported architecture, with an in-memory tokenizer."""

from __future__ import annotations

import string
from collections.abc import Callable
from typing import Any

import torch
import transformers as t
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from torch import nn
from transformers import PreTrainedTokenizerFast

from specbench_ss.engine.target import Target

ARCHITECTURES = ("llama", "mistral", "mistral-window", "qwen2", "qwen3", "phi3", "opt", "gpt_neox")
WHOLE = ("gemma3_text", "gpt2")  # models without layer access
SPECIAL = ("<pad>", "<s>", "</s>")  # ids 0, 1, 2
CONTEXT = 128
LETTERS = string.ascii_letters + "".join(map(chr, range(0xC0, 0x100)))  # enough for pairs of 10,000 tokens


def tiny_model(
    kind: str,
    seed: int = 0,
    vocab: int = 61,
    layers: int = 4,
    dtype: torch.dtype = torch.float32,
    context: int = CONTEXT,
) -> Any:
    """Return a random causal LM with hidden size 32 and 128 positions. kind: one of ARCHITECTURES or WHOLE."""
    common: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "max_position_embeddings": context,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    grouped = dict(common, intermediate_size=48, num_key_value_heads=2)
    configs: dict[str, Callable[[], Any]] = {
        "llama": lambda: t.LlamaConfig(**grouped),
        "mistral": lambda: t.MistralConfig(**grouped, sliding_window=None),
        "mistral-window": lambda: t.MistralConfig(**grouped, sliding_window=9),
        "qwen2": lambda: t.Qwen2Config(**grouped),
        "qwen3": lambda: t.Qwen3Config(**grouped, head_dim=8),
        "phi3": lambda: t.Phi3Config(**grouped),
        "opt": lambda: t.OPTConfig(**common, ffn_dim=48, word_embed_proj_dim=32),
        "gpt_neox": lambda: t.GPTNeoXConfig(**common, intermediate_size=48),
        "gemma3_text": lambda: t.Gemma3TextConfig(
            **grouped,
            head_dim=8,
            query_pre_attn_scalar=8,
            sliding_window=9,
            layer_types=["full_attention" if i % 2 else "sliding_attention" for i in range(layers)],
        ),
        "gpt2": lambda: t.GPT2Config(**common),
    }
    config = configs[kind]()
    torch.manual_seed(seed)
    model = t.AutoModelForCausalLM.from_config(config).to(dtype)
    for p in model.parameters():  # larger than the usual initialisation, so that the argmax varies
        if p.ndim > 1:
            nn.init.normal_(p, std=0.15)
    return model


def tiny_tokenizer(words: int) -> Any:
    """Return a byte-pair tokenizer with this many tokens: three special ones, letters, and pairs of letters."""
    n_text = words - len(SPECIAL)
    letters = list(LETTERS[: n_text - n_text // 4])
    pairs = [(a, b) for a in letters for b in letters if a != b][: n_text - len(letters)]
    texts = [*SPECIAL, *letters, *(a + b for a, b in pairs)]
    bpe = Tokenizer(BPE(vocab={text: i for i, text in enumerate(texts)}, merges=pairs))
    bpe.decoder = decoders.Fuse()
    pad, start, end = SPECIAL
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token=pad, bos_token=start, eos_token=end)


def tiny_target(kind: str, words: int = 11, layers: int = 4, seed: int = 0, context: int = CONTEXT) -> Target:
    """Return a tiny model on the CPU, in float32, with its tokenizer."""
    model = tiny_model(kind, seed, words, layers, context=context)
    return Target(model, tiny_tokenizer(words), f"tiny {kind}")


def randomise(module: nn.Module, seed: int, std: float = 0.3) -> None:
    """Set random weights, reproducible by seed, so that an untrained drafter drafts something."""
    generator = torch.Generator().manual_seed(seed)
    for p in module.parameters():
        nn.init.normal_(p, std=std, generator=generator)
