"""The shape of trained streams: saved beside their weights, checked against what a user asks for."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from specbench_ss.errors import UserError

LEAST = {"gamma": 1, "n_msa_layers": 1, "prune_rank": 1, "adapter_rank": 0, "init_rank": 0, "lora_rank": 0}


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """Letters of the papers: gamma streams, N_s MSA layers, adapter_rank R_s, init_rank eta, prune_rank theta.

    adapter_rank: of the stream adapter that stands in place of the MLP; 0 = streams pass the layer's own MLP.
    init_rank: of f_eta (eq. 4), 0 = identity. prune_layer -1 = N - N_s. stream_init: what tells streams apart,
    embeddings P_j (eq. 4) or values turned by rotation_step * j radians (eq. 8; 0 = the largest, pi / 2 N_max).
    mode shared: LoRA of lora_rank in every layer, used by main and stream alike; main_attends_streams: eq. 3 of the
    ACL text (False = eq. 1 of 2024).
    """

    gamma: int = 4
    n_msa_layers: int = 4
    adapter_rank: int = 8
    init_rank: int = 0
    prune_rank: int = 8
    prune_layer: int = -1
    stream_init: Literal["embedding", "rotation"] = "embedding"
    rotation_step: float = 0.0
    mode: Literal["lossless", "shared"] = "lossless"
    main_attends_streams: bool = False
    lora_rank: int = 0

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                raise UserError(f"ss: {name} must be at least {least}, not {getattr(self, name)}")
        if self.mode == "lossless" and (self.main_attends_streams or self.lora_rank):
            raise UserError(
                "ss: main_attends_streams and lora_rank belong to mode shared; lossless leaves the base alone"
            )
        if self.mode == "shared" and not self.lora_rank:
            raise UserError("ss: mode shared trains LoRA adapters: lora_rank must be at least 1")
        if not 0 <= self.rotation_step <= math.pi / 2:
            raise UserError(f"ss: rotation_step must be 0 to pi/2, not {self.rotation_step}")

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    def angle(self, context: int) -> float:
        """epsilon of eq. 8: at most pi / 2 N_max, where N_max counts the longest sequence and the streams."""
        return self.rotation_step or math.pi / (2 * (context + self.gamma))

    def check_layers(self, layers: int, name: str = "ss") -> int:
        """N - N_s for a model of N layers. Raises UserError, naming the method, where streams or pruning do not fit."""
        lo = layers - self.n_msa_layers
        if lo < 0:
            raise UserError(f"{name}: {self.n_msa_layers} MSA layers, the model has {layers} layers")
        if self.prune_layer > lo:
            raise UserError(f"{name}: the pruning layer {self.prune_layer} is above layer {lo}, where streams begin")
        return lo
