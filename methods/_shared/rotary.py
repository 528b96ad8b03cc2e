"""Rotary embedding of drafters that are given positions, whatever length their configuration speaks of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig

LENGTH_BOUND_ROPE = ("dynamic", "longrope")  # kinds whose frequencies change with the length of the sequence


def check_rope(config: PretrainedConfig) -> None:
    """Raises ValueError for a kind of rope that changes with the length of the text."""
    kind = (config.rope_parameters or {}).get("rope_type")
    if kind in LENGTH_BOUND_ROPE:
        raise ValueError(f"rope of type {kind!r} changes with the length of the text, which no cache survives")


class Rotary:
    """cos and sin of any position, computed when asked for: published drafters say 2048 positions and meet more.

    No module: its frequencies stay float32 when the drafter is cast.
    """

    def __init__(self, config: PretrainedConfig, device: torch.device) -> None:
        made = LlamaRotaryEmbedding(config)  # type: ignore[arg-type]  # of any model with rope_parameters
        self.frequencies: Tensor = made.inv_freq.to(device)  # [head_dim / 2]
        self.scale = float(made.attention_scaling)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Positions [B, n] -> cos, sin [B, n, head_dim]."""
        angles = positions[..., None].float() * self.frequencies
        angles = torch.cat((angles, angles), -1)
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)
