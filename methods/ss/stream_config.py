"""The shape of trained streams: saved beside their weights, checked against what a user asks for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le

from specbench_ss.errors import UserError
from specbench_ss.options import Bounded, recorded_values

StreamPosition = Literal["ahead", "same"]


@dataclass(frozen=True, slots=True)
class StreamConfig(Bounded):
    """Letters of the papers: gamma streams, N_s MSA layers, adapter_rank R_s, init_rank eta, prune_rank theta.

    adapter_rank: of the stream adapter that stands in place of the MLP; 0 = streams pass the layer's own MLP. keep_mlp:
    the adapter stands beside the MLP, which is not in the papers.
    init_rank: of f_eta (eq. 4), 0 = identity. prune_layer -1 = N - N_s. stream_init: what tells streams apart,
    embeddings P_j (eq. 4) or values turned by rotation_step * j radians (eq. 8; 0 = the largest, pi / 2 N_max).
    mode shared: LoRA of lora_rank in every layer, used by main and stream alike; main_attends_streams: eq. 3 of the
    ACL text (False = eq. 1 of 2024). root_rank: of the map by which finished streams learn the token that the main
    stream has decided meanwhile; 0 = they do not, as in the papers. parent_rank: of the map by which the guesses of a
    node's children learn the node's token; 0 = all nodes of a level have the same children, as in the papers.
    stream_position, which the papers leave open: stream j of a row at position i stands at i + j (ahead) or i (same).
    """

    owner: ClassVar[str] = "ss"
    gamma: Annotated[int, Ge(1)] = 4
    n_msa_layers: Annotated[int, Ge(1)] = 4
    adapter_rank: Annotated[int, Ge(0)] = 8
    init_rank: Annotated[int, Ge(0)] = 0
    prune_rank: Annotated[int, Ge(1)] = 8
    prune_layer: int = -1
    stream_init: Literal["embedding", "rotation"] = "embedding"
    rotation_step: Annotated[float, Ge(0), Le(math.pi / 2)] = 0.0
    mode: Literal["lossless", "shared"] = "lossless"
    main_attends_streams: bool = False
    lora_rank: Annotated[int, Ge(0)] = 0
    keep_mlp: bool = field(default=False, metadata={"later": True})
    root_rank: Annotated[int, Ge(0)] = field(default=0, metadata={"later": True})
    parent_rank: Annotated[int, Ge(0)] = field(default=0, metadata={"later": True})
    stream_position: StreamPosition = field(default="ahead", metadata={"later": True})

    def check_together(self) -> None:
        """What each mode has."""
        if self.mode == "lossless" and (self.main_attends_streams or self.lora_rank):
            raise UserError(
                "ss: main_attends_streams and lora_rank belong to mode shared; lossless leaves the base alone"
            )
        if self.keep_mlp and not self.adapter_rank:
            raise UserError("ss: without a stream adapter streams pass the MLP anyway: keep_mlp wants an adapter_rank")
        if self.mode == "shared" and not self.lora_rank:
            raise UserError("ss: mode shared trains LoRA adapters: lora_rank must be at least 1")

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, as `recorded_values` says, so that runs and trainings of before go on."""
        return recorded_values(self)

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
