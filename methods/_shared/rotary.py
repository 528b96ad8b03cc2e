"""Rotary embedding of drafters that are given positions, whatever length their configuration speaks of."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig

LENGTH_BOUND_ROPE = ("dynamic", "longrope")  # kinds whose frequencies change with the length of the sequence


def check_rope(config: PretrainedConfig) -> None:
    """Raises ValueError for a kind of rope that changes with the length of the text, and for one without angles."""
    rope = config.rope_parameters or {}
    kind = rope.get("rope_type")
    if kind in LENGTH_BOUND_ROPE:
        raise ValueError(f"rope of type {kind!r} changes with the length of the text, which no cache survives")
    with torch.device("cpu"):  # a method's `check` makes everything else without numbers
        made = Rotary(config, torch.device("cpu"))
    if not (bool(made.frequencies.isfinite().all()) and math.isfinite(made.scale)):
        raise ValueError(f"rope of {rope} turns by angles that are not finite")


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
