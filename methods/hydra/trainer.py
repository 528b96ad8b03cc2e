"""`ssbench train hydra`: sequential heads on the frozen base, by default with Hydra++'s prefix layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge

from specbench_ss.training.heads_trainer import MeasurableHeads, MeasurableHeadsTrainer
from specbench_ss.training.targets import Targets, targets_option

if TYPE_CHECKING:
    from specbench_ss.engine.target import Target
    from specbench_ss.methods.hydra.training import HydraTrainee


@dataclass(frozen=True, slots=True)
class HydraTraining(MeasurableHeads):
    """Options of `ssbench train hydra`; defaults make Hydra++ as published.

    Raises UserError for values beyond their bounds.
    """

    owner: ClassVar[str] = "hydra"
    layers: Annotated[int, Ge(1)] = field(default=4, metadata={"help": "Number of residual blocks of a head."})
    prefix: bool = field(default=True, metadata={"help": "Put one more decoder layer before the heads (Hydra++)."})
    own_unembed: bool = field(
        default=True, metadata={"help": "Give every head an LM head of its own, or let all use the base's."}
    )
    targets: Targets = targets_option("distribution")


class HydraTrainer(MeasurableHeadsTrainer):
    """Heads, the prefix layer, and accuracies, of which `hydra` builds its tree."""

    name = "hydra"
    summary = "Hydra heads on the frozen base, teacher loss, with Hydra++'s prefix layer"
    method = "hydra"
    weights_file = "hydra_lm_head.safetensors"
    Options = HydraTraining

    def build(self, target: Target, lr: float) -> HydraTrainee:
        """Heads that begin as the base's LM head."""
        from specbench_ss.methods.hydra.training import HydraTrainee

        o = self.options
        return HydraTrainee(target, o.heads, o.layers, o.prefix, o.own_unembed, lr, targets=o.targets)

    def loaded(self, target: Target, weights: str) -> HydraTrainee:
        """As `hydra` loads them."""
        from specbench_ss.methods.hydra.decoding import Hydra
        from specbench_ss.methods.hydra.training import HydraTrainee

        decoder = Hydra.load(target, Hydra.Options(weights=weights, tree="published"))
        return HydraTrainee(target, decoder.heads, tap=decoder.tap)
