"""Small Llamas from nothing, and their loss: the lab's base and draft, and drafts for a user's model."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor


def new_llama(
    hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int, context: int, special: dict[str, Any]
) -> Any:
    """A freshly initialised Llama in float32, embeddings tied. special: ids of bos, eos and pad."""
    from transformers import LlamaConfig, LlamaForCausalLM

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


def weighted_loss(logits: Tensor, labels: Tensor, weights: Tensor, whole: Tensor | None = None) -> Tensor:
    """Cross-entropy [B, T, V] against [B, T], averaged with per-token weights [B, T].

    whole: the weights of the batch that these are a share of.
    """
    loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none")
    return (loss * weights.flatten()).sum() / (weights if whole is None else whole).sum().clamp_min(1e-6)
