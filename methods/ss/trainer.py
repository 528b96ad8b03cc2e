"""`ssbench train ss`: streams, stream adapters and the pruning map, lossless or shared (with LoRA on the base)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from specbench_ss.errors import UserError
from specbench_ss.training.drafter_trainer import DrafterTrainer

if TYPE_CHECKING:
    from specbench_ss.decoding.target import Target
    from specbench_ss.methods.ss.stream_config import StreamConfig
    from specbench_ss.training.drafter_training import DrafterTraining
    from specbench_ss.training.trainee import Trainee

SHARED_RANK = 32  # of the 2024 baseline
LOSSLESS_RANK = 8  # R_s, ACL sec. 2.1


@dataclass(frozen=True, slots=True)
class StreamsOptions:
    """Letters as in methods/ss/stream_config.py. -1 = what the papers use in the mode."""

    mode: Literal["lossless", "shared"] = field(
        default="lossless", metadata={"help": "lossless: the base stays; shared: LoRA trained with the streams"}
    )
    gamma: int = field(default=4, metadata={"help": "streams: tokens drafted after the next one"})
    n_msa_layers: int = field(default=4, metadata={"help": "top layers that streams pass, N_s"})
    adapter_rank: int = field(
        default=-1,
        metadata={"help": "stream adapter in place of the MLP; 0: the MLP; -1: 8, shared 0"},
    )
    init_rank: int = field(default=0, metadata={"help": "rank of the map before the streams; 0: identity"})
    prune_rank: int = field(default=8, metadata={"help": "rank of the pruning map"})
    prune_layer: int = field(default=-1, metadata={"help": "prune before this layer; -1: where streams begin"})
    lora_rank: int = field(default=-1, metadata={"help": "LoRA of shared mode; -1: 32"})
    main_attends_streams: bool | None = field(
        default=None, metadata={"help": "main sees its streams (eq. 3); none: in shared mode"}
    )
    stream_init: Literal["embedding", "rotation"] = field(
        default="embedding", metadata={"help": "what tells streams apart"}
    )
    rotation_step: float = field(default=0.0, metadata={"help": "radians a stream, for rotation; 0: the largest"})
    alpha: float = field(default=0.1, metadata={"help": "weight of a stream's loss in shared mode"})
    embedding_lr: float = field(default=5e-2, metadata={"help": "peak learning rate of the stream embeddings"})
    segment: int = field(default=0, metadata={"help": "positions a row whose streams are in memory at once; 0: all"})
    gradient_checkpointing: bool = field(
        default=False,
        metadata={"help": "compute activations twice to save memory", "flag": "--gradient-checkpointing"},
    )

    def __post_init__(self) -> None:
        if self.gamma < 1:
            raise UserError(f"ss: gamma must be at least 1, not {self.gamma}")
        if self.segment < 0:
            raise UserError(f"ss: segment must be 0 (all) or more, not {self.segment}")
        if self.alpha <= 0:
            raise UserError(f"ss: alpha must be above 0, not {self.alpha}")
        if self.mode == "lossless" and (self.main_attends_streams or self.lora_rank > 0):
            raise UserError(
                "ss: main_attends_streams and lora_rank are for --mode shared; lossless leaves the base alone"
            )


class StreamsTrainer(DrafterTrainer):
    """Streams of either mode."""

    name = "ss"
    summary = "speculative streams: adapters in the frozen base, or LoRA and streams together (--mode shared)"
    method = "ss"
    Options = StreamsOptions

    @property
    def ahead(self) -> int:
        """gamma."""
        return int(self.options.gamma)

    def shape(self) -> StreamConfig:
        """What is trained. Raises UserError for what cannot be."""
        from specbench_ss.methods.ss.stream_config import StreamConfig

        o, shared = self.options, self.options.mode == "shared"
        return StreamConfig(
            gamma=o.gamma,
            n_msa_layers=o.n_msa_layers,
            adapter_rank=o.adapter_rank if o.adapter_rank >= 0 else 0 if shared else LOSSLESS_RANK,
            init_rank=o.init_rank,
            prune_rank=o.prune_rank,
            prune_layer=o.prune_layer,
            stream_init=o.stream_init,
            rotation_step=o.rotation_step,
            mode=o.mode,
            main_attends_streams=shared if o.main_attends_streams is None else o.main_attends_streams,
            lora_rank=(SHARED_RANK if o.lora_rank < 0 else o.lora_rank) if shared else 0,
        )

    def build(self, target: Target, lr: float) -> Trainee:
        """Of the mode. Without --segment, --gradient-checkpointing takes all positions as one segment."""
        from specbench_ss.methods.ss.shared_training import SharedTrainee
        from specbench_ss.methods.ss.training import StreamsTrainee

        o = self.options
        segment = o.segment or (target.context_length if o.gradient_checkpointing else 0)
        if o.mode == "lossless":
            return StreamsTrainee(target, self.shape(), lr, o.embedding_lr, segment)
        return SharedTrainee(
            target, self.shape(), lr, lr, o.embedding_lr, segment, o.alpha, recompute=o.gradient_checkpointing
        )

    def save(self, training: DrafterTraining, folder: Path, about: dict[str, Any]) -> None:
        """As `ss` or `ss-shared` reads it."""
        from specbench_ss.methods.ss.shared_training import SharedTrainee, save_shared
        from specbench_ss.models.drafter_folder import write_checkpoint

        trainee = training.trainee
        if isinstance(trainee, SharedTrainee):
            save_shared(folder, trainee, about)
        else:
            write_checkpoint(folder, trainee.module, {**about, "streams": self.shape().as_dict()})

    @property
    def decoded_by(self) -> str:
        """Shared streams are read by `ss-shared`."""
        return "ss" if self.options.mode == "lossless" else "ss-shared"
