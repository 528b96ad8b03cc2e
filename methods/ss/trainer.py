"""`ssbench train ss`: streams, stream adapters and the pruning map, lossless or shared (with LoRA on the base)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt

from specbench_ss.errors import UserError
from specbench_ss.options import Bounded
from specbench_ss.training.drafter_trainer import DrafterTrainer
from specbench_ss.training.targets import Targets, targets_option

if TYPE_CHECKING:
    from specbench_ss.engine.target import Target
    from specbench_ss.methods.ss.stream_config import StreamConfig
    from specbench_ss.training.drafter_training import Trained
    from specbench_ss.training.trainee import Trainee

SHARED_RANK = 32  # of the 2024 baseline
LOSSLESS_RANK = 8  # R_s, ACL sec. 2.1


@dataclass(frozen=True, slots=True)
class StreamsOptions(Bounded):
    """Options of `ssbench train ss`. Raises UserError for values beyond their bounds. -1: as the papers have it."""

    owner: ClassVar[str] = "ss"
    mode: Literal["lossless", "shared"] = field(
        default="lossless",
        metadata={
            "help": "lossless: the base stays as it is. shared: the base is changed by a LoRA that is trained together "
            "with the streams."
        },
    )
    gamma: Annotated[int, Ge(1)] = field(
        default=4, metadata={"help": "Number of streams: how many tokens are drafted after the next one."}
    )
    n_msa_layers: int = field(default=4, metadata={"help": "Number of top layers that streams pass (N_s)."})
    adapter_rank: int = field(
        default=-1,
        metadata={
            "help": "Rank of the stream adapters, which streams pass in place of the MLP. 0: they pass the MLP. "
            "-1: 8 in lossless mode, 0 in shared mode."
        },
    )
    init_rank: int = field(
        default=0, metadata={"help": "Rank of the map from main states to the first stream states. 0: the identity."}
    )
    prune_rank: int = field(default=8, metadata={"help": "Rank of the pruning map."})
    prune_layer: int = field(
        default=-1, metadata={"help": "Layer before which the tree is pruned. -1: the first one that streams pass."}
    )
    lora_rank: int = field(default=-1, metadata={"help": "Rank of the LoRA in shared mode. -1: 32."})
    main_attends_streams: bool | None = field(
        default=None,
        metadata={"help": "Whether the main stream sees its streams (eq. 3). Default: in shared mode only."},
    )
    stream_init: Literal["embedding", "rotation"] = field(
        default="embedding",
        metadata={"help": "What tells streams apart: an embedding of each, or values rotated by an angle of each."},
    )
    rotation_step: float = field(
        default=0.0,
        metadata={"help": "With rotation: angle in radians from one stream to the next. 0: the largest possible."},
    )
    keep_mlp: bool = field(
        default=False,
        metadata={
            "help": "Let streams pass the layers' own MLPs beside their adapters, which is not in the papers.",
            "later": True,
        },
    )
    root_rank: Annotated[int, Ge(0)] = field(
        default=0,
        metadata={
            "help": "Rank of the map by which streams learn the token that the main stream has decided, which is not "
            "in the papers. 0: they do not learn it.",
            "later": True,
        },
    )
    parent_rank: Annotated[int, Ge(0)] = field(
        default=0,
        metadata={
            "help": "Rank of the map by which the guesses of a node's children learn the node's token, which is not in "
            "the papers. 0: all nodes of a level have the same children.",
            "later": True,
        },
    )
    stream_position: Literal["ahead", "same"] = field(
        default="ahead",
        metadata={
            "help": "Position at which attention takes a stream to be. ahead: that of the token whose successor it "
            "predicts, so each stream has its own. same: the position of the token beside which it runs.",
            "later": True,
        },
    )
    targets: Targets = targets_option("tokens")
    alpha: Annotated[float, Gt(0)] = field(
        default=0.1, metadata={"help": "Weight of each stream's loss in shared mode, where the next token's has 1."}
    )
    alpha_ramp: Annotated[int, Ge(0)] = field(
        default=0,
        metadata={
            "help": "Steps in which alpha rises from 0 in shared mode, so that streams that know nothing yet do not "
            "distort the base. 0: it is the same from the start.",
            "later": True,
        },
    )
    embedding_lr: float = field(default=5e-2, metadata={"help": "Peak learning rate of the stream embeddings."})
    segment: Annotated[int, Ge(0)] = field(
        default=0,
        metadata={
            "help": "Save memory: so many positions of a row have their streams in memory at a time. 0: all of them."
        },
    )
    gradient_checkpointing: bool = field(
        default=False,
        metadata={
            "help": "Save memory by computing activations a second time in the backward pass.",
            "flag": "--gradient-checkpointing",
        },
    )

    def check_together(self) -> None:
        """What each mode has."""
        if self.mode == "shared" and self.targets != "tokens":
            raise UserError("ss: targets=distribution is for --mode lossless: in shared mode the base itself changes")
        if self.mode == "lossless" and self.alpha_ramp:
            raise UserError("ss: alpha_ramp is for --mode shared: in lossless mode all losses are the streams'")
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
            keep_mlp=o.keep_mlp,
            root_rank=o.root_rank,
            parent_rank=o.parent_rank,
            stream_position=o.stream_position,
            lora_rank=(SHARED_RANK if o.lora_rank < 0 else o.lora_rank) if shared else 0,
        )

    def build(self, target: Target, lr: float) -> Trainee:
        """Of the mode. Without --segment, --gradient-checkpointing takes all positions as one segment."""
        from specbench_ss.methods.ss.shared_training import SharedTrainee
        from specbench_ss.methods.ss.training import StreamsTrainee

        o = self.options
        segment = o.segment or (target.context_length if o.gradient_checkpointing else 0)
        if o.mode == "lossless":
            return StreamsTrainee(target, self.shape(), lr, o.embedding_lr, segment, targets=o.targets)
        return SharedTrainee(
            target,
            self.shape(),
            lr,
            lr,
            o.embedding_lr,
            segment,
            o.alpha,
            recompute=o.gradient_checkpointing,
            ramp=o.alpha_ramp,
        )

    def save(self, training: Trained, folder: Path, about: dict[str, Any]) -> None:
        """As `ss` or `ss-shared` reads it."""
        from specbench_ss.methods.ss.shared_training import SharedTrainee, save_shared
        from specbench_ss.models.checkpoint import write_checkpoint

        trainee = training.trainee
        if isinstance(trainee, SharedTrainee):
            save_shared(folder, trainee, about)
        else:
            write_checkpoint(folder, trainee.module, {**about, "streams": self.shape().as_dict()})

    @property
    def decoded_by(self) -> str:
        """Shared streams are read by `ss-shared`."""
        return "ss" if self.options.mode == "lossless" else "ss-shared"
